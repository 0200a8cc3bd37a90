"""When a request continues a head: every measured way to echo an answer, and every doubt."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from builders import body, call, dump, message, output, reasoning, user

from proxy.core.history import (
    Answer,
    Gap,
    Head,
    Match,
    MatchingPolicy,
    Mismatch,
    Outcome,
    changed_settings,
    match,
    new_head,
    pending_calls,
    read_output,
)
from proxy.core.items import Fingerprinter, Item
from proxy.core.reasons import Reason
from proxy.core.request import Envelope, TurnRequest, parse_body

if TYPE_CHECKING:
    from collections.abc import Mapping

FINGERPRINTS = Fingerprinter(b"0123456789abcdef")
DEFAULT = MatchingPolicy()
STRICT = MatchingPolicy(ignore_missing_reasoning=False)
LENIENT = MatchingPolicy(ignore_changed_tools=True, ignore_dropped_text=True)


def request(*items: Any, **settings: Any) -> TurnRequest:
    """Return the request with these items."""
    made = parse_body(body(*items, **settings), FINGERPRINTS.root("p"), FINGERPRINTS)
    assert isinstance(made, TurnRequest)
    return made


def envelope(**settings: Any) -> Envelope:
    """Return the settings of a request."""
    return request(user("a"), **settings).envelope


def settings(**given: Any) -> Mapping[str, bytes]:
    """Return what two turns of a chain must have in common, for these settings."""
    return envelope(**given).fingerprints


def head_of(answer: list[Any], *history: Any, **settings: Any) -> Head:
    """Return the head of a response with this output."""
    made = new_head(
        request(*(history or [user("a")]), **settings),
        Answer("resp_1", (), [dump(item) for item in answer]),
        principal="p",
        connection_id=1,
    )
    assert made is not None
    return made


def judge(answer: list[Any], following: list[Any], policy: MatchingPolicy = DEFAULT) -> Outcome:
    """Compare what follows a head's history with the head."""
    return match(head_of(answer), envelope(), [Item(dump(item)) for item in following], policy)


def without(item: Any, *keys: str) -> Any:
    """Return an item without some of its keys."""
    return {key: value for key, value in item.items() if key not in keys}


def reference(name: str) -> Any:
    """Return a reference to an item that upstream knows."""
    return {"type": "item_reference", "id": name}


R, M, C = reasoning(1, summary="Hm"), message("Looking.", phase="commentary"), call(1)
D = call(2, '{"path": "b.txt", "lines": [1, 2.0]}')
ANSWER = [R, M, C, D]
OUTPUTS = [output(1), output(2)]
BARE_M = {"role": "assistant", "content": "Looking."}
PARTS_M = {"role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]}
BARE_C, BARE_D = without(C, "id", "status"), without(D, "id", "status")
COMPACT_D = {**BARE_D, "arguments": '{"path":"b.txt","lines":[1,2.0]}'}

# Measured: what each client makes of `ANSWER`.
ECHOES: dict[str, list[Any]] = {
    "openai SDK: verbatim": ANSWER,
    "openai SDK: model_dump": [
        {**R, "content": None, "status": None},
        {**M, "agent": None},
        {**C, "namespace": None, "caller": None, "async_": None},
        {**D, "namespace": None, "caller": None, "async_": None},
    ],
    "openai SDK: stream helper": [
        R,
        {**M, "content": [{**M["content"][0], "parsed": None}]},
        {**C, "parsed_arguments": {"path": "a.txt"}},
        {**D, "parsed_arguments": None},
    ],
    "Agents SDK: shuffled keys": [dict(reversed(item.items())) for item in ANSWER],
    "Codex": [
        {**without(R, "id"), "content": None},
        {**PARTS_M, "type": "message", "phase": "commentary"},
        BARE_C,
        BARE_D,
    ],
    "Codex 0.80: no phase": [without(R, "id"), PARTS_M, BARE_C, BARE_D],
    "opencode": [without(R, "id"), {**PARTS_M, "phase": "commentary"}, BARE_C, COMPACT_D],
    "AI SDK: text": [R, {**BARE_M, "phase": "commentary"}, BARE_C, COMPACT_D],
    "AI SDK: references": [reference("rs_1"), reference("msg_1"), BARE_C, COMPACT_D],
    "AI SDK 5: references": [
        reference("rs_1"),
        reference("msg_1"),
        reference("fc_1"),
        reference("fc_2"),
    ],
    "references without a type": [{"id": "rs_1"}, {"id": "msg_1"}, BARE_C, BARE_D],
    "Copilot": [
        R,
        {**M, "id": "9c5d1f2e"},
        {**C, "id": "fc_call_1"},
        {**D, "id": "fc_call_2"},
    ],
    "Continue": [{**without(M, "phase"), "id": "msg_0000"}, BARE_C, COMPACT_D],
    "Cline: no reasoning": [PARTS_M, BARE_C, COMPACT_D],
    "llm: escaped and spaced": [
        R,
        BARE_M,
        {**BARE_C, "arguments": '{"path" : "\\u0061.txt"}'},
        BARE_D,
    ],
    "Haystack: calls first": [R, BARE_C, BARE_D, BARE_M],
    "agent-framework: reasoning last": [BARE_C, BARE_D, BARE_M, R],
    "summary dropped": [without(R, "summary"), BARE_M, BARE_C, BARE_D],
    "summary rewritten": [reasoning(1, summary="Other"), BARE_M, BARE_C, BARE_D],
}


@pytest.mark.parametrize("echo", ECHOES.values(), ids=ECHOES)
def test_every_measured_echo_is_followed(echo: list[Any]) -> None:
    """The answer comes back in the client's spelling; what follows it is the delta."""
    outcome = judge(ANSWER, [*echo, *OUTPUTS])

    assert isinstance(outcome, Match), outcome
    assert outcome.echoed == len(echo)
    assert [json.loads(item.raw) for item in outcome.delta] == OUTPUTS


def test_what_follows_the_outputs_is_new_as_well() -> None:
    """A user who speaks up, or a client that adds its own assistant text, is part of the delta."""
    following = [*OUTPUTS, user("And?"), {"role": "assistant", "content": "Well."}, user("So.")]

    outcome = judge(ANSWER, [*ANSWER, *following])

    assert isinstance(outcome, Match)
    assert [json.loads(item.raw) for item in outcome.delta] == following


# Echoes that are another history, with the reason.
CHANGED: dict[str, tuple[list[Any], Reason]] = {
    "nothing of it": ([], Reason.ANSWER_CHANGED),
    "another text": ([R, {**BARE_M, "content": "Looking!"}, C, D], Reason.ANSWER_CHANGED),
    "smolagents: calls as text": (
        [R, M, {"role": "assistant", "content": "Calling tools"}],
        Reason.ANSWER_CHANGED,
    ),
    "open-interpreter: call ids rewritten": (
        [R, M, {**C, "call_id": "toolu_1"}, {**D, "call_id": "toolu_2"}],
        Reason.ANSWER_CHANGED,
    ),
    "arguments edited": ([R, M, C, {**D, "arguments": "{}"}], Reason.ANSWER_CHANGED),
    "integers made fractions": (
        [R, M, C, {**D, "arguments": '{"path": "b.txt", "lines": [1.0, 2.0]}'}],
        Reason.ANSWER_CHANGED,
    ),
    "a call dropped": ([R, M, C], Reason.ANSWER_CHANGED),
    "all calls dropped": ([R, M], Reason.ANSWER_CHANGED),
    "a call doubled for another": ([R, M, C, C], Reason.ANSWER_CHANGED),
    "CrewAI: text dropped": ([R, C, D], Reason.TEXT_DROPPED),
    "text and reasoning dropped": ([C, D], Reason.TEXT_DROPPED),
    "phase changed": ([R, {**M, "phase": "final_answer"}, C, D], Reason.ANSWER_CHANGED),
    "interleaved": ([R, M, C, output(1), D], Reason.ANSWER_CHANGED),
    "calls in another order": ([R, M, D, C], Reason.ANSWER_CHANGED),
    "a question in between": ([R, M, user("b"), C, D], Reason.ANSWER_CHANGED),
    "foreign reasoning": ([reasoning(9), M, C, D], Reason.ANSWER_CHANGED),
    "a reference to something else": ([reference("rs_9"), M, C, D], Reason.ANSWER_CHANGED),
    "the model's text as the user's": ([R, user("Looking."), C, D], Reason.ANSWER_CHANGED),
}


@pytest.mark.parametrize(("echo", "reason"), CHANGED.values(), ids=CHANGED)
def test_a_changed_answer_is_another_history(echo: list[Any], reason: Reason) -> None:
    """What the client edited, dropped or moved must reach upstream: the history goes in full."""
    outcome = judge(ANSWER, [*echo, *OUTPUTS])

    assert isinstance(outcome, Mismatch)
    assert outcome.reason is reason


def test_reasoning_that_the_client_drops() -> None:
    """Upstream keeps its own by default, all or some of it; the strict policy sends in full."""
    answer = [reasoning(1), reasoning(2), C]
    for kept in ([], [reasoning(1)], [reasoning(2)]):
        following = [*kept, C, output(1)]
        assert isinstance(judge(answer, following), Match)
        assert judge(answer, following, STRICT) == Mismatch(Reason.REASONING_DROPPED)
    assert isinstance(judge(answer, [*answer, output(1)], STRICT), Match)


def test_the_order_of_like_things_counts() -> None:
    """Two texts, or two calls of whatever kind, are not the same the other way round."""
    one, two = message("one"), message("two", number=2)
    custom = call(3, kind="custom_tool_call")
    outputs = [output(1), output(3, kind="custom_tool_call_output")]
    answer = [one, C, two, custom]

    assert isinstance(judge(answer, [*answer, *outputs]), Match)
    assert isinstance(judge(answer, [C, custom, one, two, *outputs]), Match)
    assert isinstance(judge(answer, [two, C, one, custom, *outputs]), Mismatch)
    assert isinstance(judge(answer, [one, custom, two, C, *outputs]), Mismatch)
    assert isinstance(judge([one, one], [one, one, user("b")]), Match)


def test_dropped_text_by_policy() -> None:
    """Text beside calls may stay upstream if the operator says so; an answer's only text never."""
    assert isinstance(judge(ANSWER, [C, D, *OUTPUTS], LENIENT), Match)
    assert judge([M], [user("b")], LENIENT) == Mismatch(Reason.ANSWER_CHANGED)
    assert judge([M, C], [user("b")], LENIENT) == Mismatch(Reason.ANSWER_CHANGED)


# Reasoning without encrypted content: upstream looks it up by its id.
OPEN = reasoning(1, sealed=None, summary="Hm")
OPEN_ECHOES: dict[str, tuple[Any, bool]] = {
    "verbatim": (OPEN, True),
    "summary dropped, same id": (without(OPEN, "summary"), True),
    "id dropped, same summary": (without(OPEN, "id"), True),
    "summary edited": ({**OPEN, "summary": [{"type": "summary_text", "text": "Ha"}]}, False),
    "another id": ({**OPEN, "id": "rs_2"}, False),
    "sealed meanwhile": ({**OPEN, "encrypted_content": "x"}, False),
    "nothing but the kind": ({"type": "reasoning", "summary": []}, False),
}


@pytest.mark.parametrize(("echo", "same"), OPEN_ECHOES.values(), ids=OPEN_ECHOES)
def test_open_reasoning(echo: Any, *, same: bool) -> None:
    """Its id or its texts must show that it is the same; else the answer was changed."""
    assert isinstance(judge([OPEN, C], [echo, C, output(1)]), Match if same else Mismatch)


def test_items_known_by_their_id_alone() -> None:
    """An image or a search of another id is another one, though it looks the same."""
    image = {"type": "image_generation_call", "id": "ig_1", "status": "completed"}

    assert isinstance(judge([image], [image, user("b")]), Match)
    assert isinstance(judge([image], [without(image, "id"), user("b")]), Match)
    assert isinstance(judge([image], [{**image, "id": "ig_2"}, user("b")]), Mismatch)


# What may follow.

DELTAS: dict[str, tuple[list[Any], list[Any], Reason]] = {
    "nothing": ([M], [], Reason.NOTHING_NEW),
    "call unanswered": ([C], [user("b")], Reason.CALL_UNANSWERED),
    "one of two unanswered": ([C, D], [output(1)], Reason.CALL_UNANSWERED),
    "unknown kind of call unanswered": (
        [call(1, kind="novel_call")],
        [user("b")],
        Reason.CALL_UNANSWERED,
    ),
    "call and no output": ([C], [call(1, '{"other":1}')], Reason.CALL_UNANSWERED),
    "compaction": ([M], [{"type": "compaction", "encrypted_content": "x"}], Reason.UNSAFE_ITEM),
    "compaction by another name": ([M], [{"type": "context_compaction"}], Reason.UNSAFE_ITEM),
    "compaction trigger": ([M], [{"type": "compaction_trigger"}], Reason.UNSAFE_ITEM),
    "additional tools": ([M], [{"type": "additional_tools", "tools": []}], Reason.UNSAFE_ITEM),
    "reasoning": ([M], [user("b"), reasoning(2), message("c")], Reason.HISTORY_CHANGED),
    "reference": ([M], [reference("msg_8")], Reason.UNSAFE_ITEM),
    "reference without a type": ([M], [{"id": "msg_8"}], Reason.UNSAFE_ITEM),
    "an answer that we never saw": ([], [M, user("b")], Reason.ANSWER_CHANGED),
}


@pytest.mark.parametrize(("answer", "delta", "reason"), DELTAS.values(), ids=DELTAS)
def test_what_can_not_follow_a_chain(answer: list[Any], delta: list[Any], reason: Reason) -> None:
    """A call left open, or an item that means something else behind a chain, is sent in full."""
    assert judge(answer, [*answer, *delta]) == Mismatch(reason)


def test_calls_of_any_kind_with_their_outputs() -> None:
    """Whatever has a call id and is answered is answered, known to us or not."""
    for kind in ("function_call", "custom_tool_call", "novel_call"):
        made = call(1, kind=kind)
        answered = output(1, kind=f"{kind}_output")
        assert isinstance(judge([made], [made, answered]), Match)


def test_pending_calls() -> None:
    """Calls that upstream answered itself wait for nobody."""
    hosted = [call(1, kind="shell_call"), output(1, kind="shell_call_output")]
    calls = [dump(item) for item in [R, M, C, call(3, kind="novel_call"), *hosted]]

    assert pending_calls(read_output(calls)) == {"call_3"}
    assert pending_calls(read_output(calls[:3])) == {"call_1"}
    assert pending_calls(()) == set()


def test_an_empty_answer_is_continued() -> None:
    """A response without output, as after `generate: false`, adds nothing to the history."""
    assert isinstance(judge([], [user("b")]), Match)


def test_the_same_request_again_repeats() -> None:
    """A request with nothing behind the head's history was answered before."""
    assert judge([M], []) == Mismatch(Reason.REPEATED)


def test_a_compacted_history_is_not_continued() -> None:
    """What upstream holds after a trigger is not what the client sent."""
    head = head_of([M], user("a"), {"type": "compaction_trigger"})

    outcome = match(head, envelope(), [Item(dump(M)), Item(dump(user("b")))], DEFAULT)

    assert outcome == Mismatch(Reason.COMPACTED)


@pytest.mark.parametrize("raw", [b'{"type":5,"role":"user"}', b'{"a":1,"a":1}', b"1"])
def test_an_unreadable_item_is_a_value_error(raw: bytes) -> None:
    """Doubt about an item is the caller's cue to leave the request alone."""
    with pytest.raises(ValueError):  # noqa: PT011  the contract is the type
        match(head_of([M]), envelope(), [Item(dump(M)), Item(raw)], DEFAULT)


# Settings.

MAY_DIFFER: dict[str, Any] = {
    "stream": False,
    "stream_options": {"include_obfuscation": False},
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_output_tokens": 99,
    "max_tool_calls": 3,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_logprobs": 2,
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "client_metadata": {"a": "b"},
    "user": "u",
    "safety_identifier": "s",
    "background": False,
}
MUST_BE_EQUAL: dict[str, tuple[Any, Reason]] = {
    "model": ("gpt-6", Reason.CHANGED_MODEL),
    "instructions": ("Be long.", Reason.CHANGED_INSTRUCTIONS),
    "tools": ([], Reason.CHANGED_TOOLS),
    "reasoning": ({"effort": "high"}, Reason.CHANGED_SETTINGS),
    "text": ({"verbosity": "low"}, Reason.CHANGED_SETTINGS),
    "store": (True, Reason.CHANGED_SETTINGS),
    "truncation": ("auto", Reason.CHANGED_SETTINGS),
    "context_management": ([{"type": "compaction"}], Reason.CHANGED_SETTINGS),
    "service_tier": ("flex", Reason.CHANGED_SETTINGS),
    "prompt_cache_key": ("k", Reason.CHANGED_SETTINGS),
    "prompt": ({"id": "pmpt_1"}, Reason.CHANGED_SETTINGS),
    "novel": (1, Reason.CHANGED_SETTINGS),
}


@pytest.mark.parametrize("key", MAY_DIFFER)
def test_fields_of_one_response_may_differ(key: str) -> None:
    """They are sent again anyway, with either value, there or not."""
    for old, new in (({}, {key: MAY_DIFFER[key]}), ({key: MAY_DIFFER[key]}, {})):
        assert changed_settings(settings(**old), settings(**new), DEFAULT) is None


@pytest.mark.parametrize("key", MUST_BE_EQUAL)
def test_all_other_fields_must_be_equal(key: str) -> None:
    """A change, an addition or a removal ends the chain, with the most telling reason."""
    value, reason = MUST_BE_EQUAL[key]
    for old, new in (({}, {key: value}), ({key: value}, {}), ({key: value}, {key: ...})):
        assert changed_settings(settings(**old), settings(**new), DEFAULT) is reason
    assert changed_settings(settings(**{key: value}), settings(**{key: value}), DEFAULT) is None


def test_the_most_telling_change_is_named() -> None:
    """Model before instructions, instructions before tools, tools before the rest."""
    changes = {key: value for key, (value, _) in MUST_BE_EQUAL.items()}
    for key in ("model", "instructions", "tools", "novel"):
        named = changed_settings(settings(), settings(**changes), DEFAULT)
        assert named is MUST_BE_EQUAL[key][1]
        changes.pop(key)


def test_changed_tools_by_policy() -> None:
    """Other tools may continue a chain if the operator says so; other settings still end it."""
    assert changed_settings(settings(), settings(tools=[]), LENIENT) is None
    both = changed_settings(settings(), settings(tools=[], novel=1), LENIENT)
    assert both is Reason.CHANGED_SETTINGS


def test_a_setting_is_compared_by_meaning() -> None:
    """Another spelling is the same, another number is not; null is as good as absent."""
    assert (
        changed_settings(
            settings(novel={"a": 1, "b": 2}), settings(novel={"b": 2, "a": 1}), DEFAULT
        )
        is None
    )
    assert changed_settings(settings(novel=1), settings(novel=1.0), DEFAULT)
    assert changed_settings(settings(novel=None), settings(), DEFAULT) is None
    assert changed_settings(same := settings(), same, DEFAULT) is None


def test_changed_settings_end_a_chain() -> None:
    """They are looked at before the items are."""
    outcome = match(head_of([M]), envelope(model="gpt-6"), [Item(dump(M))], DEFAULT)

    assert outcome == Mismatch(Reason.CHANGED_MODEL)


# Gaps: clients that we fail to follow.

GAPS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "a novel key on a call": ({**C, "novel": 1}, ("novel",)),
    "arguments and name": ({**C, "arguments": "{}", "name": "read"}, ("arguments", "name")),
    "phase on a call": ({**C, "phase": "x"}, ("phase",)),
    "another call": (call(9), ()),
    "the call as something else": ({**C, "type": "custom_tool_call"}, ()),
}


@pytest.mark.parametrize(("echo", "fields"), GAPS.values(), ids=GAPS)
def test_gaps_name_fields(echo: Any, fields: tuple[str, ...]) -> None:
    """An item that is surely the model's own, yet unequal, tells in which fields it is."""
    outcome = judge([C], [echo, output(1)])

    assert isinstance(outcome, Mismatch)
    assert outcome.gaps == ((Gap(fields),) if fields else ())


def test_outputs_are_no_gaps() -> None:
    """The output of a call has its id, but is no failed echo of it."""
    outcome = judge([C], [output(1)])

    assert outcome == Mismatch(Reason.ANSWER_CHANGED)


# New heads.


def made(streamed: list[Any], final: list[Any]) -> Head | None:
    """Return the head of an answer given in two accounts."""
    answer = Answer("resp_1", [dump(i) for i in streamed], [dump(i) for i in final])
    return new_head(request(user("a"), store=True), answer, principal="p", connection_id=7)


def test_what_a_head_remembers() -> None:
    """The request's history and settings, and where its response lives."""
    head = made(ANSWER, ANSWER)
    assert head is not None
    asked = request(user("a"), store=True)

    assert (head.principal, head.response_id, head.connection_id) == ("p", "resp_1", 7)
    assert (head.history, head.item_count, head.stored) == (asked.history, 1, True)
    assert head.blocked is None
    assert [form.type for form in head.output] == [item["type"] for item in ANSWER]
    assert head.size_bytes > len(dump(ANSWER))


def test_either_account_of_an_answer_will_do() -> None:
    """Some upstreams leave the last event's output empty; decoration may differ between the two."""
    bare = [
        R,
        {**M, "status": None, "content": [{"type": "output_text", "text": "Looking."}]},
        C,
        D,
    ]
    outputs = [made(ANSWER, []), made([], ANSWER), made(ANSWER, bare)]

    assert all(head is not None and len(head.output) == 4 for head in outputs)
    empty = made([], [])
    assert empty is not None
    assert empty.output == ()


@pytest.mark.parametrize(
    ("streamed", "final"),
    [
        (ANSWER, ANSWER[1:]),
        (ANSWER, [*ANSWER, C]),
        (ANSWER, ANSWER[::-1]),
        ([M], [message("Looking.", phase="final_answer")]),
        ([C], [{**C, "arguments": "{}"}]),
        ([5], []),
        ([], [[]]),
        ([{"type": 5}], []),
    ],
)
def test_an_answer_in_doubt_makes_no_head(streamed: list[Any], final: list[Any]) -> None:
    """Where upstream's two accounts disagree, or one can't be read, the chain ends."""
    assert made(streamed, final) is None
