"""A body taken apart: its settings and items are the client's own bytes, or nothing is."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from builders import MODEL, body, call, dump, message, output, user
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.items import Fingerprinter, Item
from proxy.core.reasons import Reason
from proxy.core.request import Frame, TurnRequest, fold, parse_body, parse_tail

FINGERPRINTS = Fingerprinter(b"0123456789abcdef")
ROOT = FINGERPRINTS.root("p")


def read(raw: bytes) -> TurnRequest:
    """Take a body apart that must be readable."""
    request = parse_body(raw, ROOT, FINGERPRINTS)
    assert isinstance(request, TurnRequest), request
    return request


def follow(first: bytes, second: bytes) -> TurnRequest | None:
    """Take `second` apart after the prefix of `first`, with which it must begin."""
    prefix = read(first).prefix()
    assert prefix is not None
    assert second.startswith(first[: prefix.length])
    return parse_tail(second, prefix, FINGERPRINTS)


UNREADABLE = {
    "empty": b"",
    "a list": b"[]",
    "text": b'"input"',
    "truncated": body(user("a"))[:-1],
    "text after it": body(user("a")) + b"x",
    "BOM": b"\xef\xbb\xbf" + body(user("a")),
    "duplicate input": b'{"input":[],"input":"a"}',
    "duplicate input, escaped": b'{"input":"a","\\u0069nput":"a"}',
    "duplicate setting": b'{"input":"a","model":"a","model":"b"}',
    "duplicate inside a setting": b'{"input":"a","model":{"a":1,"a":2}}',
    "duplicate inside a setting of one response": b'{"input":"a","metadata":{"a":1,"a":2}}',
    "NaN setting": b'{"input":"a","temperature":NaN}',
    "setting not UTF-8": b'{"input":"a","model":"\xff"}',
    "setting of one response not UTF-8": b'{"input":"a","user":"\xff"}',
    "item not UTF-8": b'{"input":[{"role":"user","content":"\xff"}]}',
    "control character": b'{"input":[{"role":"user","content":"\x01"}]}',
    "number for an item": b'{"input":[1]}',
    "text for an item": b'{"input":["a"]}',
    "list for an item": b'{"input":[[]]}',
    "null for an item": b'{"input":[null]}',
    "trailing comma": b'{"input":[{"role":"user"},]}',
    "duplicate inside an item": b'{"input":[{"role":"user","content":"a","content":"b"}]}',
    "NaN inside an item": b'{"input":[{"a":NaN}]}',
    "deep item": b'{"input":[{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}]}",
    "deep setting": b'{"input":"a","x":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
}


@pytest.mark.parametrize("raw", UNREADABLE.values(), ids=UNREADABLE)
def test_a_body_in_doubt_is_left_alone(raw: bytes) -> None:
    """Where two readers might disagree the answer is a reason, and never an exception."""
    assert parse_body(raw, ROOT, FINGERPRINTS) is Reason.UNPARSABLE


@pytest.mark.parametrize(
    "raw",
    [b"{}", b'{"model":"m"}', b'{"input":null}', b'{"input":[]}', b'{"input":{}}', b'{"input":5}'],
)
def test_a_body_without_items_is_no_turn(raw: bytes) -> None:
    """There must be something to answer."""
    assert parse_body(raw, ROOT, FINGERPRINTS) is Reason.NO_INPUT


def test_text_is_one_user_message() -> None:
    """An `input` of text means what a list with one user message means."""
    request = read(b'{"model":"m","input":"a"}')

    assert request.history == read(b'{"input":[{"role":"user","content":"a"}]}').history
    assert request.full_message() == b'{"type":"response.create","input":"a","model":"m"}'
    assert request.prefix() is None


def test_histories_are_those_of_every_beginning() -> None:
    """Each item ends one history; spelling does not matter, principals do."""
    items = [user("a"), message("b"), user("c")]
    request = read(body(*items))

    assert request.item_count == 3
    assert request.histories == fold(ROOT, [Item(dump(item)) for item in items], FINGERPRINTS)
    for count in range(1, 4):
        assert request.histories[count] == read(body(*items[:count])).history
    assert (
        request.history
        == read(body(user("a"), {"role": "assistant", "content": "b"}, user("c"))).history
    )
    foreign = parse_body(body(*items), FINGERPRINTS.root("q"), FINGERPRINTS)
    assert isinstance(foreign, TurnRequest)
    assert not set(foreign.histories) & set(request.histories)


def test_half_an_emoji_is_no_obstacle() -> None:
    """Agents cut text anywhere; a lone surrogate is legal JSON and goes upstream as it is."""
    raw = b'{"input":[{"role":"user","content":"\\ud83d"}],"instructions":"\\ude00"}'

    assert read(raw).full_message() == (
        b'{"type":"response.create","input":[{"role":"user","content":"\\ud83d"}]'
        b',"instructions":"\\ude00"}'
    )


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, None),
        ({"background": True}, Reason.BACKGROUND),
        ({"background": False}, None),
        ({"background": None}, None),
        ({"background": 0}, Reason.BACKGROUND),
        ({"background_options": {}}, Reason.HTTP_ONLY_FIELD),
        ({"conversation": "c"}, Reason.CONVERSATION),
        ({"conversation": {"id": "c" * 2000}}, Reason.CONVERSATION),
        ({"conversation": None}, None),
        ({"type": "response.create"}, Reason.HTTP_ONLY_FIELD),
        ({"type": None}, Reason.HTTP_ONLY_FIELD),
        ({"generate": False}, Reason.HTTP_ONLY_FIELD),
        ({"stream_id": "a"}, Reason.HTTP_ONLY_FIELD),
        ({"stream": "yes"}, Reason.HTTP_ONLY_FIELD),
        ({"stream": 1}, Reason.HTTP_ONLY_FIELD),
        ({"stream_options": {"include_obfuscation": False}}, None),
        ({"stream": False, "stream_options": {}}, Reason.HTTP_ONLY_FIELD),
        ({"stream": ..., "stream_options": {}}, Reason.HTTP_ONLY_FIELD),
        ({"previous_response_id": 5}, Reason.HTTP_ONLY_FIELD),
        ({"previous_response_id": "resp_1"}, None),
    ],
)
def test_what_only_http_can_carry(settings: dict[str, Any], reason: Reason | None) -> None:
    """Fields that WebSocket mode has no place for, or reads apart, name why."""
    assert read(body(user("a"), **settings)).envelope.ineligible is reason


def test_what_is_read_of_the_settings() -> None:
    """The few settings that the proxy acts upon, and their defaults."""
    bare = read(b'{"input":"a"}').envelope
    assert (bare.stream, bare.stored, bare.model, bare.previous_response_id) == (
        False,
        True,
        None,
        None,
    )
    full = read(body(user("a"), store=False, previous_response_id="resp_1")).envelope
    assert (full.stream, full.stored, full.model, full.previous_response_id) == (
        True,
        False,
        MODEL,
        "resp_1",
    )
    assert read(body(user("a"), store=None)).envelope.stored
    assert read(body(user("a"), model="m" * 2000)).envelope.model is None
    assert full.size_bytes > len(body(user("a"))) - 60


@pytest.mark.parametrize(
    ("settings", "safe"),
    [
        ({}, True),
        ({"tools": ...}, True),
        ({"tools": None}, True),
        ({"tools": []}, True),
        ({"store": ...}, False),
        ({"store": True}, False),
        ({"tools": [{"type": "function"}, {"type": "mcp"}]}, False),
        ({"tools": [{"type": "web_search"}]}, False),
        ({"tools": [{}]}, False),
        ({"tools": [{"type": 5}]}, False),
        ({"tools": "all"}, False),
    ],
)
def test_which_turns_may_run_twice(settings: dict[str, Any], *, safe: bool) -> None:
    """Nothing stored and no tool that acts upstream: nobody notices a second run."""
    assert read(body(user("a"), **settings)).envelope.replay_safe == safe


def test_fields_of_one_response_have_no_fingerprint() -> None:
    """They may differ between the turns of a chain; nulls count as absent; all else is compared."""
    envelope = read(
        body(user("a"), temperature=1, metadata={"a": "b"}, novel=1, text=None)
    ).envelope

    assert set(envelope.fingerprints) == {"model", "instructions", "tools", "store", "novel"}


# Messages: nothing added, nothing taken away.

SETTINGS = st.dictionaries(
    st.sampled_from(["model", "tools", "text", "reasoning", "novel", 'k"\\', "\u00e9", "stream"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner),
        max_leaves=4,
    ),
    max_size=5,
)
ITEM = st.fixed_dictionaries({"role": st.just("user"), "content": st.text(max_size=5)})


@given(SETTINGS, st.lists(ITEM, min_size=1, max_size=4), st.booleans(), st.sampled_from([None, 1]))
def test_a_full_message_is_the_body(
    settings: dict[str, Any], items: list[Any], ascii_only: bool, indent: int | None
) -> None:
    """A full message parsed has the body's values in the body's order, plus its type."""
    whole = {**dict(list(settings.items())[:2]), "input": items, **settings}
    raw = json.dumps(whole, ensure_ascii=ascii_only, indent=indent).encode()
    request = read(raw)

    sent = request.full_message()

    expected = {
        key: value
        for key, value in whole.items()
        if key not in ("input", "stream") and value is not None
    }
    assert list(json.loads(sent).items()) == [
        ("type", "response.create"),
        ("input", items),
        *expected.items(),
    ]
    assert len(sent) == request.full_message_bytes


@given(SETTINGS, st.lists(ITEM, min_size=1, max_size=4), st.text(max_size=4))
def test_a_delta_message_is_the_rest_of_the_body(
    settings: dict[str, Any], items: list[Any], name: str
) -> None:
    """A delta message has the same settings, and the items' own bytes after the response's id."""
    request = read(json.dumps({"input": items, **settings}, indent=1).encode())

    sent = request.delta_message(name, request.items[1:])

    full = json.loads(request.full_message())
    assert json.loads(sent) == {**full, "input": items[1:], "previous_response_id": name}
    assert b",".join(item.raw for item in request.items[1:]) in sent
    assert len(sent) <= request.delta_message_bytes(name, request.items[1:])


def test_transport_fields_stay_behind() -> None:
    """`stream`, `background` and nulls are not sent; numbers keep their spelling."""
    raw = b'{"stream":true,"input":"a","background":false,"top_p":1.50,"user":null}'

    sent = read(raw).full_message()

    assert sent == b'{"type":"response.create","input":"a","top_p":1.50}'


def test_a_chained_request_goes_as_it_is() -> None:
    """The message of a client that chains by itself has its own id and its own input."""
    request = read(b'{"previous_response_id":"resp_\\u0031","input":[],"model":"m"}')

    assert request.full_message() == b'{"type":"response.create","input":[],"model":"m"}'
    assert request.chained_message() == (
        b'{"type":"response.create","previous_response_id":"resp_1","input":[],"model":"m"}'
    )
    assert request.prefix() is None


# Prefixes.


def test_what_follows_a_prefix_is_all_that_is_read() -> None:
    """After a known beginning only the new items are looked at, and the settings are the same."""
    first = body(user("a"))
    second = body(user("a"), call(1), output(1))
    request = follow(first, second)

    assert request is not None
    assert request.envelope is not read(first).envelope
    assert (request.base_count, len(request.items), request.item_count) == (1, 2, 3)
    whole = read(second)
    assert request.history == whole.history
    assert request.full_message() == whole.full_message()
    assert request.prefix() == whole.prefix()


def test_bytes_that_change_at_every_turn_are_not_kept() -> None:
    """What stands around the items is remembered as long as it stays the same."""

    def turn(mark: str, *items: dict[str, Any]) -> bytes:
        return body(user("a"), *items, model="m", client_metadata={"id": mark})

    steps = [turn("1"), turn("2", user("b")), turn("3", user("b"), user("c"))]
    steps += [turn("3", user("b"), user("c"), user("d"))]
    prefixes = [read(steps[0]).prefix()]
    for raw in steps[1:]:
        assert prefixes[-1] is not None
        request = parse_tail(raw, prefixes[-1], FINGERPRINTS)
        assert request is not None
        assert request.full_message() == read(raw).full_message()
        prefixes.append(request.prefix())

    kept = [prefix and prefix.frame.suffix is not None for prefix in prefixes]
    assert kept == [True, False, False, True]


def test_white_space_around_the_last_item_is_no_part_of_a_prefix() -> None:
    """A prefix ends with its last item, however the list is laid out."""
    raw = json.dumps({"input": [user("a")], "model": "m"}, indent=2).encode()
    prefix = read(raw).prefix()

    assert prefix is not None
    assert raw[: prefix.length].endswith(b"}")
    assert prefix.frame.suffix is not None
    assert prefix.frame.suffix.lstrip().startswith(b"]")


def test_a_retry_has_no_new_items() -> None:
    """The same body again is its own prefix."""
    request = follow(body(user("a")), body(user("a")))

    assert request is not None
    assert not request.items
    assert request.histories == [read(body(user("a"))).history]


def test_other_settings_after_the_list_are_read_anew() -> None:
    """Settings behind `input` may change between turns; those before it are as they were."""
    first = b'{"model":"m","input":[{"role":"user","content":"a"}],"user":"x"}'
    second = b'{"model":"m","input":[{"role":"user","content":"a"} , {"id":"b"}] ,"top_p":1}'
    request = follow(first, second)

    assert request is not None
    assert [setting.key for setting in request.envelope.settings] == ["model", "top_p"]
    assert request.full_message() == read(second).full_message()
    emptied = follow(first, b'{"model":"m","input":[{"role":"user","content":"a"}]}')
    assert emptied is not None
    assert [setting.key for setting in emptied.envelope.settings] == ["model"]


START = b'{"model":"m","input":[{"role":"user","content":"a"}'
UNPROVEN = {
    "trailing comma": START + b',],"top_p":1}',
    "trailing comma, same suffix": START + b", ]}",
    "no comma": START + b'{"id":"b"}]}',
    "no list end": START + b"}",
    "duplicate input": START + b'],"input":[]}',
    "duplicate input, escaped": START + b'],"\\u0069nput":[]}',
    "duplicate of a setting before": START + b'],"model":"n"}',
    "item that is no object": START + b",1]}",
    "item in doubt": START + b',{"a":1,"a":2}]}',
    "list closed in the middle": START + b'],"a":[1]}]}',
    "deep item": START + b',{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}]}",
    "truncated": START + b',{"id":"b"',
    "setting in doubt": START + b'],"top_p":NaN}',
    "text after the end": START + b"]}x",
}


@pytest.mark.parametrize("raw", UNPROVEN.values(), ids=UNPROVEN)
def test_a_rest_that_proves_nothing_is_read_as_a_whole(raw: bytes) -> None:
    """The way of the prefix says None, never something else than the whole body would."""
    assert follow(START + b"]}", raw) is None


def test_a_body_cut_off_where_it_looks_complete() -> None:
    """An item may end as the whole body does; what is cut off after it is no retry."""
    whole = b'{"input":[{"role":"user","content":[1]}]}'

    assert follow(whole, whole) is not None
    assert follow(whole, whole[:-2]) is None


def test_compactions_stay_in_sight() -> None:
    """A trigger anywhere in the history is known later on, however it is spelled."""
    trigger = b'{"type":"compaction\\u005ftrigger"}'
    first = b'{"input":[{"role":"user","content":"a"}]}'
    second = first[:-2] + b"," + trigger + b"]}"
    third = second[:-2] + b',{"role":"user","content":"\\u0041\\u00e9"}]}'

    assert not read(first).compacts
    assert not read(third.replace(trigger, b'{"type":"compaction_triggers"}')).compacts
    assert read(second).compacts
    for earlier, later in ((first, second), (second, third)):
        request = follow(earlier, later)
        assert request is not None
        assert request.compacts


def test_a_key_that_utf8_cannot_spell_is_never_sent() -> None:
    """Half an emoji as a setting's name can't be written again: that is a ValueError."""
    request = read(b'{"input":"a","\\ud83d":1}')

    with pytest.raises(ValueError, match="surrogates"):
        _ = request.full_message_bytes


def test_msgspec_reports_what_it_can_not_read_as_a_value_error() -> None:
    """All that a hostile body can raise is caught under one name."""
    assert issubclass(msgspec.DecodeError, ValueError)


# Frames.


def frame_of(raw: bytes, principal: str = "p", fingerprints: Fingerprinter = FINGERPRINTS) -> Frame:
    """Return the frame that is remembered of a body."""
    request = parse_body(raw, fingerprints.root(principal), fingerprints)
    assert isinstance(request, TurnRequest)
    prefix = request.prefix()
    assert prefix is not None
    assert prefix.frame.envelope is request.envelope
    return prefix.frame


def test_conversations_with_the_same_settings_share_a_frame() -> None:
    """Whatever their items; other settings, other white space or another principal don't."""
    first = frame_of(body(user("a")))

    assert frame_of(body(user("b"), message("c"), user("d"))) is first
    others = [
        frame_of(body(user("a"), store=True)),
        frame_of(body(user("a"), user="u")),
        frame_of(body(user("a"))[:-1] + b" }"),
        frame_of(body(user("a")).replace(b'{"input"', b'{ "input"')),
        frame_of(body(user("a")), "q"),
    ]
    assert len({id(frame) for frame in [first, *others]}) == 6
    assert first.envelope == others[-1].envelope


def test_a_frame_is_held_by_those_who_use_it() -> None:
    """When its last conversation is forgotten a frame goes too."""
    fingerprints = Fingerprinter(b"0123456789abcdef")
    frame = frame_of(body(user("a")), fingerprints=fingerprints)
    assert list(fingerprints.frames.values()) == [frame]

    del frame
    assert not fingerprints.frames


def test_settings_that_change_once_make_one_frame_for_all() -> None:
    """Conversations whose settings change in the same way after the first turn share both."""
    frames = []
    for text in "ab":
        turns = [
            body(user(text)),
            body(user(text), message("x"), user("b"), tool_choice="none"),
            body(user(text), message("x"), user("b"), message("y"), user("c"), tool_choice="none"),
        ]
        prefix = read(turns[0]).prefix()
        for turn in turns[1:]:
            assert prefix is not None
            request = parse_tail(turn, prefix, FINGERPRINTS)
            assert request is not None
            prefix = request.prefix()
        assert prefix is not None
        frames.append(prefix.frame)

    assert frames[0] is frames[1]
    assert frames[0].envelope is not None


def test_preparing_changes_nothing() -> None:
    """What is computed ahead is what would be computed later, trouble included."""
    ahead, later = read(body(user("a"), user("b"))), read(body(user("a"), user("b")))
    ahead.prepare()
    assert ahead.prefix() == later.prefix()
    assert ahead.prefix() is ahead.prefix()

    prefix = later.prefix()
    assert prefix is not None
    deep = b'{"a":' * 200 + b"1" + b"}" * 200
    request = parse_tail(
        body(user("a"), user("b")).replace(b"]", b",%b]" % deep, 1), prefix, Deep()
    )
    assert request is not None
    request.prepare()
    with pytest.raises(ValueError, match="deep"):
        _ = request.history


class Deep(Fingerprinter):
    """Finds every item too deep."""

    def __init__(self) -> None:
        super().__init__(b"0123456789abcdef")

    def item(self, item: Item) -> bytes:
        """Raise ValueError."""
        raise ValueError("nested too deeply")
