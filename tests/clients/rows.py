"""What a client is, and what a row of the catalogue says about it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.simulator import AnswerOptions, Calls

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.core.reasons import Reason
    from proxy.simulator.faults import Fault


class Ecosystem(enum.StrEnum):
    """Where a client comes from."""

    NPM = "npm"
    PIP = "pip"


class Same(enum.Enum):
    """What of a client's final output must be the same, straight and through Turnwire."""

    ALL = enum.auto()
    """Every character: the client sends the same in every run, so its answers are the same."""
    COUNTS = enum.auto()
    """
    The markers with their counts of prompts and tool outputs.

    The client sends clocks, random names or directories, on which its answers depend.
    """
    ENDING = enum.auto()
    """That there is a marker: what runs at one time comes in another order each time."""


@dataclass(frozen=True, slots=True)
class Client:
    """
    An unmodified client in one version.

    `name` is its directory in the cache, `packages` are pinned specifiers of its registry, the
    first of them the client itself. `python` is the oldest Python that it runs on.
    """

    name: str
    title: str
    packages: tuple[str, ...]
    ecosystem: Ecosystem
    python: tuple[int, int] = (3, 11)

    @property
    def version(self) -> str:
        """The version of the client itself."""
        first = self.packages[0]
        return first.rpartition("==")[2] if "==" in first else first.rpartition("@")[2]


@dataclass(frozen=True, slots=True)
class Row:
    """
    One way to use a client.

    `driver` is a file under `drivers/`, `environment` what it reads besides the base URL.
    `excuses` explain, reason by reason, the turns that go on with a conversation and yet can't be
    deltas, since the client's own history makes that impossible: any other is a failure.
    `prompts` is how many final outputs the driver must tell. `faults` are armed at the simulator,
    in both runs alike.
    """

    name: str
    client: Client
    variant: str
    driver: str
    environment: Mapping[str, str] = field(default_factory=dict)
    excuses: Mapping[Reason, str] = field(default_factory=dict)
    excused_at_most: int = 1_000
    """How many turns may be excused."""
    difference: str = ""
    """What the client does otherwise through Turnwire, where that is known and not yet mended."""
    gives_up: bool = False
    """Whether the client ends with an error, as it does straight."""
    prompts: int = 2
    gaps: Mapping[str, str] = field(default_factory=dict)
    """Fields of its echo that the client changes in earnest, with what it does to them."""
    same: Same = Same.COUNTS
    calls: Calls = Calls.HARMLESS
    faults: tuple[Fault, ...] = ()
    statuses: frozenset[int] = frozenset({200})
    """Statuses that a turn may have."""
    openings: int = 1
    """How many conversations begin, at least: sub-agents have their own."""

    @property
    def answers(self) -> AnswerOptions:
        """How the simulator answers: a call, then two beside a comment, then the final message."""
        return AnswerOptions(
            rounds=2,
            parallel_every=2,
            commentary_every=2,
            odd_arguments=True,
            calls=self.calls,
            marker=MARKER,
        )


@dataclass(frozen=True, slots=True)
class NotRun:
    """A client that does not run here, and why."""

    title: str
    why: str


MARKER = "FINAL-OK"
"""What the final message of an agent begins with."""
