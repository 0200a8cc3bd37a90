"""
Nothing of a Chat Completions request is lost in silence.

One request has all that is translated. Every value in it is changed, everywhere a field is added,
and every field is taken away, one at a time: each time either the request is refused by name, or
what goes upstream (or what the reply must know) is another. What may be without effect is named.
"""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

import pytest
from builders import dump
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.chains import ChainStore
from proxy.core.chat_fields import Untranslatable
from proxy.core.chat_turn import CHAT, ChatEnvelope
from proxy.core.history import MatchingPolicy
from proxy.core.items import Fingerprinter
from proxy.core.plan import PassThrough, Planner, Start
from proxy.core.reasons import Reason
from proxy.core.request import TurnRequest, parse_body
from proxy.simulator.answers import Context
from proxy.simulator.chat import context_of
from proxy.simulator.validate import Ledger
from proxy.simulator.wire import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterator

Path = tuple[str | int, ...]

FINGERPRINTS = Fingerprinter(b"0123456789abcdef")
ROOT = FINGERPRINTS.root("p/chat")

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
MARK = {"mode": "explicit"}


def call(number: int, kind: str, **said: str) -> Any:
    """Return a tool call."""
    return {"index": 0, "id": f"call_{number}", "type": kind, kind: {"name": "look", **said}}


BODY: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "text", "text": "Mind."}]},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Look.", "prompt_cache_breakpoint": MARK},
                {"type": "image_url", "image_url": {"url": "u", "detail": "low"}},
                {"type": "file", "file": {"file_id": "f"}},
                {"type": "file", "file": {"filename": "n", "file_data": "d"}},
            ],
            "__copilotMessageSource": "x",
        },
        {
            "role": "assistant",
            "content": "Hm.",
            "refusal": "No.",
            "annotations": [{"type": "a"}],
            "parsed": {"a": 1},
            "reasoning": "r",
            "reasoning_content": "r",
            "tool_calls": [
                call(1, "function", arguments='{"a":1}'),
                call(2, "custom", input="x"),
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "1", "name": "look"},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "2"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "So."}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "On."},
    ],
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False},
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "look",
                "description": "d",
                "strict": True,
                "parameters": SCHEMA,
            },
        },
        {"type": "custom", "custom": {"name": "a", "format": {"type": "text"}}},
        {
            "type": "custom",
            "custom": {
                "name": "b",
                "description": "d",
                "format": {
                    "type": "grammar",
                    "grammar": {"syntax": "lark", "definition": "start: /a/"},
                },
            },
        },
    ],
    "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "auto",
            "tools": [
                {"type": "function", "function": {"name": "look"}},
                {"type": "custom", "custom": {"name": "a"}},
            ],
        },
    },
    "parallel_tool_calls": True,
    "max_completion_tokens": 100,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "n", "description": "d", "schema": SCHEMA, "strict": True},
    },
    "verbosity": "low",
    "reasoning_effort": "low",
    "temperature": 0.5,
    "top_p": 0.5,
    "metadata": {"a": "b"},
    "user": "u",
    "safety_identifier": "s",
    "service_tier": "flex",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"a": 1},
    "prompt_cache_retention": "24h",
    "store": False,
    "n": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0.0,
    "logit_bias": {},
    "logprobs": False,
    "modalities": ["text"],
}

# Where the table says "left out": the reply's own and other notes, echoed.
_ECHOED = ("annotations", "parsed", "reasoning", "reasoning_content", "__copilotMessageSource")


def is_left_out(path: Path) -> bool:
    """Whether the table says that what stands here says nothing."""
    in_message = path[:1] == ("messages",)
    if in_message and any(key in _ECHOED for key in path[2:3]):
        return True
    of_a_tool = in_message and path[1:2] == (4,)
    return (of_a_tool and path[2:3] == ("name",)) or (in_message and path[-1] == "index")


# Taken away, these say what they said before: their defaults are written out, or nothing is.
SAME_WITHOUT = {
    ("store",),
    ("n",),
    ("frequency_penalty",),
    ("presence_penalty",),
    ("logit_bias",),
    ("logprobs",),
    ("modalities",),
}


def said(body: Any) -> tuple[bytes, bool, bool] | None:
    """Return all that a request comes to; None if it is not translated."""
    try:
        request = parse_body(dump(body), ROOT, FINGERPRINTS, CHAT)
    except Untranslatable:
        return None
    if not isinstance(request, TurnRequest):
        return None
    envelope = request.envelope
    assert isinstance(envelope, ChatEnvelope)
    return request.full_message(), envelope.stream, envelope.include_usage


def places(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every place in a JSON value, with what stands there."""
    yield path, value
    inner: Any = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    for key, each in inner:
        yield from places(each, (*path, key))


def changed(path: Path, change: Any) -> Any:
    """Return the body with `change` applied to what holds the last key of the path."""
    body = copy.deepcopy(BODY)
    holder: Any = body
    for key in path[:-1]:
        holder = holder[key]
    change(holder, path[-1])
    return body


def another(value: Any) -> Any:
    """Return a value of the same type that is not equal."""
    match value:
        case bool():
            return not value
        case str():
            return value + "x"
        case _:
            return value + 1


PLACES = [(path, value) for path, value in places(BODY) if path]
LEAVES = [path for path, value in PLACES if not isinstance(value, (dict, list))]
OBJECTS = [path for path, value in places(BODY) if isinstance(value, dict)]
MEMBERS = [path for path, _ in PLACES if isinstance(path[-1], str)]


def names(path: Path) -> str:
    """Return a path as text, for the name of a test."""
    return ".".join(map(str, path)) or "body"


def test_the_request_is_translated() -> None:
    """All of it has an equal."""
    assert said(BODY) is not None


@pytest.mark.parametrize("path", LEAVES, ids=names)
def test_a_changed_value_is_told_or_refused(path: Path) -> None:
    """Wherever a value is another, what goes upstream is, unless the table says otherwise."""

    def change(holder: Any, key: Any) -> None:
        holder[key] = another(holder[key])

    outcome = said(changed(path, change))
    if is_left_out(path):
        assert outcome == said(BODY)
    else:
        assert outcome != said(BODY)


@pytest.mark.parametrize("path", OBJECTS, ids=names)
def test_an_added_field_is_told_or_refused(path: Path) -> None:
    """In whatever object a field turns up that nobody knows, it is not dropped."""

    def change(holder: Any, key: Any) -> None:
        holder[key]["brand_new"] = 1

    body = {**BODY, "brand_new": 1} if not path else changed(path, change)
    outcome = said(body)
    if is_left_out(path):
        assert outcome == said(BODY)
    else:
        assert outcome is None or b'"brand_new":1' in outcome[0]


@pytest.mark.parametrize("path", MEMBERS, ids=names)
def test_a_missing_field_is_told_or_refused(path: Path) -> None:
    """What is not there does not mean what it meant."""

    def change(holder: Any, key: Any) -> None:
        del holder[key]

    outcome = said(changed(path, change))
    if is_left_out(path) or path in SAME_WITHOUT:
        assert outcome == said(BODY)
    else:
        assert outcome != said(BODY)


@pytest.mark.parametrize("path", MEMBERS, ids=names)
def test_null_is_as_good_as_absent_or_refused(path: Path) -> None:
    """To the API both are one; in free objects of the client's own null is kept."""

    def remove(holder: Any, key: Any) -> None:
        del holder[key]

    def empty(holder: Any, key: Any) -> None:
        holder[key] = None

    outcome = said(changed(path, empty))
    is_kept = outcome is not None and b"null" in outcome[0]
    assert is_kept or outcome in (None, said(changed(path, remove)))


def planner() -> Planner:
    """Return a planner that knows no chain."""
    store = ChainStore(seed=7, max_bytes=1_000_000, ttl_s=60, timer=lambda: 0.0)
    return Planner(store, FINGERPRINTS, MatchingPolicy(), lambda _: None, 1_000_000)


PIECES = st.one_of(
    st.binary(max_size=3),
    st.sampled_from([b"null", b"{}", b"[]", b'""', b"1", b"true", b",", b'"a":', b"\\ud83d", b"{"]),
)


@given(st.integers(0, 5000), st.integers(0, 40), PIECES)
def test_whatever_comes_is_planned_and_no_guess(place: int, length: int, piece: bytes) -> None:
    """A body with a piece replaced is left to HTTP for a reason, or means what it says."""
    raw = dump(BODY)
    raw = raw[:place] + piece + raw[place + length :]

    plan = planner().plan("p", raw, CHAT)
    if isinstance(plan, PassThrough):
        assert plan.reason in (Reason.UNPARSABLE, Reason.UNTRANSLATABLE, Reason.NO_INPUT)
        return
    assert isinstance(plan, Start)
    told = json.loads(plan.request.full_message())
    asked = json.loads(raw)
    if "messages" not in asked:
        return  # its other shape, which is sent as it is
    try:
        expected = context_of(asked)
    except ApiError:  # an output of no call, or none of one: the API says so of either form
        with pytest.raises(ApiError):
            Ledger().extended(told["input"]).check_settled()
        return
    assert expected.digest == Context.of(told, told["input"]).digest


def test_what_is_told_is_json() -> None:
    """The message upstream is one that every reader takes alike."""
    told = said(BODY)
    assert told is not None
    message = json.loads(told[0])
    assert message["type"] == "response.create"
    assert len(message["input"]) == 11
