"""What is told of turns and connections: facts only, no content and no credential."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from proxy.core.reasons import Mode, Reason


_MODEL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,63}")


def model_name(model: str | None) -> str | None:
    """Return a model's name if it looks like one: it is the client's to write."""
    return model if model is not None and _MODEL_NAME.fullmatch(model) else None


@dataclass(frozen=True, slots=True)
class Would:
    """How a turn of shadow mode would have been sent; `verdict` is that of a delta."""

    mode: Mode
    reason: Reason
    bytes_up: int
    verdict: str | None = None


@dataclass(slots=True)
class TurnFacts:
    """
    One turn that is over: at `ended_at`, by the event loop's clock.

    All durations count from the request's last byte: to the end of the reply, to the first event
    written to the client, to the first byte upstream. The last two are None if it never came to it.

    `principal` and its `label` say for whom it was; the former stays in this process. `previous` is
    the response that the turn continued, or whose history its own comes nearest to; `response` is
    the one that answered it. `resends` are the reasons why it was sent again.
    """

    turn_id: str
    principal: str
    label: str
    mode: Mode
    reason: Reason
    status: int
    bytes_in: int
    bytes_up: int
    ended_at: float
    duration_s: float
    first_event_s: float | None = None
    overhead_s: float | None = None
    model: str | None = None
    resends: tuple[Reason, ...] = ()
    connection: int | None = None
    previous: str | None = None
    response: str | None = None
    would: Would | None = None


Watch: TypeAlias = Callable[[TurnFacts], None]
"""Whoever is told of each turn. It must be quick, and must not raise."""


@dataclass(frozen=True, slots=True)
class ConnectionFacts:
    """One connection to upstream, as it is now. Seconds; `left_s` is how long it takes turns."""

    id: int
    state: str
    label: str
    age_s: float
    left_s: float
    turns: int
