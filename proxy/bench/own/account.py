"""
What the runs will cost, and what came of them. Pure.

The estimate errs on the high side: four bytes a token is what English prose has, and every turn is
taken to say as much as it may. An upstream bills a continued conversation as if it had been sent in
full, so both ways cost the same.
"""

from __future__ import annotations

import statistics
import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from proxy.demo.results import Run, Way

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

BYTES_A_TOKEN: Final = 4
MAX_OUTPUT_TOKENS: Final = 2000
_SAID_TOKENS: Final = 60  # of a forced call without much thought
_OPENING_TOKENS: Final = 250
_WIDTH: Final = 98


@dataclass(frozen=True, slots=True)
class Task:
    """What each run does: so many tool calls with outputs of so many bytes, then an answer."""

    model: str
    calls: int
    output_bytes: int
    rounds: int

    @property
    def turns(self) -> int:
        """One for each call, and one for the final answer."""
        return self.calls + 1

    @property
    def input_tokens(self) -> int:
        """About how many input tokens all runs are billed for."""
        step = self.output_bytes // BYTES_A_TOKEN + _SAID_TOKENS
        one = sum(_OPENING_TOKENS + place * step for place in range(self.turns))
        return one * len(Way) * self.rounds

    @property
    def output_tokens(self) -> int:
        """About how many output tokens, without reasoning."""
        return self.turns * _SAID_TOKENS * len(Way) * self.rounds

    @property
    def most_output_tokens(self) -> int:
        """How many output tokens there can be at most."""
        return self.turns * MAX_OUTPUT_TOKENS * len(Way) * self.rounds

    def order(self) -> Iterator[tuple[int, Way]]:
        """Give the runs in order: number of the round, and way. Each way is first equally often."""
        for number in range(self.rounds):
            ways = list(Way) if number % 2 == 0 else list(reversed(Way))
            yield from ((number, way) for way in ways)

    def announcement(self, upstream: str) -> str:
        """Say what is about to be done, and what it costs."""
        runs = len(Way) * self.rounds
        return textwrap.fill(
            f"This runs an agent with {self.calls} tool calls {runs} times against {upstream}, half"
            f" of them through Turnwire, with your key and the model {self.model}. It will be"
            f" billed for about {self.input_tokens:,} input tokens (a part of them as cached) and"
            f" about {self.output_tokens:,} output tokens, more if the model reasons; never for"
            f" more than {self.most_output_tokens:,} output tokens.",
            _WIDTH,
        )


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens as the upstream counted them."""

    input: int = 0
    cached: int = 0
    output: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input + other.input, self.cached + other.cached, self.output + other.output
        )


@dataclass(frozen=True, slots=True)
class OwnRun:
    """One run, and the tokens that it took."""

    run: Run
    usage: Usage


@dataclass(slots=True)
class Outcome:
    """All runs of both ways."""

    task: Task
    runs: dict[Way, list[OwnRun]] = field(default_factory=lambda: {way: [] for way in Way})
    uploaded: dict[Way, int] = field(default_factory=dict)

    def add(self, way: Way, run: OwnRun) -> None:
        """Add a run."""
        self.runs[way].append(run)

    def note_upload(self, bytes_up: int) -> None:
        """Note what the proxy sent upstream; straight goes up what the agent sends."""
        straight = sum(each.run.uploaded_bytes for each in self.runs[Way.STRAIGHT])
        self.uploaded = {Way.STRAIGHT: straight, Way.VIA: bytes_up}

    def typical_runs(self) -> dict[Way, Run]:
        """Return of each way the run of median duration."""
        return {way: _median_run([each.run for each in runs]) for way, runs in self.runs.items()}

    def columns(self) -> tuple[str, str, str, str]:
        """The heads of the table's columns."""
        return "", Way.STRAIGHT.value, Way.VIA.value, "change"

    def rows(self) -> list[tuple[str, str, str, str]]:
        """The table: medians over the rounds, sums of bytes and tokens."""
        deltas = [run.run.deltas for run in self.runs[Way.VIA]]
        possible = len(deltas) * self.task.calls
        return [
            self._row("end to end", lambda run: run.duration_s, _seconds),
            self._row("turn, median", lambda run: run.turn_s(0.5), _seconds),
            self._row("first event, median", lambda run: run.first_event_s(0.5), _seconds),
            self._row("first event, p95", lambda run: run.first_event_s(0.95), _seconds),
            _written("uploaded", *self._uploaded(), _kilobytes),
            ("deltas", "-", f"{sum(deltas)} of {possible}", ""),
            self._tokens("input tokens", "input"),
            self._tokens("of them cached", "cached"),
            self._tokens("output tokens", "output"),
        ]

    def _uploaded(self) -> tuple[int, int]:
        return self.uploaded[Way.STRAIGHT], self.uploaded[Way.VIA]

    def _row(
        self, name: str, of: Callable[[Run], float], write: Callable[[float], str]
    ) -> tuple[str, str, str, str]:
        values = [statistics.median(of(each.run) for each in self.runs[way]) for way in Way]
        return _written(name, values[0], values[1], write)

    def _tokens(self, name: str, which: str) -> tuple[str, str, str, str]:
        sums = [sum(getattr(each.usage, which) for each in self.runs[way]) for way in Way]
        return name, f"{sums[0]:,}", f"{sums[1]:,}", ""

    def verdict(self) -> str:
        """The outcome in a sentence."""
        straight, via = (
            statistics.median(each.run.duration_s for each in self.runs[way]) for way in Way
        )
        word = "less" if via <= straight else "more"
        change = f"{abs(via / straight - 1):.0%} {word} time"
        return f"{change}: {straight:.1f} s straight, {via:.1f} s through Turnwire"

    @property
    def _rounds(self) -> str:
        return "one round" if self.task.rounds == 1 else f"medians of {self.task.rounds} rounds"

    def small_print(self) -> str:
        """What the figures are, and what they are not."""
        return textwrap.fill(
            f"{self._rounds.capitalize()}, model {self.task.model}. The first turn of each run"
            " opens its connection. Each run has its own opening, so that none profits from what"
            " another has put into the upstream's cache. The model's answers differ from run to"
            " run, and so does the load of the upstream: compare output tokens before times, and"
            " use --rounds before you conclude anything.",
            _WIDTH,
        )

    def caption(self) -> str:
        """What stands below the picture."""
        return (
            f"{self.task.model}, {self.task.calls} tool calls, {self.task.output_bytes} bytes each,"
            f" {self._rounds}"
        )

    def document(self) -> dict[str, object]:
        """All of it, ready for JSON."""
        return {
            "model": self.task.model,
            "calls": self.task.calls,
            "output_bytes": self.task.output_bytes,
            "uploaded_bytes": {way.name.lower(): size for way, size in self.uploaded.items()},
            "runs": {
                way.name.lower(): [
                    {
                        "duration_s": each.run.duration_s,
                        "turns_s": [turn.duration_s for turn in each.run.turns],
                        "first_events_s": [turn.first_event_s for turn in each.run.turns],
                        "modes": [turn.mode for turn in each.run.turns],
                        "input_tokens": each.usage.input,
                        "cached_tokens": each.usage.cached,
                        "output_tokens": each.usage.output,
                    }
                    for each in runs
                ]
                for way, runs in self.runs.items()
            },
        }


def _median_run(runs: Sequence[Run]) -> Run:
    return sorted(runs, key=lambda run: run.duration_s)[(len(runs) - 1) // 2]


def _written(
    name: str, one: float, other: float, write: Callable[[float], str]
) -> tuple[str, str, str, str]:
    change = f"{other / one - 1:+.0%}" if one else ""
    return name, write(one), write(other), change


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.0f} ms"


def _kilobytes(value: float) -> str:
    return f"{value / 1000:,.1f} KB"
