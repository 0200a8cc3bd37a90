"""
What can go wrong upstream, drawn at random: one row a kind, each with its row of the catalogue.

`Chaos` takes the place of the simulator's list of armed faults, and draws a fresh fault for a share
of the requests and upgrades that arrive. It counts what it gave.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from proxy.simulator.faults import (
    CODEX_RATE_LIMITS,
    NOT_FOUND_WORDINGS,
    WEBSOCKET_TIMING,
    Break,
    End,
    EndIncomplete,
    ErrorReply,
    ExtraEvents,
    FailResponse,
    Fault,
    Faults,
    HugeEvent,
    Moment,
    RefuseUpgrade,
    Restyle,
    SliceWrites,
    SlowStream,
    Style,
    connection_limit_reached,
    previous_response_not_found,
)
from proxy.simulator.garble import FATAL, HARMLESS, BadText, RawFrames
from proxy.simulator.validate import Transport
from proxy.simulator.wire import Shape

if TYPE_CHECKING:
    from collections import Counter

    from proxy.simulator.journal import Seen

WS, HTTP = Transport.WS, Transport.HTTP
Make = Callable[[random.Random], Fault]

# A refusal's status, code and type, as the API has them.
REFUSALS: tuple[tuple[int, str | None, str | None], ...] = (
    (400, "invalid_value", "invalid_request_error"),
    (401, "invalid_api_key", "authentication_error"),
    (403, "unsupported_country_region_territory", "permission_error"),
    (404, "model_not_found", "not_found_error"),
    (409, None, "conflict_error"),
    (413, "request_too_large", "request_too_large"),
    (422, None, "unprocessable_entity_error"),
    (429, "rate_limit_exceeded", "rate_limit_error"),
    (429, "insufficient_quota", "insufficient_quota"),
    (500, "server_error", "server_error"),
    (503, "server_is_overloaded", "service_unavailable_error"),
    (529, None, "overloaded_error"),
)
CLOSE_CODES = (1000, 1001, 1008, 1009, 1011, 1012, 1013, 4000)
BAD_TEXTS = (
    "{nope",
    "[]",
    "null",
    '"text"',
    "",
    "{}",
    '{"type": 7}',
    '{"type": "response.output_text.delta", "delta": NaN}',
    "[" * 10_000,
    '{"type": "response.created", "response": ' + "[" * 5000 + "]" * 5000 + "}",
)
STRAY = {"type": "response.output_text.delta", "delta": "stray"}


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of trouble: its row, how often it comes, and where; None is anywhere."""

    row: str
    make: Make
    weight: float = 1.0
    transport: Transport | None = WS


def _place(rng: random.Random) -> int:
    """Return after how many events something happens; -1 is before the last one."""
    return rng.choice((0, 0, 0, 1, 2, 3, -1, rng.randrange(1, 40)))


def _refusal(rng: random.Random, after_events: int = 0) -> ErrorReply:
    status, code, type_ = rng.choice(REFUSALS)
    headers = {"Retry-After": "0"} if status in (429, 503) else {}
    shape = rng.choice(list(Shape))
    return ErrorReply(
        status=status,
        code=code,
        type=type_,
        headers=headers,
        shape=shape,
        after_events=after_events,
    )


def _not_found(rng: random.Random) -> Fault:
    wording = rng.randrange(len(NOT_FOUND_WORDINGS))
    return previous_response_not_found(wording, rng.choice(list(Shape)))


KINDS: dict[str, Kind] = {
    "reset": Kind("F1", lambda rng: Break(end=End.RESET, after_events=_place(rng)), 4, None),
    "end without close frame": Kind(
        "F2", lambda rng: Break(end=End.ABORT, after_events=_place(rng)), 4, None
    ),
    "mute after accept": Kind("F4", lambda _: Break(end=End.STALL), 0.4),
    "mute in the middle": Kind(
        "F4", lambda rng: Break(end=End.STALL, after_events=rng.randrange(1, 20)), 0.4
    ),
    "connection limit": Kind("F5", lambda _: connection_limit_reached(), 4),
    "close code": Kind(
        "F6",
        lambda rng: Break(end=End.CLOSE, code=rng.choice(CLOSE_CODES), after_events=_place(rng)),
        4,
    ),
    "response not found": Kind("F7", _not_found, 4),
    "refusal": Kind("F8", _refusal, 3, None),
    "error in the stream": Kind("F8", lambda rng: _refusal(rng, rng.randrange(1, 20)), 2),
    "error in an HTTP stream": Kind(
        "F8",
        # Before the end of the shortest answer: what comes after an end is handed on over HTTP.
        lambda rng: replace(_refusal(rng, rng.randrange(1, 6)), shape=Shape.NESTED),
        2,
        HTTP,
    ),
    "failed response": Kind("F8", lambda rng: FailResponse(after_events=rng.randrange(1, 9)), 1),
    "incomplete response": Kind("F8", lambda _: EndIncomplete(), 1),
    "upgrade refused": Kind(
        "F9",
        lambda rng: RefuseUpgrade(
            status=rng.choice((401, 403, 404, 405, 426, 429, 500, 502, 503)),
            headers=rng.choice(({}, {"Retry-After": "0"})),
            body=rng.choice((RefuseUpgrade().body, "<html>Go away.</html>", "")),
        ),
    ),
    "slow stream": Kind("F13", lambda rng: SlowStream(gap_ms=rng.choice((0.2, 1))), 1, None),
    "sliced writes": Kind("F14", lambda rng: SliceWrites(slice_bytes=rng.randint(1, 7)), 1, HTTP),
    "malformed frame": Kind(
        "F15",
        lambda rng: RawFrames(frames=rng.choice(FATAL), after_events=rng.randrange(12), fatal=True),
        4,
    ),
    "odd but legal frames": Kind(
        "F15",
        lambda rng: RawFrames(frames=rng.choice(HARMLESS), after_events=rng.randrange(12)),
        2,
    ),
    "bad JSON": Kind(
        "F16",
        lambda rng: BadText(text=rng.choice(BAD_TEXTS), after_events=rng.randrange(12)),
        3,
    ),
    "huge event": Kind("F17", lambda rng: HugeEvent(extra_bytes=rng.choice((70_000, 300_000))), 1),
    "foreign response id": Kind("F18", lambda _: Restyle(style=Style.FOREIGN_ID), 2),
    "doubled beginning": Kind("F18", lambda _: Restyle(style=Style.DUPLICATE_CREATED), 1),
    "written otherwise": Kind(
        "F18",
        lambda rng: Restyle(style=rng.choice((Style.PRETTY, Style.TYPE_LAST, Style.ESCAPED))),
        2,
    ),
    "events after the end": Kind("F19", lambda _: ExtraEvents(after=[STRAY]), 2),
    "second end": Kind(
        "F19",
        lambda _: ExtraEvents(after=[{"type": "response.completed", "response": {"id": "resp_x"}}]),
        2,
    ),
    "vendor events": Kind(
        "F19", lambda _: ExtraEvents(before=[CODEX_RATE_LIMITS], after=[WEBSOCKET_TIMING]), 2
    ),
}
"""All kinds by name. What damages an answer without breaking it comes on WebSockets only: over HTTP
it is handed on as it is, proxy or not."""


@dataclass(slots=True)
class Chaos(Faults):
    """Faults at random: for a share of the turns, and for a share of the upgrades."""

    armed: list[Fault] = field(default_factory=lambda: [Fault()])  # never empty: one may come
    rng: random.Random = field(default_factory=random.Random)
    injected: Counter[str] = None  # type: ignore[assignment]  always given
    turns_share: float = 0.0
    upgrades_share: float = 0.0

    def take(self, seen: Seen, *, upgrade: bool = False) -> Fault | None:
        """Return a fault for this request or upgrade, or None."""
        share = self.upgrades_share if upgrade else self.turns_share
        if not (upgrade or seen.is_turn) or self.rng.random() >= share:
            return None
        kinds = _UPGRADES if upgrade else _TURNS[seen.transport]
        (name,) = self.rng.choices(list(kinds), [kind.weight for kind in kinds.values()])
        self.injected[name] += 1
        return replace(kinds[name].make(self.rng), transport=None)


def _is_upgrade(kind: Kind) -> bool:
    return kind.make(random.Random(0)).moment is Moment.UPGRADE


_UPGRADES = {name: kind for name, kind in KINDS.items() if _is_upgrade(kind)}
_TURNS = {
    transport: {
        name: kind
        for name, kind in KINDS.items()
        if not _is_upgrade(kind) and kind.transport in (None, transport)
    }
    for transport in Transport
}
