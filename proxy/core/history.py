"""
Does a request continue a chain, and with which new items?

A head is the last response of a chain: the history upstream was given, the items it answered
with, and the settings of that turn. A request continues it when, after the same history, the
model's items come back as the client's echo (equal in canonical form, each once), and what follows
can stand alone as new input. `upstream's history + delta = the client's history` is the invariant;
anything that leaves a doubt about it is a mismatch with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from proxy.core.chat_messages import translate
from proxy.core.items import Form, Item
from proxy.core.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.core.request import Envelope, TurnRequest

# New items that may not follow a chain: upstream would drop its tools (reported), or hold
# something twice. Compactions, under any name, are unsafe too: upstream rebuilds its context from
# them.
UNSAFE_NEW_TYPES = frozenset({"additional_tools", "item_reference"})

# What the message of a Chat Completions reply can show.
SHOWN_IN_CHAT = frozenset({"message", "function_call", "custom_tool_call"})

CHANGED = {
    "model": Reason.CHANGED_MODEL,
    "instructions": Reason.CHANGED_INSTRUCTIONS,
    "tools": Reason.CHANGED_TOOLS,
}


@dataclass(frozen=True, slots=True)
class MatchingPolicy:
    """
    Where the rules leave a choice. Each flag trades strictness for more deltas.

    `ignore_changed_tools`: other tools do not end a chain (they are sent again anyway).
    `ignore_missing_reasoning`: a client that drops reasoning items lets upstream keep them.
    `ignore_dropped_text`: so does a client that drops text beside tool calls.
    """

    ignore_changed_tools: bool = False
    ignore_missing_reasoning: bool = True
    ignore_dropped_text: bool = False


@dataclass(eq=False, slots=True)
class Head:
    """
    The last response of a chain, and what a request must show to continue it.

    `history` is the key of the items upstream was given for this response, `item_count` their
    number. `connection_id` is the connection that holds it; with `stored` it also lives upstream.
    `blocked` names why it can never be continued.
    """

    principal: str
    response_id: str
    connection_id: int
    stored: bool
    history: bytes
    item_count: int
    settings: Mapping[str, bytes]
    output: tuple[Form, ...]
    blocked: Reason | None = None

    @property
    def size_bytes(self) -> int:
        """How much memory the head holds, about; its settings are shared by the chain."""
        fields = (text for form in self.output for text in form.fields.values())
        return 700 + 300 * len(self.output) + sum(len(text) + 50 for text in fields)


@dataclass(frozen=True, slots=True)
class Gap:
    """An item that is surely the model's own, yet unequal: the fields in which its echo differs."""

    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Why a request does not continue a head; `gaps` are signs that we fail to follow a client."""

    reason: Reason
    gaps: tuple[Gap, ...] = field(default=())


@dataclass(slots=True)
class Match:
    """A request continues a head: the first `echoed` items are its output, `delta` the new ones."""

    echoed: int
    delta: Sequence[Item]


Outcome: TypeAlias = Match | Mismatch


def match(
    head: Head, envelope: Envelope, following: Sequence[Item], policy: MatchingPolicy
) -> Outcome:
    """
    Compare what follows the head's history in a request with what the head needs.

    `following` are the request's items after the history that `head.history` is the key of.
    Raises ValueError if an item can't be read.
    """
    if not following:
        return Mismatch(Reason.REPEATED)
    if head.blocked is not None:
        return Mismatch(head.blocked)
    if (changed := changed_settings(head.settings, envelope.fingerprints, policy)) is not None:
        return Mismatch(changed)
    echoed, missing = _take_echo(head.output, following)
    if (reason := _judge_missing(head.output, missing, policy)) is not None:
        return Mismatch(reason, _gaps(missing, following))
    delta = following[echoed:]
    if (reason := _judge_delta(head.output, delta)) is not None:
        return Mismatch(reason)
    return Match(echoed, delta)


def changed_settings(
    old: Mapping[str, bytes], new: Mapping[str, bytes], policy: MatchingPolicy
) -> Reason | None:
    """Return the reason for the most telling setting that differs, or None if none does."""
    if old is new or old == new:
        return None
    keys = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    if policy.ignore_changed_tools:
        keys.discard("tools")
    if not keys:
        return None
    return next((CHANGED[key] for key in CHANGED if key in keys), Reason.CHANGED_SETTINGS)


def _take_echo(output: Sequence[Form], following: Sequence[Item]) -> tuple[int, list[Form]]:
    """
    Take the echo of `output` from the beginning of `following`.

    Clients were seen to put calls before the text, and reasoning anywhere; but what the client
    makes of the order of two texts, or of two calls, is its own and counts.

    Returns how many items it took, and the output items that were not among them.
    """
    missing = list(output)
    taken = 0
    for item in following:
        place = next((i for i, form in enumerate(missing) if _echoes(item, form)), None)
        if place is None or _overtakes(missing[place], missing[:place]):
            break
        del missing[place]
        taken += 1
    return taken, missing


def _overtakes(form: Form, earlier: Sequence[Form]) -> bool:
    if form.type == "reasoning":
        return False
    is_text = form.type == "message"
    return any(
        (other.type == "message") == is_text for other in earlier if other.type != "reasoning"
    )


def _echoes(item: Item, form: Form) -> bool:
    if item.type == "item_reference":
        return form.item_id is not None and item.value.get("id") == form.item_id
    if item.type != form.type:
        return False
    echo = item.compact_form
    if echo is form:
        return True  # sent back untouched
    if echo.name is not None and form.name is not None and echo.name != form.name:
        return False
    if form.type == "reasoning":
        return _same_reasoning(echo, form)
    return echo.fields == form.fields and echo.phase in (None, form.phase)


def _same_reasoning(echo: Form, form: Form) -> bool:
    if echo.sealed is not None and form.sealed is not None:
        return echo.sealed == form.sealed
    if echo.item_id is not None and echo.item_id == form.item_id:
        # The same item by name; what the client kept of its texts must be what was there.
        return all(form.fields.get(key) == text for key, text in echo.fields.items())
    return echo.sealed == form.sealed and echo.fields == form.fields


def _judge_missing(
    output: Sequence[Form], missing: Sequence[Form], policy: MatchingPolicy
) -> Reason | None:
    if not missing:
        return None
    visible = [form for form in missing if form.type != "reasoning"]
    if not visible:
        return None if policy.ignore_missing_reasoning else Reason.REASONING_DROPPED
    calls_kept = any(form.call_id for form in output if form not in missing)
    if calls_kept and all(form.type == "message" for form in visible):
        return None if policy.ignore_dropped_text else Reason.TEXT_DROPPED
    return Reason.ANSWER_CHANGED


def _judge_delta(output: Sequence[Form], delta: Sequence[Item]) -> Reason | None:
    if not delta:
        return Reason.NOTHING_NEW
    if not output and delta[0].is_produced:
        return Reason.ANSWER_CHANGED  # an echo of something that we never saw
    kinds = [item.type for item in delta]
    if any(kind in UNSAFE_NEW_TYPES or "compaction" in kind for kind in kinds):
        return Reason.UNSAFE_ITEM
    if "reasoning" in kinds:
        return Reason.HISTORY_CHANGED  # thoughts of another answer than the one upstream holds
    if pending := pending_calls(output):
        pending -= {item.call_id for item in delta if item.type.endswith("_output")}
        if pending:
            return Reason.CALL_UNANSWERED
    return None


def pending_calls(output: Sequence[Form]) -> set[str]:
    """
    Return the ids of the tool calls in `output` that wait for an output from the client.

    A call is whatever has a `call_id` and is not an output itself, also of a kind that we do not
    know: upstream answers 400 when one is left open.
    """
    calls = {form.call_id for form in output if form.call_id and not form.type.endswith("_output")}
    if not calls:
        return calls
    return calls - {form.call_id for form in output if form.type.endswith("_output")}


def _gaps(missing: Sequence[Form], following: Sequence[Item]) -> tuple[Gap, ...]:
    """Find items of the answer that came back recognisable but unequal."""
    known = {form.call_id or form.sealed for form in missing} - {None}
    echoes = [item.compact_form for item in following if known and item.is_produced]
    return tuple(
        Gap(_differing(form, echo))
        for echo in echoes
        if (echo.call_id or echo.sealed) in known
        for form in missing
        if echo.type == form.type and _surely_the_same(form, echo) and _differing(form, echo)
    )


def _surely_the_same(form: Form, echo: Form) -> bool:
    return (form.call_id is not None and form.call_id == echo.call_id) or (
        form.sealed is not None and form.sealed == echo.sealed
    )


def _differing(form: Form, echo: Form) -> tuple[str, ...]:
    keys = form.fields.keys() | echo.fields.keys()
    names = {key for key in keys if form.fields.get(key) != echo.fields.get(key)}
    if echo.phase not in (None, form.phase):
        names.add("phase")
    return tuple(sorted(names))


@dataclass(slots=True)
class Answer:
    """
    What a completed response brought.

    `streamed` are the raw items of its `output_item.done` events, `final` those of the terminal
    event, which some upstreams leave empty; either list may be. `echo` is the Chat message that
    the client was given in their place, if it was, as it is to be expected back.
    """

    response_id: str
    streamed: list[bytes]
    final: list[bytes]
    echo: bytes | None = None


def new_head(
    request: TurnRequest, answer: Answer, *, principal: str, connection_id: int
) -> Head | None:
    """
    Return the head that a completed answer makes of its chain.

    None where it must not be continued: its output or the request's items can't be read, or the
    two accounts that upstream gave of it disagree.
    """
    try:
        items = _agreed_output(answer)
        if items is not None and answer.echo is not None:
            items = _as_shown(items, answer.echo)
        output = None if items is None else _forms(items)
        history = request.history
    except ValueError:
        return None
    if items is None or output is None:
        return None
    request.fingerprints.remember(items)
    return Head(
        principal=principal,
        response_id=answer.response_id,
        connection_id=connection_id,
        stored=request.envelope.stored,
        history=history,
        item_count=request.item_count,
        settings=request.envelope.fingerprints,
        output=output,
        blocked=Reason.COMPACTED if request.compacts else None,
    )


def _agreed_output(answer: Answer) -> list[Item] | None:
    """Read upstream's account of its output, or both; None if they disagree."""
    items = [Item(raw) for raw in answer.final or answer.streamed]
    if answer.final and answer.streamed and answer.final != answer.streamed:
        streamed = read_output(answer.streamed)
        if not _same_output(streamed, _forms(items)):
            return None
    return items


def _as_shown(output: Sequence[Item], echo: bytes) -> list[Item]:
    """
    Put the items of a Chat message in the place of those that it shows.

    What it can't show stays, and is missing in every echo. With reasoning that is as if the client
    had left it out; anything else upstream knows and the client does not, so the history must be
    sent again.
    """
    unseen = [item for item in output if item.type not in SHOWN_IN_CHAT]
    return [*unseen, *(Item(raw) for raw in translate([echo]).items)]


def _same_output(one: Sequence[Form], other: Sequence[Form]) -> bool:
    return [(form.fields, form.phase) for form in one] == [
        (form.fields, form.phase) for form in other
    ]


def read_output(raw_items: Sequence[bytes]) -> tuple[Form, ...]:
    """Return the canonical forms of a response's output. Raises ValueError if one can't be read."""
    return _forms([Item(raw) for raw in raw_items])


def _forms(items: Sequence[Item]) -> tuple[Form, ...]:
    return tuple([item.compact_form for item in items])
