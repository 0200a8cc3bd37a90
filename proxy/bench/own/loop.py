"""
The agent: a fixed number of forced tool calls over a growing history, and an answer.

It is as stateless as they come: `store: false`, its whole history with every request, streamed.
The model has no choice of what to do (`tool_choice`), so that both ways do the same work; what it
writes differs nevertheless. Of an answer the calls and the texts come back, without ids and without
the reasoning, which every upstream takes.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from proxy.bench.own.account import MAX_OUTPUT_TOKENS, OwnRun, Usage
from proxy.core.sse import SseReader
from proxy.demo.results import Run, TurnResult
from proxy.upstream.passthrough import environment_proxy

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.bench.own.account import Task

_TIMEOUT_S: Final = 300.0
_MAX_EVENT_BYTES: Final = 16 * 1024 * 1024
_TOOL: Final = {
    "type": "function",
    "name": "read_page",
    "description": "Read a page of the log.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"page": {"type": "integer"}},
        "required": ["page"],
        "additionalProperties": False,
    },
}
_PROMPT: Final = (
    "Read the pages of the log one after the other, beginning with page 1, each with a call of the"
    " tool. When there are no more, say in one short sentence that you are done."
)


class LoopFailed(Exception):
    """A turn had no answer. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came back for one turn."""

    items: list[dict[str, Any]]
    usage: Usage
    mode: str | None
    first_event_s: float
    duration_s: float
    uploaded_bytes: int


async def run_agent(base_url: str, key: str, task: Task, advance: Callable[[], None]) -> OwnRun:
    """Run the agent once against `base_url`; `advance` is called after each turn."""
    mark = secrets.token_hex(
        8
    )  # no two runs begin alike: what one leaves in a cache helps no other
    history: list[dict[str, Any]] = [{"role": "user", "content": f"{_PROMPT} (Run {mark}.)"}]
    turns, usage, uploaded = [], Usage(), 0
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, proxy=environment_proxy(base_url)) as session:
        began = time.perf_counter()
        for number in range(task.turns):
            body = _body(task, history, calls=number < task.calls)
            answer = await _ask(session, base_url, key, body, f"turn {number + 1}")
            ended_s = time.perf_counter() - began
            turns.append(
                TurnResult(answer.first_event_s, answer.duration_s, ended_s, answer.mode, None)
            )
            usage += answer.usage
            uploaded += answer.uploaded_bytes
            history += [*_echo(answer.items), *_outputs(answer.items, number + 1, task)]
            advance()
    return OwnRun(Run(tuple(turns), time.perf_counter() - began, uploaded), usage)


def _body(task: Task, history: list[dict[str, Any]], *, calls: bool) -> bytes:
    choice: object = {"type": "function", "name": _TOOL["name"]} if calls else "none"
    return json.dumps(
        {
            "model": task.model,
            "instructions": "You are an agent that reads logs. Do as you are told, briefly.",
            "tools": [_TOOL],
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "max_output_tokens": MAX_OUTPUT_TOKENS,
            "store": False,
            "stream": True,
            "input": history,
        }
    ).encode()


async def _ask(
    session: aiohttp.ClientSession, base_url: str, key: str, body: bytes, what: str
) -> _Answer:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    began = time.perf_counter()
    first_s: float | None = None
    reader, terminal = SseReader(_MAX_EVENT_BYTES), None
    try:
        async with session.post(f"{base_url}/responses", data=body, headers=headers) as reply:
            if reply.status != 200:
                raise LoopFailed(f"{what} was answered {reply.status}{_code(await reply.read())}")
            mode = reply.headers.get("turnwire-mode")
            async for block in reply.content.iter_any():
                for data in reader.feed(block):
                    first_s = first_s or time.perf_counter() - began
                    terminal = _terminal(data) or terminal
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise LoopFailed(f"{what} failed: {type(error).__name__}") from error
    if terminal is None or terminal.get("status") not in ("completed", "incomplete"):
        raise LoopFailed(f"{what} did not end with an answer")
    duration_s = time.perf_counter() - began
    items = [item for item in terminal.get("output") or () if isinstance(item, dict)]
    return _Answer(items, _usage(terminal), mode, first_s or duration_s, duration_s, len(body))


def _terminal(data: bytes) -> dict[str, Any] | None:
    if b'"response.' not in data[:200] or b'"output"' not in data:
        return None
    event = json.loads(data)
    ends = ("response.completed", "response.incomplete", "response.failed")
    return event["response"] if event.get("type") in ends else None


def _code(body: bytes) -> str:
    """Give the code of an error, if it is one that may be shown."""
    try:
        code = json.loads(body)["error"]["code"]
    except (ValueError, LookupError, TypeError):
        return ""
    return f" ({code})" if isinstance(code, str) and code.replace("_", "").isalnum() else ""


def _usage(response: dict[str, Any]) -> Usage:
    usage = response.get("usage") or {}
    details = usage.get("input_tokens_details") or {}
    return Usage(
        int(usage.get("input_tokens") or 0),
        int(details.get("cached_tokens") or 0),
        int(usage.get("output_tokens") or 0),
    )


def _echo(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give the model's items as the next request has them."""
    echoed = []
    for item in items:
        if item.get("type") == "function_call":
            kept = ("type", "call_id", "name", "arguments")
            echoed.append({key: item[key] for key in kept})
        elif item.get("type") == "message":
            texts = [part.get("text", "") for part in item.get("content") or ()]
            echoed.append({"role": "assistant", "content": "".join(texts)})
    return echoed


def _outputs(items: list[dict[str, Any]], page: int, task: Task) -> list[dict[str, Any]]:
    """Answer the calls; a model that called nothing is told to go on."""
    calls = [item for item in items if item.get("type") == "function_call"]
    text = _page(page, task.output_bytes)
    if not calls:
        return [{"role": "user", "content": f"Go on. {text}"}]
    return [
        {"type": "function_call_output", "call_id": call["call_id"], "output": text}
        for call in calls
    ]


def _page(number: int, size_bytes: int) -> str:
    line = f"page {number}: the service has answered request {{}} in good time\n"
    lines = "".join(line.format(place) for place in range(size_bytes // len(line) + 1))
    return lines[:size_bytes]
