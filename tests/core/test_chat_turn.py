"""
Chat Completions bodies as turns: what is read of the end of a body is what all of it says.

The judge of a delta is the world of `builders`, which rebuilds the context from what it is sent;
what the context has to be is what the whole body is translated to.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders import dump, meaning
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.chains import ChainStore
from proxy.core.chat_fields import Untranslatable
from proxy.core.chat_messages import translate
from proxy.core.chat_reply import ChatReplyReader
from proxy.core.chat_turn import CHAT, ChatEnvelope
from proxy.core.history import Answer, MatchingPolicy, new_head
from proxy.core.items import Fingerprinter
from proxy.core.plan import Continue, PassThrough, Planner, Start
from proxy.core.reasons import Reason
from proxy.core.request import RESPONSES, TurnRequest, parse_body, parse_tail
from proxy.simulator.events import ResponseWriter, Usage

Json = dict[str, Any]

FINGERPRINTS = Fingerprinter(b"0123456789abcdef")
ROOT = FINGERPRINTS.root("p/chat")
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def chat(*messages: Json, **settings: Any) -> bytes:
    """Return a Chat body, its messages before most settings, as SDKs write it."""
    body = {"model": "m", "messages": list(messages), "tools": TOOLS, "stream": True, **settings}
    return dump({key: value for key, value in body.items() if value is not ...})


def user(text: str) -> Json:
    """Return a user message."""
    return {"role": "user", "content": text}


def calls(*numbers: int, kind: str = "function", content: str | None = None) -> Json:
    """Return an assistant's message with tool calls."""
    key = "arguments" if kind == "function" else "input"
    made = [
        {"id": f"call_{number}", "type": kind, kind: {"name": "look", key: "{}"}}
        for number in numbers
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def tool(number: int, text: str = "done") -> Json:
    """Return the output of a call."""
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


def read(raw: bytes) -> TurnRequest:
    """Take a body apart that must be translatable."""
    request = parse_body(raw, ROOT, FINGERPRINTS, CHAT)
    assert isinstance(request, TurnRequest), request
    return request


def follow(first: bytes, second: bytes) -> TurnRequest | None:
    """Take `second` apart after the prefix of `first`, with which it must begin."""
    prefix = read(first).prefix()
    assert prefix is not None
    assert second.startswith(first[: prefix.length])
    return parse_tail(second, prefix, FINGERPRINTS)


def items(request: TurnRequest) -> list[Json]:
    """Return the items that a full send carries."""
    return list(json.loads(request.full_message())["input"])


ELEMENTS = st.sampled_from(
    [
        user("a"),
        user("\u65e5\u672c \u2603"),
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "said"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "look"}]},
        calls(1),
        calls(2, 3, content="both"),
        calls(4, kind="custom"),
        tool(1),
        tool(2),
        tool(4),
    ]
)


@given(
    st.lists(ELEMENTS, min_size=1, max_size=5),
    st.lists(ELEMENTS, max_size=5),
    st.sampled_from([{}, {"temperature": 0.5}, {"reasoning_effort": "low"}, {"stream": False}]),
)
def test_the_end_of_a_body_is_read_as_the_whole_is(
    known: list[Json], new: list[Json], changes: Json
) -> None:
    """After a known prefix, the same items, keys, settings and messages come out."""
    first, second = chat(*known), chat(*known, *new, **changes)
    whole, tail = read(second), follow(first, second)

    assert tail is not None
    assert [item.raw for item in [*read(first).items, *tail.items]] == [
        item.raw for item in whole.items
    ]
    assert (tail.history, tail.item_count, tail.calls) == (
        whole.history,
        whole.item_count,
        whole.calls,
    )
    assert tail.envelope.fingerprints == whole.envelope.fingerprints
    assert tail.full_message() == whole.full_message()
    assert len(tail.full_message()) <= tail.full_message_bytes
    assert len(whole.full_message()) <= whole.full_message_bytes
    one, other = tail.prefix(), whole.prefix()
    assert one is not None
    assert other is not None
    assert (one.length, one.history, one.calls) == (other.length, other.history, other.calls)


@given(st.lists(ELEMENTS, min_size=1, max_size=8))
def test_a_full_send_is_all_messages_translated(messages: list[Json]) -> None:
    """The items of a full send are those of every message, in order."""
    expected = translate([dump(message) for message in messages]).items

    assert items(read(chat(*messages))) == [json.loads(raw) for raw in expected]


def test_the_output_of_a_custom_tool_is_known_by_a_call_before_the_prefix() -> None:
    """Which kind of tool an output belongs to is remembered with the prefix."""
    request = follow(
        chat(user("a"), calls(1, kind="custom")), chat(user("a"), calls(1, kind="custom"), tool(1))
    )

    assert request is not None
    assert [item.type for item in request.items] == ["custom_tool_call_output"]


def test_settings_are_those_of_a_responses_request() -> None:
    """What goes upstream besides the items are the translated settings, with `store` false."""
    sent = json.loads(read(chat(user("a"), max_tokens=100)).full_message())

    assert sent == {
        "type": "response.create",
        "model": "m",
        "max_output_tokens": 100,
        "store": False,
        "input": [user("a")],
        "tools": [
            {
                "type": "function",
                "name": "look",
                "parameters": {"type": "object"},
                "strict": False,
            }
        ],
    }


def test_what_the_reply_must_know_is_kept_with_the_settings() -> None:
    """Whether the client wants a usage chunk stands beside what upstream is told."""
    options = {"stream_options": {"include_usage": True}}
    with_usage = follow(chat(user("a"), **options), chat(user("a"), user("b"), **options))

    assert with_usage is not None
    assert isinstance(with_usage.envelope, ChatEnvelope)
    assert with_usage.envelope.include_usage
    assert not with_usage.envelope.stored
    assert with_usage.envelope.replay_safe


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (chat(user("a"), n=2), "n"),
        (chat(user("a"), input=[]), "input"),
        (chat(user("a"), brand_new=1), "other"),
        (chat({"role": "function", "content": "a"}), "messages.role"),
        (dump({"model": "m", "messages": "a"}), "messages"),
        (dump({"model": "m", "input": [user("a")], "stop": "x"}), "stop"),
    ],
)
def test_what_has_no_equal_is_named(raw: bytes, field: str) -> None:
    """A body without an exact equal raises, by the name of the field."""
    with pytest.raises(Untranslatable) as caught:
        parse_body(raw, ROOT, FINGERPRINTS, CHAT)

    assert caught.value.field == field


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"model":"m"}', Reason.NO_INPUT),
        (chat(), Reason.NO_INPUT),
        (b"[]", Reason.UNPARSABLE),
        (b'{"messages":[],"messages":[]}', Reason.UNPARSABLE),
        (chat(user("a"))[:-1], Reason.UNPARSABLE),
        (b'{"model":"m","messages":[{"role":"user","role":"user"}]}', Reason.UNPARSABLE),
        (
            b'{"model":"m","messages":[{"role":"assistant","content":"a","reasoning":"\xff"}]}',
            Reason.UNPARSABLE,
        ),
        (
            b'{"model":"m","messages":[{"role":"assistant","content":"a","parsed":{"a":1,"a":2}}]}',
            Reason.UNPARSABLE,
        ),
    ],
)
def test_what_is_no_chat_body_is_left_alone(raw: bytes, reason: Reason) -> None:
    """A body that two readers may take differently, or that has no messages, passes through."""
    assert parse_body(raw, ROOT, FINGERPRINTS, CHAT) is reason


@pytest.mark.parametrize(
    "end",
    [
        b',{"role":"user","content":"b"}],"messages":[]}',
        b',{"role":"user","content":"b"}],"n":2}',
        b',{"role":"function","content":"b"}],"tools":null}',
        b',{"role":"user","content":"b"}],"input":[]}',
        b",1]}",
        b",]}",
    ],
)
def test_an_end_that_can_not_be_translated_is_left_to_the_whole(end: bytes) -> None:
    """Doubt about what follows a prefix is not settled there."""
    first = b'{"model":"m","messages":[{"role":"user","content":"a"}],"stream":true}'
    prefix = read(first).prefix()
    assert prefix is not None

    assert parse_tail(first[: prefix.length] + end, prefix, FINGERPRINTS) is None


def cursor(*elements: Json, **settings: Any) -> bytes:
    """Return a Responses body as Cursor sends it to the Chat path."""
    return dump({"model": "m", "input": list(elements), "stream": True, **settings})


def test_a_responses_body_keeps_its_items() -> None:
    """The items of a body that is shaped for Responses go upstream as they are."""
    shown = {"role": "user", "content": [{"type": "input_text", "text": "a"}]}
    whole = read(cursor(shown, reasoning={"effort": "low"}))
    tail = follow(cursor(shown), cursor(shown, user("b")))

    assert items(whole) == [shown]
    assert not whole.envelope.stored
    assert tail is not None
    assert items(tail) == [shown, user("b")]
    assert isinstance(tail.envelope, ChatEnvelope)


def test_a_body_of_both_shapes_is_not_taken_for_either() -> None:
    """Behind the known beginning of a Responses body messages may turn up."""
    first = cursor(user("a"))
    prefix = read(first).prefix()
    assert prefix is not None
    both = first[:-1] + b',"messages":[{"role":"user","content":"b"}]}'

    assert parse_tail(both, prefix, FINGERPRINTS) is None
    with pytest.raises(Untranslatable):
        parse_body(both, ROOT, FINGERPRINTS, CHAT)


# --- Plans ---------------------------------------------------------------------------------------


class Rig:
    """A planner on top of one connection that is never lost, and what upstream holds there."""

    def __init__(self, policy: MatchingPolicy | None = None) -> None:
        self.store = ChainStore(seed=7, max_bytes=10_000_000, ttl_s=3600, timer=lambda: 0.0)
        self.planner = Planner(
            self.store, FINGERPRINTS, policy or MatchingPolicy(), lambda _: None, 1_000_000
        )
        self.contexts: dict[str, list[Json]] = {}

    def turn(self, raw: bytes, *answer: Json) -> tuple[Any, Json]:
        """Plan a Chat body, check what upstream would see, answer; return plan and echo."""
        plan = self.planner.plan("p", raw, CHAT)
        if isinstance(plan, PassThrough):
            return plan, {}
        assert isinstance(plan, Start | Continue)
        sent = json.loads(self._message(plan))
        context = [*self.contexts.get(sent.get("previous_response_id"), []), *sent["input"]]
        assert meaning(context) == meaning(items(read(raw)))
        name = f"resp_{len(self.contexts)}"
        self.contexts[name] = [*context, *answer]
        reader = self._reply(name, answer)
        parent = plan.head if isinstance(plan, Continue) else None
        head = new_head(
            plan.request,
            Answer(name, reader.output, reader.final_output, reader.echo),
            principal="p",
            connection_id=1,
        )
        assert head is not None
        self.store.record(head, raw, plan.request.prefix(), parent, plan.request.walk)
        return plan, json.loads(reader.echo_message)

    @staticmethod
    def _message(plan: Start | Continue) -> bytes:
        if isinstance(plan, Continue):
            return plan.request.delta_message(plan.head.response_id, plan.delta)
        return plan.request.full_message()

    @staticmethod
    def _reply(name: str, answer: tuple[Json, ...]) -> ChatReplyReader:
        reader = ChatReplyReader(stream=True, include_usage=False, created=1, model="m")
        writer = ResponseWriter(
            request={"model": "m", "stream": True},
            response_id=name,
            created_at=1,
            output=answer,
            usage=Usage(input=1, cached=0, output=1),
        )
        reader.feed([dump(event.body) for event in writer.events()])
        return reader


REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "sealed"}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look"}
CALL |= {"arguments": '{"x": 1.0}', "status": "completed"}
SAID = {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed"}
SAID |= {"content": [{"type": "output_text", "text": "Hm.", "annotations": [], "logprobs": []}]}


def test_an_echo_is_continued_and_reasoning_stays_upstream() -> None:
    """Only the tool's output is sent; what upstream thought meanwhile is still there."""
    rig = Rig()
    first, echo = rig.turn(chat(user("a")), REASONING, SAID, CALL)
    second, _ = rig.turn(chat(user("a"), echo, tool(1)), SAID)

    assert first.reason is Reason.NEW_CONVERSATION
    assert second.reason is Reason.CONTINUED
    assert [item.type for item in second.delta] == ["function_call_output"]
    assert REASONING in rig.contexts["resp_1"]


def test_thoughts_that_the_policy_forbids_are_not_kept() -> None:
    """With `missing_reasoning = resend` a Chat client's chain ends where the model thought."""
    rig = Rig(MatchingPolicy(ignore_missing_reasoning=False))
    _, echo = rig.turn(chat(user("a")), REASONING, CALL)
    dropped, echo_2 = rig.turn(chat(user("a"), echo, tool(1)), SAID)
    thoughtless, _ = rig.turn(chat(user("a"), echo, tool(1), echo_2, user("b")), SAID)

    assert dropped.reason is Reason.REASONING_DROPPED
    assert thoughtless.reason is Reason.CONTINUED


def test_what_chat_can_not_show_ends_the_chain() -> None:
    """A search that upstream made by itself is in its context, and not in the client's history."""
    rig = Rig()
    search = {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}}
    _, echo = rig.turn(cursor(user("a"), tools=[{"type": "web_search"}]), search, SAID)
    plan, _ = rig.turn(cursor(user("a"), echo, user("b"), tools=[{"type": "web_search"}]), SAID)

    assert plan.reason is Reason.ANSWER_CHANGED


def test_endpoints_share_no_history() -> None:
    """The same bytes mean something else at each endpoint, so nothing known at one counts there."""
    rig = Rig()
    raw, longer = cursor(user("a")), cursor(user("a"), SAID, user("b"))
    rig.turn(raw, SAID)

    assert rig.planner.plan("p", longer, CHAT).reason is Reason.CONTINUED
    elsewhere = rig.planner.plan("p", longer, RESPONSES)
    assert elsewhere.reason is Reason.UNKNOWN_HISTORY
    assert elsewhere.request is not None
    assert elsewhere.request.envelope.stored
    assert not isinstance(elsewhere.request.envelope, ChatEnvelope)


def test_a_plan_names_what_could_not_be_translated() -> None:
    """The field is in the plan, for the log and for the metric."""
    plan = Rig().planner.plan("p", chat(user("a"), seed=1), CHAT)

    assert plan == PassThrough(Reason.UNTRANSLATABLE, field="seed")
