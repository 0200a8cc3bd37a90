"""
The answer to a context: a pure function, in the manner of a model in an agent's tool loop.

From the context alone it is decided what comes next. While fewer tool calls than wanted have
been answered since the last user message, the answer is another call of one of the request's
own tools, with arguments grown from its JSON schema; every few rounds two calls at once, every
few rounds a commentary message beside them. Then comes the final message. How many calls are
wanted, and how long the final message is, a user message may say by markers:
`[calls=24]`, `[tokens=400]`.

Texts, call ids and arguments all derive from the context's digest: an answer that belongs to
another context can be told by its looks. Items come without ids; `events` gives them some.
"""

from __future__ import annotations

import base64
import enum
import hmac
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.simulator import errands
from proxy.simulator.meaning import CALL_OUTPUTS, OUTPUTS, Trace, digest, item_type
from proxy.simulator.values import Dice, instance, pieces, write_arguments
from proxy.simulator.wire import Item, Json, canonical, dumps

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

MEANINGFUL_SETTINGS = (
    "model",
    "instructions",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "max_output_tokens",
    "max_tool_calls",
    "temperature",
    "top_p",
    "top_logprobs",
    "reasoning",
    "text",
    "truncation",
    "context_management",
    "prompt",
)
"""The settings that an answer depends on. Delivery (`stream`, `store`, ...) is not among them."""

_MARKER = re.compile(r"\[(calls|tokens)=(\d{1,7})\]")
_BLOB_KEY = b"the simulator's own reasoning"
_BLOB_PREFIX = "gAAAAAB"
_LAST_RESORT = frozenset({"finish", "final_answer", "submit", "think", "exit", "handoff"})
_MIN_CUT_TOKENS = 1


class Calls(enum.Enum):
    """Which of an agent's tools are called."""

    ANY = enum.auto()
    """Any of them, with any arguments: for agents whose tools do nothing."""
    HARMLESS = enum.auto()
    """Those that a real agent can be told to use (`errands`)."""
    DELEGATED = enum.auto()
    """The same, but the first round gives two sub-agents a task each, where there are such."""


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How the tool loop runs where no marker says otherwise."""

    rounds: int = 3
    """Rounds of tool calls after a user message."""
    parallel_every: int = 3
    """Each n-th round has two calls; 0 for never."""
    commentary_every: int = 2
    """Each n-th round has a message beside its calls; 0 for never."""
    message_tokens: int = 24
    """Length of the final message."""
    reasoning: bool = True
    """Whether each answer starts with a reasoning item."""
    odd_arguments: bool = False
    """Whether arguments are spelt in ways that a re-serialising client changes."""
    calls: Calls = Calls.ANY
    """Which tools are called."""
    marker: str = ""
    """
    What an agent's final message begins with, so that it can be found in the output of a program:
    `MARKER-PROMPTS-OUTPUTS`, the numbers counting user messages and tool outputs of the context.
    Answers in JSON and answers to requests without tools go without.
    """


@dataclass(frozen=True, slots=True)
class Context:
    """All that the model would see: settings, and the items in order with their trace."""

    settings: Mapping[str, Json]
    items: Sequence[Item]
    trace: Trace

    @classmethod
    def of(
        cls, body: Mapping[str, Json], items: Sequence[Item], trace: Trace | None = None
    ) -> Context:
        """The context of a request's body and its full list of items."""
        settings = {k: body[k] for k in MEANINGFUL_SETTINGS if body.get(k) is not None}
        return cls(settings, items, Trace().extended(items) if trace is None else trace)

    @property
    def digest(self) -> bytes:
        """The digest of everything that the answer depends on."""
        return digest(canonical(dict(self.settings)), self.trace.value)


@dataclass(frozen=True, slots=True)
class Answer:
    """Output items without ids, and why they stop short, if they do."""

    items: tuple[Item, ...]
    tokens: int
    incomplete: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the tool loop has come since the last user message."""

    calls_wanted: int | None
    tokens_wanted: int | None
    answered: int
    rounds: int

    @classmethod
    def of(cls, items: Sequence[Item]) -> Progress:
        """Read from the end backwards to the last user message."""
        answered = rounds = 0
        in_outputs = False
        for item in reversed(items):
            kind = item_type(item)
            if kind == "message" and item.get("role") == "user":
                markers = dict(_MARKER.findall(_plain_text(item.get("content"))))
                calls, tokens = markers.get("calls"), markers.get("tokens")
                wanted = None if calls is None else int(calls)
                return cls(wanted, None if tokens is None else int(tokens), answered, rounds)
            is_output = kind in OUTPUTS
            answered += is_output
            rounds += is_output and not in_outputs
            in_outputs = is_output
        return cls(None, None, answered, rounds)

    def calls_left(self, options: AnswerOptions) -> int:
        """How many calls may still be made before the final message; 2 stands for many."""
        if self.calls_wanted is not None:
            return max(self.calls_wanted - self.answered, 0)
        return 2 if self.rounds < options.rounds else 0


def answer(context: Context, options: AnswerOptions | None = None) -> Answer:
    """The output items for a context. Pure: equal contexts give equal answers."""
    options = options or AnswerOptions()
    dice = Dice(context.digest)
    progress = Progress.of(context.items)
    calls = list(_calls(context, options, progress, dice))
    items: list[Item] = []
    if options.reasoning:
        items.append(_reasoning(dice))
    if calls:
        if _is_nth(progress.rounds, options.commentary_every):
            text = f"Round {progress.rounds + 1}: {dice.words('aside', 6)}".rstrip()
            items.append(_message(text, "commentary"))
        items.extend(calls)
    else:
        length = progress.tokens_wanted or options.message_tokens
        text = _final_text(context, dice, length, options.marker)
        items.append(_message(text, "final_answer"))
    return _within_limit(items, context.settings.get("max_output_tokens"))


def with_encrypted(items: Sequence[Item], *, wanted: bool) -> tuple[Item, ...]:
    """The items with, or without, the encrypted content of their reasoning."""
    if wanted:
        return tuple(items)
    return tuple({k: v for k, v in item.items() if k != "encrypted_content"} for item in items)


def is_genuine(blob: Json) -> bool:
    """Whether `encrypted_content` was made here and came back unharmed."""
    if not isinstance(blob, str) or not blob.startswith(_BLOB_PREFIX):
        return False
    try:
        raw = base64.urlsafe_b64decode(blob.removeprefix(_BLOB_PREFIX))
    except ValueError:
        return False
    return hmac.compare_digest(raw[-32:], _seal(raw[:-32]))


def _seal(payload: bytes) -> bytes:
    return hmac.digest(_BLOB_KEY, payload, "sha256")


def _reasoning(dice: Dice) -> Item:
    payload = dice.seed + bytes.fromhex(dice.hex("padding", 64)) * 3
    blob = _BLOB_PREFIX + base64.urlsafe_b64encode(payload + _seal(payload)).decode()
    summary = f"**Thinking**\n\n{dice.words('summary', 5)}"
    return {
        "type": "reasoning",
        "encrypted_content": blob,
        "summary": [{"type": "summary_text", "text": summary}],
    }


def _message(text: str, phase: str) -> Item:
    part = {"type": "output_text", "annotations": [], "logprobs": [], "text": text}
    message = {"type": "message", "status": "completed", "role": "assistant", "phase": phase}
    return {**message, "content": [part]}


def _final_text(context: Context, dice: Dice, length: int, marker: str) -> str:
    form = (context.settings.get("text") or {}).get("format") or {}
    if form.get("type") == "json_schema":
        return dumps(instance(form.get("schema"), dice))
    if form.get("type") == "json_object":
        return dumps({"context": dice.seed.hex()})
    mark = f"{marker}-{_census(context.items)} " if marker and any(_tools(context)) else ""
    return f"{mark}[{dice.seed.hex()[:16]}] {dice.words('final', max(length - 2, 1))}".rstrip()


def _census(items: Sequence[Item]) -> str:
    prompts = sum(item_type(item) == "message" and item.get("role") == "user" for item in items)
    return f"{prompts}-{sum(item_type(item) in OUTPUTS for item in items)}"


def _is_nth(rounds_done: int, every: int) -> bool:
    return every > 0 and (rounds_done + 1) % every == 0


def _calls(
    context: Context, options: AnswerOptions, progress: Progress, dice: Dice
) -> Iterator[Item]:
    tools = [tool for tool in _tools(context) if tool.name]
    choice = context.settings.get("tool_choice")
    left = progress.calls_left(options)
    if isinstance(choice, dict) and choice.get("name"):
        tools = [tool for tool in tools if tool.name == choice["name"]]
        left = 0 if progress.answered else 1
    elif choice == "none":
        left = 0
    usable = [tool for tool in tools if tool.name not in _LAST_RESORT] or tools
    if not left or not usable:
        return
    may_delegate = options.calls is Calls.DELEGATED and _may_delegate(context, progress)
    if options.calls is Calls.DELEGATED and (waits := list(_waits(context, usable, dice))):
        yield from waits
        return
    both = may_delegate or _is_nth(progress.rounds, options.parallel_every)
    both = both and context.settings.get("parallel_tool_calls") is not False
    for index in range(2 if both and left >= 2 else 1):
        tool = usable[dice.number(f"tool {index}", len(usable))]
        thrown = Dice(digest(dice.seed, b"call", bytes([index])))
        if options.calls is Calls.ANY:
            yield _call(tool, thrown, odd=options.odd_arguments)
            continue
        names = [each.name for each in usable]
        place = errands.delegate(names) if may_delegate else None
        place = errands.choose(names, index) if place is None else place
        tool = tool if place is None else usable[place]
        yield _errand(tool, thrown, index, odd=options.odd_arguments)


def _may_delegate(context: Context, progress: Progress) -> bool:
    """Only before the first call of all, and never in a sub-agent."""
    if progress.rounds:
        return False
    texts = (_plain_text(item.get("content")) for item in context.items if "content" in item)
    called = any(item_type(item) in CALL_OUTPUTS for item in context.items)
    return not called and not any(errands.SUB_TASK in text for text in texts)


def _waits(context: Context, tools: Sequence[_Tool], dice: Dice) -> Iterator[Item]:
    """A call for each sub-agent in the background, in the round after they were started."""
    outputs = []
    for item in reversed(context.items):
        if item_type(item) not in OUTPUTS:
            break
        outputs.append(_plain_text(item.get("output")))
    names = [tool.name for tool in tools]
    for index, agent in enumerate(errands.agents_to_wait_for(names, outputs[::-1])):
        made = _call(tools[names.index(errands.WAIT)], Dice(dice.seed + bytes([index])), odd=False)
        yield {**made, "arguments": dumps({"targets": [agent], "timeout_ms": 30_000})}


def _errand(tool: _Tool, dice: Dice, index: int, *, odd: bool) -> Item:
    made = _call(tool, dice, odd=False)
    if tool.kind == "custom":
        return {**made, "input": errands.script(tool.name, dice)}
    return {**made, "arguments": errands.arguments(tool.schema, dice, index, odd=odd)}


@dataclass(frozen=True, slots=True)
class _Tool:
    kind: str
    name: str
    namespace: str | None
    schema: Json


def _tools(context: Context) -> Iterator[_Tool]:
    """Tools of the request, of `additional_tools` items, and those inside namespaces."""
    declared = list(context.settings.get("tools") or [])
    for item in context.items:
        if item_type(item) == "additional_tools":
            declared.extend(item.get("tools") or [])
    for tool in declared:
        if tool.get("type") == "namespace":
            for inner in tool.get("tools") or []:
                yield from _tool(inner, tool.get("name"))
        else:
            yield from _tool(tool, None)


def _tool(tool: Mapping[str, Json], namespace: str | None) -> Iterator[_Tool]:
    if tool.get("type") in {"function", "custom"}:
        name = str(tool.get("name") or "")
        yield _Tool(tool["type"], name, namespace, tool.get("parameters") or {})


def _call(tool: _Tool, dice: Dice, *, odd: bool) -> Item:
    call_id = f"call_{dice.hex('call', 24)}"
    item: Item = {"status": "completed", "call_id": call_id, "name": tool.name}
    if tool.namespace is not None:
        item["namespace"] = tool.namespace
    if tool.kind == "custom":
        return {"type": "custom_tool_call", **item, "input": f"echo {dice.hex('input', 12)}"}
    value = instance(tool.schema, dice, odd=odd)
    arguments = write_arguments(value if isinstance(value, dict) else {}, dice, odd=odd)
    return {"type": "function_call", **item, "arguments": arguments}


def visible_text(item: Item) -> str:
    """What the model streams of an item: the text that costs output tokens."""
    match item_type(item):
        case "message":
            return _plain_text(item.get("content"))
        case "function_call":
            return str(item["arguments"])
        case "custom_tool_call":
            return str(item["input"])
        case _:
            return ""


def _plain_text(content: Json) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _within_limit(items: list[Item], limit: Json) -> Answer:
    """Cut the answer at `max_output_tokens`: the item that crosses it is a cut message."""
    kept: list[Item] = []
    used = 0
    for item in items:
        portions = pieces(visible_text(item))
        if isinstance(limit, int) and used + len(portions) > limit:
            if item_type(item) not in CALL_OUTPUTS:
                text = "".join(portions[: max(limit - used, _MIN_CUT_TOKENS)])
                kept.append({**_message(text, item["phase"]), "status": "incomplete"})
            return Answer(tuple(kept), limit, "max_output_tokens")
        kept.append(item)
        used += len(portions)
    return Answer(tuple(kept), used)
