"""What may differ between two spellings of an item, and what may not: the design's table."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders import call, dump, message, output, reasoning, user
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.items import Fingerprinter, Item, item_type, produced_form

SECRET = b"0123456789abcdef"

EASY = {"role": "assistant", "content": "Hi"}
REFUSAL = {**EASY, "content": [{"type": "refusal", "refusal": "No"}]}
IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "data:1"}]}
CALL = call(1)

# What the model made, and an echo of it that means the same.
EQUAL: dict[str, tuple[Any, Any]] = {
    "key order": (CALL, dict(reversed(CALL.items()))),
    "null added": (CALL, {**CALL, "namespace": None, "async_": None, "caller": None}),
    "null in a part": (
        message("Hi"),
        {**EASY, "content": [{"type": "output_text", "text": "Hi", "parsed": None}]},
    ),
    "type implied by role": ({**EASY, "type": "message"}, EASY),
    "null type implied too": ({**EASY, "type": None}, EASY),
    "id, status, annotations, logprobs": (message("Hi"), EASY),
    "another id of a message": (message("Hi"), {**message("Hi"), "id": "msg_0000"}),
    "another id of a call": (CALL, {**CALL, "id": "fc_call_1"}),
    "created_by": (CALL, {**CALL, "created_by": {"agent": "x"}}),
    "parsed": (message("Hi"), {**message("Hi"), "parsed": {"a": 1}}),
    "parsed_arguments": (CALL, {**CALL, "parsed_arguments": {"path": "a.txt"}}),
    "codex's own keys": (CALL, {**CALL, "internal_chat_message_metadata_passthrough": {"t": 1}}),
    "create_time": (CALL, {**CALL, "create_time": 1.5}),
    "content as a string": (message("Hi"), EASY),
    "annotated text": (
        {**EASY, "content": [{"type": "output_text", "text": "Hi", "annotations": [{"url": "u"}]}]},
        EASY,
    ),
    "arguments spaced": (call(1, '{"a":1,"b":[2]}'), call(1, '{ "b" : [2], "a" : 1 }')),
    "arguments escaped": (call(1, '{"a":"\u00e9"}'), call(1, '{"a":"\\u00e9"}')),
    "arguments' fractions respelled": (call(1, '{"a":2e1}'), call(1, '{"a":20.0}')),
    "blank arguments": (call(1, ""), call(1, "{}")),
    "blank arguments, spaced": (call(1, " \n"), call(1, "{}")),
    "summary of sealed reasoning": (reasoning(1, summary="Hm"), reasoning(1)),
    "id of sealed reasoning": (reasoning(1), {**reasoning(1), "id": None, "content": None}),
    "empty texts of reasoning": (
        reasoning(1, sealed=None),
        {"type": "reasoning", "id": "rs_1", "encrypted_content": "", "content": []},
    ),
    "a compaction's id": (
        {"type": "compaction", "call_id": "c", "id": "cmp_1", "encrypted_content": "e"},
        {"type": "compaction", "call_id": "c", "encrypted_content": "e"},
    ),
}

DIFFERENT: dict[str, tuple[Any, Any]] = {
    "visible text": (message("Hi"), message("Hi.")),
    "white space in text": (message("Hi"), message("Hi ")),
    "another form of a letter": (message("\u00e9"), message("e\u0301")),
    "two parts for one": (
        message("Hi"),
        {
            **EASY,
            "content": [{"type": "output_text", "text": "H"}, {"type": "output_text", "text": "i"}],
        },
    ),
    "no content": (message("Hi"), {"role": "assistant", "content": None}),
    "content that is no list": (message("Hi"), {"role": "assistant", "content": {"text": "Hi"}}),
    "a part that is no object": ({**EASY, "content": ["Hi"]}, EASY),
    "refusal": (REFUSAL, {**EASY, "content": [{"type": "refusal", "refusal": "Never"}]}),
    "refusal for text": (REFUSAL, {**EASY, "content": "No"}),
    "role": (message("Hi"), {**message("Hi"), "role": "user"}),
    "call_id": (CALL, {**CALL, "call_id": "call_2"}),
    "name": (CALL, {**CALL, "name": "read"}),
    "namespace": ({**CALL, "namespace": "a"}, {**CALL, "namespace": "b"}),
    "namespace dropped": ({**CALL, "namespace": "a"}, CALL),
    "kind": (CALL, {**CALL, "type": "custom_tool_call"}),
    "unknown key": (CALL, {**CALL, "novel": 1}),
    "arguments": (call(1, '{"a":1}'), call(1, '{"a":2}')),
    "arguments: 1 and 1.0": (call(1, '{"a":1}'), call(1, '{"a":1.0}')),
    "arguments: 1 and true": (call(1, '{"a":1}'), call(1, '{"a":true}')),
    "arguments: long integers": (
        call(1, '{"a":9007199254740992}'),
        call(1, '{"a":9007199254740993}'),
    ),
    "arguments: order in a list": (call(1, '{"a":[1,2]}'), call(1, '{"a":[2,1]}')),
    "arguments: not JSON": (call(1, '{"a":'), call(1, '{"a": ')),
    "arguments: duplicate keys": (call(1, '{"a":1,"a":2}'), call(1, '{"a":2}')),
    "arguments: an object and its text": (call(1, "{}"), {**CALL, "arguments": {}}),
    "arguments: null and blank": (call(1, "{}"), {**CALL, "arguments": None}),
    "arguments: text and its quotation": (call(1, "{"), call(1, '"{"')),
    "input of a custom tool": (
        {"type": "custom_tool_call", "call_id": "c", "input": "{}"},
        {"type": "custom_tool_call", "call_id": "c", "input": "{ }"},
    ),
    "encrypted_content": (reasoning(1, sealed="a"), reasoning(1, sealed="b")),
    "encrypted_content's kind": (
        {"type": "reasoning", "encrypted_content": 5},
        {"type": "reasoning", "encrypted_content": "5"},
    ),
    "open reasoning's summary": (
        reasoning(1, sealed=None, summary="a"),
        reasoning(1, sealed=None, summary="b"),
    ),
    "phase": (message("Hi", phase="commentary"), message("Hi", phase="final_answer")),
    "phase dropped from the client's own history": (message("Hi", phase="commentary"), EASY),
    "phase that is no text": ({**EASY, "phase": 1}, EASY),
    # The id is all that tells these apart, and upstream looks their content up by it.
    "id of stored reasoning": (reasoning(1, sealed=None), reasoning(2, sealed=None)),
    "id of an image": (
        {"type": "image_generation_call", "id": "ig_1"},
        {"type": "image_generation_call", "id": "ig_2"},
    ),
    "id of a search": (
        {"type": "web_search_call", "id": "ws_1", "action": {}},
        {"type": "web_search_call", "id": "ws_2", "action": {}},
    ),
    "id of a reference": (
        {"type": "item_reference", "id": "msg_1"},
        {"type": "item_reference", "id": "msg_2"},
    ),
    "id of a reference without a type": ({"id": "msg_1"}, {"id": "msg_2"}),
    # The client's own items mean exactly what they say.
    "an output's text": (output(1, "a"), output(1, "b")),
    "an output's kind of value": (output(1, "[]"), {**output(1), "output": []}),
    "an output's id": ({**output(1), "id": "a"}, {**output(1), "id": "b"}),
    "an output's status": ({**output(1), "status": "completed"}, output(1)),
    "a user's text": (user("a"), user("b")),
    "a user's role": (user("a"), {**user("a"), "role": "developer"}),
    "a user message's id": ({**user("a"), "id": "a"}, user("a")),
    "an image": (
        IMAGE,
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:2"}]},
    ),
    "a part's id": (
        {"role": "user", "content": [{"type": "input_thing", "id": "a"}]},
        {"role": "user", "content": [{"type": "input_thing", "id": "b"}]},
    ),
    "a cache mark on a part": (
        {"role": "user", "content": [{"type": "input_text", "text": "a", "mark": {}}]},
        user("a"),
    ),
    "a user's text as the model's": (
        {"role": "user", "content": [{"type": "output_text", "text": "a"}]},
        user("a"),
    ),
    "an approval": (
        {"type": "mcp_approval_response", "approval_request_id": "a", "approve": True},
        {"type": "mcp_approval_response", "approval_request_id": "a", "approve": False},
    ),
}

OWN_EQUAL: dict[str, tuple[Any, Any]] = {
    "key order": (output(1), dict(reversed(output(1).items()))),
    "null added": (output(1), {**output(1), "id": None}),
    "text as a part": (
        user("a"),
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    ),
    "typed message": (user("a"), {"type": "message", **user("a")}),
    "typed reference": ({"id": "msg_1"}, {"type": "item_reference", "id": "msg_1"}),
}


def text(value: Any) -> str:
    """Return the canonical text of an item."""
    return Item(dump(value)).canonical_text


@pytest.mark.parametrize("pair", [*EQUAL.values(), *OWN_EQUAL.values()], ids=[*EQUAL, *OWN_EQUAL])
def test_spellings_that_mean_the_same(pair: tuple[Any, Any]) -> None:
    """What agents and SDKs were seen to change without a change of meaning is equal."""
    assert text(pair[0]) == text(pair[1])


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_differences_that_count(pair: tuple[Any, Any]) -> None:
    """What a model could see, or what we do not know, is never equal."""
    assert text(pair[0]) != text(pair[1])


def test_no_two_rows_of_the_table_meet() -> None:
    """Items of different kinds never share a canonical text by accident."""
    texts = [text(value) for pair in DIFFERENT.values() for value in pair]
    raws = {json.dumps(value) for pair in DIFFERENT.values() for value in pair}

    assert len(set(texts)) > len(raws) * 0.7


@pytest.mark.parametrize(
    "value", [v for pair in (*EQUAL.values(), *DIFFERENT.values()) for v in pair]
)
def test_the_form_of_an_echo_is_the_form_of_the_item(value: Any) -> None:
    """Reading an item twice, or with its decoration gone, changes nothing: forms are stable."""
    form = produced_form(Item(dump(value)).value)
    bare = {key: field for key, field in value.items() if key not in ("status", "logprobs")}

    again = produced_form(Item(json.dumps(bare, indent=2).encode()).value)

    assert again == form


@pytest.mark.parametrize(
    ("value", "kind", "produced"),
    [
        (EASY, "message", True),
        (user("a"), "message", False),
        (CALL, "function_call", True),
        (output(1), "function_call_output", False),
        (reasoning(1), "reasoning", True),
        ({"type": "novel_call"}, "novel_call", True),
        ({"type": "novel_output"}, "novel_output", False),
        ({"type": "item_reference", "id": "a"}, "item_reference", False),
        ({"id": "a"}, "item_reference", False),
        ({"content": "a"}, "", True),
        ({"type": "", "role": "user"}, "", True),
    ],
)
def test_kinds_of_items(value: Any, kind: str, *, produced: bool) -> None:
    """The type decides who made an item, and a message's role does."""
    item = Item(dump(value))

    assert item.type == item_type(item.value) == kind
    assert item.is_produced == produced


@pytest.mark.parametrize("kind", ["5", "1.5", "-0", "true", "{}", "[]"])
def test_a_type_must_be_text(kind: str) -> None:
    """What upstream makes of another type is not ours to guess; exact numbers are no texts."""
    item = Item(b'{"type":%b,"call_id":%b}' % (kind.encode(), kind.encode()))

    assert item.call_id is None
    with pytest.raises(ValueError, match="must be text"):
        _ = item.type


def test_an_item_names_its_call() -> None:
    """A call and its output share an id; other items have none."""
    assert Item(dump(CALL)).call_id == Item(dump(output(1))).call_id == "call_1"
    assert Item(dump(user("a"))).call_id is None
    assert Item(b'{"type":"function_call","call_id":5}').call_id is None


def test_an_item_does_not_show_its_content() -> None:
    """What is logged by accident holds no content."""
    assert repr(Item(b'{"role":"user","content":"secret"}')) == "<Item of 34 bytes>"


@pytest.mark.parametrize(
    "raw",
    [
        b"1",
        b'"a"',
        b"[]",
        b"null",
        b"{",
        b'{"a":1,"a":2}',
        b'{"type":5,"role":"user"}',
        b'{"type":["message"],"role":"user"}',
        b'{"role":"user","content":"\xff"}',
    ],
)
def test_items_that_cannot_be_read_are_refused(raw: bytes) -> None:
    """An item that readers may take differently is a ValueError, whatever is asked of it."""
    with pytest.raises(ValueError):  # noqa: PT011  the contract is the type
        Fingerprinter(SECRET).item(Item(raw))


ITEMS = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "function_call", "reasoning", "novel"])},
    optional={
        "role": st.sampled_from(["user", "assistant"]),
        "content": st.text(max_size=2) | st.none(),
        "arguments": st.sampled_from(["", "{}", "{ }", "{"]),
        "id": st.sampled_from(["a", "b"]),
        "call_id": st.sampled_from(["a", "b"]),
        "encrypted_content": st.sampled_from(["", "e"]),
    },
)


@given(ITEMS, ITEMS)
def test_fingerprints_are_equal_just_when_forms_are(one: Any, other: Any) -> None:
    """A fingerprint stands for its canonical text, also when it comes from the cache."""
    fingerprints = Fingerprinter(SECRET)
    same = text(one) == text(other)

    for _ in range(2):
        first, second = fingerprints.item(Item(dump(one))), fingerprints.item(Item(dump(other)))
        assert (first == second) == same


def meaning(item: Item) -> Any:
    """Return all that is asked of an item, or that it can't be read."""
    try:
        asked = (item.type, item.is_produced, item.call_id, item.canonical_text, item.value)
    except ValueError:
        return "refused"
    return item.raw, asked, item.compact_form


@given(st.lists(ITEMS, max_size=5), st.lists(ITEMS, max_size=5), st.booleans())
def test_an_item_that_is_remembered_means_what_its_bytes_mean(
    produced: list[Any], sent: list[Any], spaced: bool
) -> None:
    """Whatever models have produced, what a client sends is read as it stands."""
    fingerprints = Fingerprinter(SECRET)
    remembered = [Item(dump(value)) for value in produced]
    fingerprints.remember(remembered)
    texts = [dump(value) for value in (*produced, *sent)]
    if spaced:
        texts += [json.dumps(value).encode() for value in produced]

    for raw in (*texts, b"null", b"{", b'{"type":1}', b""):
        item = fingerprints.read(raw)
        assert item.raw == raw
        assert meaning(item) == meaning(Item(raw))
        other = Fingerprinter(SECRET)
        if meaning(item) != "refused":
            assert fingerprints.item(item) == other.item(Item(raw))


def test_items_are_remembered_within_bounds() -> None:
    """The very items come back, but of long ones and of many only what there is room for."""
    fingerprints = Fingerprinter(SECRET)
    short, long = Item(dump(CALL)), Item(dump(message("x" * 5000)))
    fingerprints.remember([short, long])
    assert fingerprints.read(short.raw) is short
    assert fingerprints.read(long.raw) is not long

    many = [Item(dump(message(f"no. {number}"))) for number in range(1000)]
    fingerprints.remember(many)
    assert fingerprints.read(many[-1].raw) is many[-1]
    assert len(fingerprints._produced) <= 256
    for item in (short, long, *many):
        assert meaning(fingerprints.read(item.raw)) == meaning(Item(item.raw))


def test_fingerprints_are_keyed() -> None:
    """Another process has other fingerprints for everything."""
    one, other = Fingerprinter(SECRET), Fingerprinter(SECRET[::-1])
    item = Item(dump(CALL))

    assert one.item(item) == Fingerprinter(SECRET).item(item) != other.item(item)
    assert one.setting(b"1") == Fingerprinter(SECRET).setting(b"1 ") != other.setting(b"1")
    assert one.root("a") != other.root("a")
    assert one.digest(b"a") != other.digest(b"a")


def test_a_short_secret_is_refused() -> None:
    """A secret that could be guessed is a mistake of the caller's."""
    with pytest.raises(ValueError, match="at least 16 bytes"):
        Fingerprinter(b"short")


def test_histories_belong_to_a_principal() -> None:
    """The same items are another history for another principal, and in another order."""
    fingerprints = Fingerprinter(SECRET)
    one, two = Item(dump(user("a"))), Item(dump(user("b")))

    def key(principal: str, *items: Item) -> bytes:
        history = fingerprints.root(principal)
        for item in items:
            history = fingerprints.extend(history, item)
        return history

    keys = [
        key("p"),
        key("q"),
        key("p", one),
        key("q", one),
        key("p", one, two),
        key("p", two, one),
    ]
    assert len(set(keys)) == len(keys)
    assert key("p", one, two) == key("p", one, two)


def test_parts_of_a_digest_do_not_run_together() -> None:
    """Where one part ends and the next begins is part of what is digested."""
    digest = Fingerprinter(SECRET).digest

    assert len({digest(b"ab", b"c"), digest(b"a", b"bc"), digest(b"abc"), digest(b"abc", b"")}) == 4


def test_a_setting_is_no_item() -> None:
    """The two caches keep apart what they hold of the same bytes."""
    fingerprints = Fingerprinter(SECRET)
    raw = dump({"role": "user", "content": [{"type": "input_text", "text": "a"}]})

    assert fingerprints.setting(raw) != fingerprints.item(Item(raw))
    assert fingerprints.setting(raw) != fingerprints.item(Item(raw))
