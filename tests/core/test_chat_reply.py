"""Server events to chunks and completions, and the echo that is expected of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders import body, call, dump, message, output, reasoning, user
from hypothesis import given
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from proxy.core.chat_reply import ChatReplyReader
from proxy.core.chat_request import translate
from proxy.core.history import Answer, Match, MatchingPolicy, Mismatch, match, new_head
from proxy.core.items import Fingerprinter, Item
from proxy.core.reasons import Reason
from proxy.core.reply import Kind, ProtocolFault
from proxy.core.request import TurnRequest, parse_body
from proxy.core.verdicts import http_reply
from proxy.simulator.events import CompletedOutput, ResponseWriter, Usage

FINGERPRINTS = Fingerprinter(b"0123456789abcdef")
CREATED_AT = 1_780_000_000


def reader(*, stream: bool = True, usage: bool = False, reused: bool = False) -> ChatReplyReader:
    """Make a reader as for a streamed turn."""
    return ChatReplyReader(
        stream=stream, include_usage=usage, created=CREATED_AT, model="m", reused=reused
    )


def custom_call(number: int, said: str = "echo") -> Any:
    """Return a call of a custom tool as upstream sends it."""
    made = {"type": "custom_tool_call", "id": f"ctc_{number}", "call_id": f"call_{number}"}
    return {**made, "name": "sh", "input": said, "status": "completed"}


def refusal(text: str, *, number: int = 1) -> Any:
    """Return a message that refuses."""
    content = [{"type": "refusal", "refusal": text}]
    return {**message("", number=number), "content": content}


def writer(*items: Any, **more: Any) -> ResponseWriter:
    """Return the witness's writer of a response with these items."""
    request = {"model": "m-2026", "stream": True, "service_tier": more.pop("tier", "flex")}
    return ResponseWriter(
        request=request,
        response_id="resp_abc",
        created_at=1,
        output=items,
        usage=Usage(input=100, cached=64, output=7),
        **more,
    )


def events(*items: Any, **more: Any) -> list[bytes]:
    """Return the messages of a response, as the witness writes them."""
    return [dump(event.body) for event in writer(*items, **more).events()]


def event(kind: str, **fields: Any) -> bytes:
    """Write a message as the API does."""
    return dump({"type": kind, **fields})


def lifecycle(kind: str, **fields: Any) -> bytes:
    """Write a lifecycle event."""
    return event(f"response.{kind}", response={"id": "resp_abc", "output": [], **fields})


def text_delta(text: str, index: Any = 0) -> bytes:
    """Write a text delta; `...` leaves the index out."""
    place = {} if index is ... else {"output_index": index}
    return event("response.output_text.delta", **place, delta=text)


def parsed(data: bytes) -> list[Any]:
    """Parse SSE bytes that hold nothing but `data:` fields; `[DONE]` is text."""
    blocks = data.split(b"\n\n")
    assert blocks.pop() == b""
    found = []
    for block in blocks:
        assert block.startswith(b"data: ")
        assert b"\n" not in block
        text = block.removeprefix(b"data: ")
        found.append("[DONE]" if text == b"[DONE]" else json.loads(text))
    return found


def deltas(chunks: list[Any]) -> list[Any]:
    """Return the deltas of chunks."""
    return [
        chunk["choices"][0]["delta"]
        for chunk in chunks
        if isinstance(chunk, dict) and chunk.get("choices")
    ]


def accumulated(chunks: list[Any]) -> Any:
    """Put the deltas together as a client does."""
    made: Any = {"role": "assistant", "content": "", "refusal": "", "tool_calls": []}
    for delta in deltas(chunks):
        made["content"] += delta.get("content") or ""
        made["refusal"] += delta.get("refusal") or ""
        for part in delta.get("tool_calls", []):
            if part["index"] == len(made["tool_calls"]):
                made["tool_calls"].append({key: part[key] for key in part if key != "index"})
                continue
            for key in ("function", "custom"):
                for name, text in part.get(key, {}).items():
                    made["tool_calls"][part["index"]][key][name] += text
    made["refusal"] = made["refusal"] or None
    if not made["content"] and (made["refusal"] or made["tool_calls"]):
        made["content"] = None
    return made


HEAD = {
    "id": "chatcmpl-abc",
    "object": "chat.completion.chunk",
    "created": CREATED_AT,
    "model": "m-2026",
    "system_fingerprint": None,
}
OPENING = {"role": "assistant", "content": "", "refusal": None}
USAGE = {
    "prompt_tokens": 100,
    "completion_tokens": 7,
    "total_tokens": 107,
    "prompt_tokens_details": {"cached_tokens": 64, "audio_tokens": 0},
    "completion_tokens_details": {
        "reasoning_tokens": 0,
        "audio_tokens": 0,
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    },
}


def chunk(delta: Any, finish: str | None = None, **more: Any) -> Any:
    """Return a chunk."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return {**HEAD, "choices": [choice], **more}


# --- Streams ------------------------------------------------------------------------------------


def test_a_text_is_streamed_as_it_comes() -> None:
    """Opening, one chunk a delta, the reason, and the end; reasoning is not shown."""
    read = reader()

    chunks = parsed(read.feed(events(reasoning(1, summary="Hm."), message("Hello there"))))

    spoken = [delta["content"] for delta in deltas(chunks)[1:-1]]
    assert "".join(spoken) == "Hello there"
    assert len(spoken) > 1
    assert chunks[0] == chunk(OPENING)
    assert chunks[1] == chunk({"content": spoken[0]})
    assert chunks[-2:] == [chunk({}, "stop", service_tier="flex"), "[DONE]"]
    assert read.terminal is Kind.COMPLETED
    assert read.response_id == "resp_abc"
    assert not read.dirty


def test_calls_are_opened_and_then_filled() -> None:
    """Each call has an index, and its id, type and name in the first of its chunks."""
    chunks = parsed(reader().feed(events(message("Look"), call(1, '{"a":1}'), custom_call(2))))

    parts = [part for delta in deltas(chunks) for part in delta.get("tool_calls", [])]
    openings = [part for part in parts if "id" in part]
    assert openings == [
        {
            "index": 0,
            "id": "call_1",
            "type": "function",
            "function": {"name": "look", "arguments": ""},
        },
        {"index": 1, "id": "call_2", "type": "custom", "custom": {"name": "sh", "input": ""}},
    ]
    filled = accumulated(chunks)["tool_calls"]
    assert filled[0]["function"]["arguments"] == '{"a":1}'
    assert filled[1]["custom"]["input"] == "echo"
    assert all(part.keys() == {"index", "function"} for part in parts[1:-2] if "id" not in part)
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_the_usage_is_a_chunk_where_it_was_asked_for() -> None:
    """It stands between the reason and the end; the other chunks say that theirs is null."""
    chunks = parsed(reader(usage=True).feed(events(message("Hi"))))

    assert all(each["usage"] is None for each in chunks[:-2])
    assert chunks[-2] == {**HEAD, "choices": [], "usage": USAGE, "service_tier": "flex"}
    assert chunks[-1] == "[DONE]"


def test_a_refusal_is_streamed_as_one() -> None:
    """Refusals have their own field."""
    stream = [
        lifecycle("created"),
        event("response.refusal.delta", output_index=0, delta="I can"),
        event("response.refusal.delta", output_index=0, delta="'t."),
        event("response.output_item.done", output_index=0, item=refusal("I can't.")),
        lifecycle("completed", output=[refusal("I can't.")]),
    ]
    read = reader()

    chunks = parsed(read.feed(stream))

    assert deltas(chunks) == [OPENING, {"refusal": "I can"}, {"refusal": "'t."}, {}]
    assert json.loads(read.echo_message) == {
        "role": "assistant",
        "content": None,
        "refusal": "I can't.",
    }


def test_nothing_is_shown_before_something_of_the_answer() -> None:
    """Upstream's beginning is not the reply's: until an item's event it may yet be refused."""
    read = reader()

    assert read.feed([event("codex.rate_limits", x=1)]) == b""
    assert not read.accepted
    assert read.feed([lifecycle("created"), lifecycle("in_progress")]) == b""
    assert read.accepted
    assert not read.begun
    assert parsed(read.feed([event("response.output_item.added", item=reasoning(1))])) == [
        {**chunk(OPENING), "model": "m"}
    ]
    assert read.begun


def test_any_event_after_the_beginning_commits_one_that_is_not_streamed() -> None:
    """The body comes at the end, but the turn is under way."""
    read = reader(stream=False)

    assert read.feed([lifecycle("created")]) == b""
    assert not read.begun
    assert read.feed([text_delta("Hi")]) == b""
    assert read.begun
    assert read.response == b""


def test_own_bytes_are_passed_on() -> None:
    """Escapes, half an emoji and bytes that are no UTF-8 come through as they were written."""
    texts = [rb'"\u00e9\/"', rb'"\ud83d"', rb'"\ude00"', b'"\xff"']
    item = b'{"type":"message","content":[{"type":"output_text","text":%b}]}'
    whole = item % rb'"\u00e9\/\ud83d\ude00"'
    read = reader()

    data = read.feed(
        [lifecycle("created")]
        + [
            b'{"type":"response.output_text.delta","output_index":0,"delta":%b}' % text
            for text in texts
        ]
    )

    lines = data.split(b"\n\n")[1:-1]
    assert [line.split(b'{"content":')[1].split(b"},")[0] for line in lines] == texts
    read = reader(stream=False)
    read.feed([b'{"type":"response.completed","response":{"id":"r","output":[%b]}}' % whole])
    assert rb'"content":"\u00e9\/\ud83d\ude00"' in read.response
    assert rb'"content":"\u00e9\/\ud83d\ude00"' in read.echo_message


@pytest.mark.parametrize("delta", [None, 5, {}, ""])
def test_a_delta_that_brings_nothing_is_no_chunk(delta: Any) -> None:
    """What is no text, or empty, is not shown, first or later."""
    nothing = event("response.output_text.delta", output_index=0, delta=delta)

    chunks = parsed(reader().feed([lifecycle("created"), nothing, text_delta("a"), nothing]))

    assert deltas(chunks) == [OPENING, {"content": "a"}]


def test_deltas_of_two_items_may_take_turns() -> None:
    """Each goes where it belongs, and so does what is left at the end."""
    stream = [
        lifecycle("created"),
        event("response.output_item.added", output_index=0, item=call(1)),
        event("response.output_item.added", output_index=1, item=call(2)),
    ]
    for index, text in ((0, '{"a"'), (1, '{"b"'), (0, ":1}"), (1, ":")):
        kind = "response.function_call_arguments.delta"
        stream.append(event(kind, output_index=index, delta=text))
    stream.append(lifecycle("completed", output=[call(1, '{"a":1}'), call(2, '{"b":2}')]))

    told = accumulated(parsed(reader().feed(stream)))["tool_calls"]

    assert [each["function"]["arguments"] for each in told] == ['{"a":1}', '{"b":2}']


def test_a_vendors_events_are_not_shown() -> None:
    """They neither commit the reply nor end a run of deltas."""
    vendors = event("codex.rate_limits", x=1)
    read = reader()

    assert read.feed([lifecycle("created"), vendors]) == b""
    assert not read.begun
    chunks = parsed(read.feed([text_delta("a"), vendors, text_delta("b")]))
    assert deltas(chunks) == [OPENING, {"content": "a"}, {"content": "b"}]


def test_the_rest_of_an_item_is_found_in_any_spelling() -> None:
    """Deltas may spell what the item holds in another way; what they lack is made up for."""
    part = rb'{"type":"output_text","text":"\u00e9t\u00e9 \ud83d"}'
    item = rb'{"type":"message","content":[%b]}' % part

    data = reader().feed(
        [
            lifecycle("created"),
            text_delta("\u00e9"),
            b'{"type":"response.output_item.done","output_index":0,"item":%b}' % item,
        ]
    )

    rest = {"content": "t\u00e9 \ud83d"}
    assert deltas(parsed(data)) == [OPENING, {"content": "\u00e9"}, rest]


@pytest.mark.parametrize("text", [b"a\xff", b"b", b"\xfe"])
def test_no_rest_is_told_of_what_is_no_text(text: bytes) -> None:
    """Where bytes that are no UTF-8 differ, the client keeps what it has, and nothing breaks."""
    item = b'{"type":"message","content":"%b\xff"}' % text
    delta = b'{"type":"response.output_text.delta","output_index":0,"delta":"\xfd"}'
    done = b'{"type":"response.output_item.done","output_index":0,"item":%b}' % item

    data = reader().feed([lifecycle("created"), delta, done])

    assert data.count(b"data: ") == 2


ODD_INDEX = {"none": ..., "text": "0", "boolean": True, "null": None}


@pytest.mark.parametrize("index", ODD_INDEX.values(), ids=ODD_INDEX)
def test_events_without_an_index_belong_to_the_last_item(index: Any) -> None:
    """An answer is whole, and told once, though its events don't say where they belong."""
    place = {} if index is ... else {"output_index": index}
    stream = [
        lifecycle("created"),
        event("response.output_item.added", **place, item={**call(1), "arguments": ""}),
        event("response.function_call_arguments.delta", **place, delta='{"path":'),
        event("response.function_call_arguments.delta", **place, delta=' "a.txt"}'),
        event("response.output_item.done", **place, item=call(1)),
        text_delta("Hel", index),
        text_delta("lo", index),
        event("response.output_item.done", **place, item=message("Hello")),
        event("response.output_item.done", **place, item=call(2)),
        lifecycle("completed", output=[call(1), message("Hello"), call(2)]),
    ]
    read = reader()

    told = accumulated(parsed(read.feed(stream)))

    assert told["content"] == "Hello"
    assert [each["id"] for each in told["tool_calls"]] == ["call_1", "call_2"]
    assert told["tool_calls"][0]["function"]["arguments"] == call(1)["arguments"]


def test_two_messages_are_one_text() -> None:
    """Chat has one message; commentary and answer follow each other in it."""
    read = reader()

    told = accumulated(parsed(read.feed(events(message("One."), message("Two.", number=2)))))

    assert told["content"] == "One.Two."
    assert json.loads(read.echo_message)["content"] == "One.Two."


def test_what_was_streamed_otherwise_is_not_taken_back() -> None:
    """The item counts: an echo of what was streamed is not what is expected."""
    stream = [lifecycle("created"), text_delta("Hullo")]
    stream += [lifecycle("completed", output=[message("Hello")])]
    read = reader()

    assert accumulated(parsed(read.feed(stream)))["content"] == "Hullo"
    assert json.loads(read.echo_message)["content"] == "Hello"


# --- Any way in which upstream may tell of an answer ----------------------------------------------

TEXTS = st.text(max_size=12)
ITEMS = st.lists(
    st.builds(message, TEXTS)
    | st.builds(call, st.integers(0, 9), TEXTS)
    | st.builds(custom_call, st.integers(0, 9), TEXTS)
    | st.builds(refusal, TEXTS)
    | st.builds(reasoning, st.integers(0, 9)),
    max_size=4,
)
# Where an item lacks deltas and its own end, what it lacks is known after the next item has begun:
# too late for its place.
LEFT_OUT = st.sets(
    st.sampled_from(["added", "deltas", "late deltas", "done", "final output"]), max_size=3
).filter(
    lambda left_out: (
        not {"done", "final output"} <= left_out and not {"done", "late deltas"} <= left_out
    )
)


def unrefused(items: list[Any]) -> list[Any]:
    """Return items that the witness can stream: it knows no refusals."""
    return [item for item in items if item.get("content", [{}])[0].get("type") != "refusal"]


def thinned(items: list[Any], left_out: set[str]) -> list[bytes]:
    """Return the messages of a response, without some kinds of events."""
    final = CompletedOutput.EMPTY if "final output" in left_out else CompletedOutput.FULL
    kept = []
    begun = set()
    for made in events(*items, completed_output=final):
        read = json.loads(made)
        kind, place = read["type"], read.get("output_index")
        if kind == "response.output_item.added" and "added" in left_out:
            continue
        if kind == "response.output_item.done" and "done" in left_out:
            continue
        if kind.endswith(".delta"):
            if "deltas" in left_out or ("late deltas" in left_out and place in begun):
                continue
            begun.add(place)
        kept.append(made)
    return kept


@given(ITEMS, LEFT_OUT)
def test_a_client_puts_together_what_a_body_would_have_said(
    items: list[Any], left_out: set[str]
) -> None:
    """Streamed or not, with many events or few: the same message, reason and usage."""
    items = unrefused(items)
    streamed, whole = reader(usage=True), reader(stream=False)

    chunks = parsed(streamed.feed(thinned(items, left_out)))
    assert whole.feed(thinned(items, left_out)) == b""

    completion = json.loads(whole.response)
    said = completion["choices"][0]["message"]
    assert said.pop("annotations") == []
    assert {"tool_calls": [], **said} == accumulated(chunks)
    assert chunks[-3]["choices"][0]["finish_reason"] == completion["choices"][0]["finish_reason"]
    assert chunks[-2]["usage"] == completion["usage"]
    assert streamed.echo_message == whole.echo_message
    finished = [
        each for each in chunks[:-1] if each["choices"] and each["choices"][0]["finish_reason"]
    ]
    assert len(finished) == 1
    assert chunks.count("[DONE]") == 1


@given(ITEMS, st.lists(st.integers(0, 60), max_size=6), st.booleans())
def test_how_messages_are_batched_makes_no_difference(
    items: list[Any], cuts: list[int], stream: bool
) -> None:
    """The same messages give the same bytes, however many come at once."""
    items = unrefused(items)
    messages = events(*items)
    once, read = reader(stream=stream), reader(stream=stream)
    at_once = once.feed(messages)
    data, last = b"", 0
    for cut in sorted({*cuts, len(messages)}):
        data += read.feed(messages[last:cut])
        last = max(last, cut)

    assert data == at_once
    assert read.response == once.response
    assert read.echo_message == once.echo_message
    assert read.output == read.final_output == once.output
    assert len(read.output) == len(items)


@given(ITEMS)
def test_the_sdk_reads_what_we_write(items: list[Any]) -> None:
    """The newest SDK's own types take each chunk and each body."""
    items = [item for item in unrefused(items) if item["type"] != "custom_tool_call"]
    whole = reader(stream=False)
    whole.feed(events(*items, tier="default"))

    for each in parsed(reader(usage=True).feed(events(*items, tier="default")))[:-1]:
        ChatCompletionChunk.model_validate(each, strict=True)
    ChatCompletion.model_validate_json(whole.response, strict=True)


def test_the_sdks_accumulator_agrees() -> None:
    """Its `.stream()` helper makes the same completion of the chunks as the body is."""
    items = (message("Look."), call(1), call(2, "{}"))
    state = ChatCompletionStreamState()
    for each in parsed(reader(usage=True).feed(events(*items)))[:-1]:
        state.handle_chunk(ChatCompletionChunk.model_validate(each))
    whole = reader(stream=False)
    whole.feed(events(*items))

    made = state.get_final_completion().model_dump()
    body = json.loads(whole.response)
    choice, expected = made["choices"][0], body["choices"][0]
    assert choice["message"]["content"] == expected["message"]["content"]
    assert [
        {key: each[key] for key in ("id", "type", "function")}
        for each in choice["message"]["tool_calls"]
    ] == [
        {**each, "function": {**each["function"], "parsed_arguments": None}}
        for each in expected["message"]["tool_calls"]
    ]
    assert choice["finish_reason"] == expected["finish_reason"]
    assert made["usage"]["total_tokens"] == body["usage"]["total_tokens"]


# --- Bodies -------------------------------------------------------------------------------------


def test_a_body_has_all_that_clients_look_for() -> None:
    """The order of its members is fixed, and nothing depends on what upstream left out."""
    read = reader(stream=False)

    read.feed(events(reasoning(1), message("Look."), call(1, "{}")))

    assert json.loads(read.response) == {
        **HEAD,
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Look.",
                    "refusal": None,
                    "annotations": [],
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "look", "arguments": "{}"},
                        }
                    ],
                },
                "logprobs": None,
                "finish_reason": "tool_calls",
            }
        ],
        "usage": USAGE,
        "service_tier": "flex",
    }


EMPTY_USAGE = {**USAGE, "prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
USAGES: dict[str, tuple[Any, Any]] = {
    "none": (None, {**EMPTY_USAGE, "prompt_tokens_details": {"cached_tokens": 0}}),
    "unreadable": ("x", {**EMPTY_USAGE, "prompt_tokens_details": {"cached_tokens": 0}}),
    "counts only": (
        {"input_tokens": 3, "output_tokens": 4},
        {**USAGE, "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        | {"prompt_tokens_details": {"cached_tokens": 0}},
    ),
    "all": (
        {
            "input_tokens": 3,
            "output_tokens": 4,
            "total_tokens": 8,
            "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 1},
            "output_tokens_details": {"reasoning_tokens": 3},
        },
        {
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 1},
            "completion_tokens_details": {
                **USAGE["completion_tokens_details"],
                "reasoning_tokens": 3,
            },
        },
    ),
}


@pytest.mark.parametrize(("given", "expected"), USAGES.values(), ids=USAGES)
def test_usage_is_always_there(given: Any, expected: Any) -> None:
    """Clients crash without it: where upstream counted nothing it is zero."""
    read = reader(stream=False)

    read.feed([lifecycle("created"), lifecycle("completed", usage=given)])

    told = json.loads(read.response)["usage"]
    assert told.pop("prompt_tokens_details") == {
        "audio_tokens": 0,
        **expected.pop("prompt_tokens_details"),
    }
    assert told == {key: expected[key] for key in told}


def test_an_answer_without_text_is_an_empty_text() -> None:
    """Chat has no answer of nothing; beside calls and refusals there is none."""
    read = reader(stream=False)
    read.feed(events(reasoning(1)))

    assert json.loads(read.response)["choices"][0]["message"]["content"] == ""
    assert json.loads(read.echo_message) == {"role": "assistant", "content": ""}


def test_a_response_without_an_id_or_a_model_has_both_for_the_client() -> None:
    """What upstream leaves out the client still gets."""
    read = reader(stream=False)
    read.feed([event("response.completed", response={"model": 5, "output": [message("Hi")]})])

    told = json.loads(read.response)
    assert told["id"] == f"chatcmpl-{CREATED_AT}"
    assert told["model"] == "m"


def test_half_an_emoji_in_a_response_is_no_obstacle() -> None:
    """The final event is read another way where the fast one refuses it."""
    completed = lifecycle("completed", model="m-2", usage={"input_tokens": 1, "output_tokens": 2})
    read = reader(stream=False)
    read.feed([completed.replace(b'"output":[]', rb'"instructions":"\ud83d","output":[]')])

    told = json.loads(read.response)
    assert told["model"] == "m-2"
    assert told["usage"]["total_tokens"] == 3
    created = lifecycle("created", model="m-2").replace(b'"output"', rb'"x":"\ud83d","output"')
    assert parsed(reader().feed([created, text_delta("a")]))[0]["model"] == "m-2"


def test_a_message_may_have_its_text_for_content() -> None:
    """The easy form of an item is read too."""
    read = reader(stream=False)
    read.feed([lifecycle("completed", output=[{"type": "message", "content": "Hi"}])])

    assert json.loads(read.response)["choices"][0]["message"]["content"] == "Hi"


REASONS = {
    "max_output_tokens": "length",
    "content_filter": "content_filter",
    "max_messages": "length",
    None: "length",
    5: "length",
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("reason", "finish"), REASONS.items())
def test_an_incomplete_answer_says_why(stream: bool, reason: Any, finish: str) -> None:
    """Cut by the limit, or by the filter; calls do not hide it."""
    read = reader(stream=stream)
    details = None if reason is None else {"reason": reason}
    items = [message("Hel"), call(1)]

    data = read.feed(
        [lifecycle("created"), lifecycle("incomplete", incomplete_details=details, output=items)]
    )

    choice = parsed(data)[-2]["choices"][0] if stream else json.loads(read.response)["choices"][0]
    assert choice["finish_reason"] == finish
    assert read.terminal is Kind.INCOMPLETE
    assert read.refusal is None


# --- Errors -------------------------------------------------------------------------------------

ERROR = event("error", status=429, error={"code": "rate_limit_exceeded", "message": "Wait."})
FAILED: dict[str, tuple[Any, int, str | None]] = {
    "overload": ({"code": "server_error", "message": "Oh."}, 500, "server_error"),
    "limit": ({"code": "rate_limit_exceeded", "message": "Wait."}, 429, "rate_limit_exceeded"),
    "prompt": ({"code": "invalid_prompt", "message": "No."}, 400, "invalid_prompt"),
    "image": ({"code": "failed_to_download_image", "message": "?"}, 400, None),
    "unknown": ({"code": "odd", "message": "?"}, 500, "odd"),
    "none": (None, 500, "server_error"),
    "text": ("Oh.", 500, "server_error"),
}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("error", "status", "code"), FAILED.values(), ids=FAILED)
def test_a_failure_before_any_content_is_a_refusal(
    stream: bool, error: Any, status: int, code: str | None
) -> None:
    """Chat answers it with a status and an error, so nothing has been written."""
    read = reader(stream=stream)

    data = read.feed([lifecycle("created"), lifecycle("failed", status="failed", error=error)])

    assert data == b""
    assert not read.begun
    assert read.terminal is Kind.ERROR
    assert read.refusal is not None
    reply = http_reply(read.refusal)
    assert reply.status == status
    told = json.loads(reply.body)["error"]
    assert told["code"] == (code or error["code"])
    assert told.keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("failure", [ERROR, lifecycle("failed", error={"code": "server_error"})])
def test_a_failure_in_mid_stream_is_an_error_and_no_end(failure: bytes) -> None:
    """SDKs raise on it; there is neither a reason nor `[DONE]`."""
    read = reader()

    chunks = parsed(read.feed([lifecycle("created"), text_delta("Hel"), failure]))

    assert len(chunks) == 3
    assert chunks[-1].keys() == {"error"}
    assert chunks[-1]["error"].keys() == {"message", "type", "param", "code"}
    assert read.begun
    assert read.terminal is Kind.ERROR
    assert read.response == read.echo_message == b""


def test_a_failure_of_a_body_is_a_refusal_after_the_commit_point() -> None:
    """Without streaming nothing was written, so the status can still be told."""
    read = reader(stream=False)

    read.feed([lifecycle("created"), text_delta("Hel"), ERROR])

    assert read.begun
    assert read.terminal is Kind.ERROR
    assert read.refusal is not None
    assert read.refusal.status == 429


@pytest.mark.parametrize("before", [[], [lifecycle("created"), lifecycle("in_progress")]])
def test_an_error_before_any_content_is_a_refusal(before: list[bytes]) -> None:
    """In place of the first event or after the beginning, nothing has been written."""
    read = reader()

    assert read.feed([*before, ERROR]) == b""
    assert not read.begun
    assert read.refusal is not None
    assert read.refusal.code == "rate_limit_exceeded"


def test_an_error_of_several_lines_stays_one_field() -> None:
    """Line ends inside a pretty-printed error become spaces."""
    pretty = json.dumps(json.loads(ERROR), indent=1).replace("\n", "\r\n").encode()

    chunks = parsed(reader().feed([lifecycle("created"), text_delta("a"), pretty]))

    assert chunks[-1]["error"]["code"] == "rate_limit_exceeded"


def test_an_error_of_our_own_has_the_same_form() -> None:
    """A broken reply says why in the way that SDKs raise."""
    assert parsed(reader().error_event("upstream_silent", "Nothing came.")) == [
        {
            "error": {
                "message": "Nothing came.",
                "type": "server_error",
                "param": None,
                "code": "upstream_silent",
            }
        }
    ]


# --- The guards ---------------------------------------------------------------------------------


def test_what_follows_the_end_is_not_shown() -> None:
    """It makes the connection dirty, also where it looks like the event before."""
    read = reader()
    stream = [lifecycle("created"), text_delta("a"), text_delta("b"), lifecycle("completed")]
    read.feed(stream)

    assert read.feed([event("responsesapi.websocket_timing")]) == b""
    assert not read.dirty
    assert read.feed([text_delta("c")]) == b""
    assert read.dirty


FAULTS = {
    "another response": event("response.in_progress", response={"id": "resp_other"}),
    "created twice": lifecycle("created"),
    "no JSON": b"x",
    "a delta that is no JSON": b'{"type":"response.output_text.delta","delta":"a}',
    "a delta with a line end": b'{"type":"response.output_text.delta","delta":"a\nb"}',
    "an item with a duplicate key": (
        b'{"type":"response.output_item.done","item":{"type":"message","type":"message"}}'
    ),
    "content with a duplicate key": (
        b'{"type":"response.output_item.done","item":'
        b'{"type":"message","content":[{"text":"a","text":"b"}]}}'
    ),
    "content that is no list": event(
        "response.output_item.done", item={"type": "message", "content": 5}
    ),
    "a call without an id": event(
        "response.output_item.done", item={"type": "function_call", "name": "f", "arguments": ""}
    ),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_keeps_what_was_written_before_it(fault: bytes) -> None:
    """What can't belong to this answer ends it; the chunks before go to the client."""
    read = reader()
    with pytest.raises(ProtocolFault) as caught:
        read.feed([lifecycle("created"), text_delta("a"), fault, text_delta("b")])

    assert deltas(parsed(caught.value.written)) == [OPENING, {"content": "a"}]


def test_a_late_event_is_no_beginning() -> None:
    """On a connection that has carried another turn an answer begins with its beginning."""
    with pytest.raises(ProtocolFault):
        reader(reused=True).feed([text_delta("a")])


def test_representations_hold_no_content() -> None:
    """A reader in a log says how far it is."""
    read = reader()
    read.feed([lifecycle("created"), text_delta("secret")])

    assert "resp_abc" in repr(read)
    assert "secret" not in repr(read)


# --- The echo -----------------------------------------------------------------------------------


def turn(*items: Any) -> TurnRequest:
    """Return a request with these items."""
    made = parse_body(body(*items), FINGERPRINTS.root("p"), FINGERPRINTS)
    assert isinstance(made, TurnRequest)
    return made


def answer(*items: Any) -> ChatReplyReader:
    """Return the reader of a whole answer."""
    read = reader()
    read.feed(events(*items))
    return read


def judged(read: ChatReplyReader, *messages: Any) -> Match | Mismatch:
    """Compare messages that follow the answer with what is expected after it."""
    request = turn(user("a"))
    told = Answer("resp_abc", read.output, read.final_output, read.echo)
    head = new_head(request, told, principal="p", connection_id=1)
    assert head is not None
    following = [Item(raw) for raw in translate([dump(each) for each in messages]).items]
    return match(head, request.envelope, following, MatchingPolicy())


WHOLE = (
    reasoning(1),
    message("Let me ", phase="commentary"),
    message("look.", number=2),
    call(1, '{"city":"Z\u00fcrich","x":1.0}'),
    call(2, "{}"),
)
TOOLS = [
    {"role": "tool", "tool_call_id": "call_1", "content": "4"},
    {"role": "tool", "tool_call_id": "call_2", "content": "5"},
]


def echo(**changes: Any) -> Any:
    """Return the message as the client got it, changed."""
    told = json.loads(answer(*WHOLE).echo_message)
    return {key: value for key, value in {**told, **changes}.items() if value is not ...}


def respelt(arguments: str) -> Any:
    """Return the message's calls with the first one's arguments spelt otherwise."""
    calls = echo()["tool_calls"]
    calls[0]["function"]["arguments"] = arguments
    return calls


ECHOES: dict[str, list[Any]] = {
    "verbatim": [echo()],
    "the SDK's fields": [
        echo(refusal=None, annotations=[], audio=None, function_call=None, parsed=None)
    ],
    "text in a part": [echo(content=[{"type": "text", "text": "Let me look."}])],
    "a part with the reply's fields": [
        echo(
            content=[
                {
                    "type": "text",
                    "text": "Let me look.",
                    "role": "assistant",
                    "refusal": None,
                    "annotations": [],
                    "tool_calls": echo()["tool_calls"],
                }
            ]
        )
    ],
    "spaced arguments": [echo(tool_calls=respelt('{"city": "Z\u00fcrich", "x": 1.0}'))],
    "escaped arguments": [echo(tool_calls=respelt('{"city": "Z\\u00fcrich", "x": 1.0}'))],
    "blank for empty arguments": [
        echo(
            tool_calls=[
                echo()["tool_calls"][0],
                {"id": "call_2", "type": "function", "function": {"name": "look", "arguments": ""}},
            ]
        )
    ],
    "indices": [
        echo(tool_calls=[{**each, "index": n} for n, each in enumerate(echo()["tool_calls"])])
    ],
    "text in a message of its own": [echo(tool_calls=...), echo(content=None)],
    "thoughts from elsewhere": [echo(reasoning_content="Hm.")],
}


@pytest.mark.parametrize("echoes", ECHOES.values(), ids=ECHOES)
def test_every_measured_echo_continues_the_chain(echoes: list[Any]) -> None:
    """Text joined, calls grouped, arguments spelt anew, reasoning gone: it is the same answer."""
    outcome = judged(answer(*WHOLE), *echoes, *TOOLS, {"role": "user", "content": "Go on"})

    assert isinstance(outcome, Match)
    assert [json.loads(item.raw) for item in outcome.delta] == [
        output(1, "4"),
        output(2, "5"),
        user("Go on"),
    ]


CHANGED: dict[str, tuple[list[Any], Reason]] = {
    "text dropped": ([echo(content=None), *TOOLS], Reason.TEXT_DROPPED),
    "text changed": ([echo(content="Let me see."), *TOOLS], Reason.ANSWER_CHANGED),
    "a call lost": ([echo(tool_calls=echo()["tool_calls"][:1]), TOOLS[0]], Reason.ANSWER_CHANGED),
    "number changed": (
        [echo(tool_calls=respelt('{"city":"Z\u00fcrich","x":1}')), *TOOLS],
        Reason.ANSWER_CHANGED,
    ),
    "no output": ([echo(), TOOLS[0]], Reason.CALL_UNANSWERED),
    "calls as text": (
        [{"role": "assistant", "content": "Calling tools:\n[...]"}, user("Observation: 4")],
        Reason.ANSWER_CHANGED,
    ),
}


@pytest.mark.parametrize(("messages", "reason"), CHANGED.values(), ids=CHANGED)
def test_an_echo_that_says_something_else_does_not(messages: list[Any], reason: Reason) -> None:
    """What the model would read otherwise is sent in full."""
    outcome = judged(answer(*WHOLE), *messages)

    assert isinstance(outcome, Mismatch)
    assert outcome.reason is reason


@given(ITEMS)
def test_the_echo_can_always_be_translated(items: list[Any]) -> None:
    """Whatever the answer, the message that is expected back is one that we take."""
    read = reader(stream=False)
    read.feed([lifecycle("created"), lifecycle("completed", output=items)])

    expected = translate([read.echo_message])
    told = json.loads(read.response)["choices"][0]["message"]
    assert translate([dump(told)]).items == expected.items
    calls = [json.loads(raw).get("call_id") for raw in expected.items]
    assert [call_id for call_id in calls if call_id] == [
        item["call_id"] for item in items if "call_id" in item
    ]


@given(TEXTS, st.lists(st.builds(call, st.integers(0, 9), TEXTS), max_size=2))
def test_the_expected_echo_equals_upstreams_own_items(text: str, calls: list[Any]) -> None:
    """Where upstream answered in Chat's order, what is expected back is what upstream holds."""
    items = [*([message(text)] if text or not calls else []), *calls]
    read = reader(stream=False)
    read.feed([lifecycle("created"), lifecycle("completed", output=items)])

    expected = [Item(raw).compact_form for raw in translate([read.echo_message]).items]

    assert [form.fields for form in expected] == [
        Item(dump(item)).compact_form.fields for item in items
    ]
