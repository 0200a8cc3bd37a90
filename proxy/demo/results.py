"""
What a run yields, and what two of them say side by side. Pure.

Times are seconds as the agent saw them; bytes are request bodies and messages as the simulator
received them. Answers are equal if every turn ended in the same status with the same items, ids
aside; the simulator's answers depend on the whole context, so equal answers mean that the same
context reached the model at every turn.
"""

from __future__ import annotations

import enum
import statistics
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.simulator.latency import LatencyModel

_DELTA = "delta"


class Way(enum.StrEnum):
    """How the agent reaches the API. The value is its name for people."""

    STRAIGHT = "straight HTTP"
    VIA = "through Turnwire"


@dataclass(frozen=True, slots=True)
class Setting:
    """What both runs have in common."""

    preset: str
    latency: LatencyModel
    calls: int
    output_bytes: int

    @property
    def turns(self) -> int:
        """One for each call, and one for the final answer."""
        return self.calls + 1

    @property
    def compression(self) -> str:
        """How the simulated time relates to the clock on the wall."""
        scale = self.latency.scale
        if scale == 1:
            return "real time, not compressed"
        return f"all delays multiplied by {scale:g}: not real time"

    def heading(self) -> str:
        """What is about to be run."""
        return (
            f"An agent with {self.calls} tool calls, one at a time: first straight to a simulated"
            " API, then through\nTurnwire. A simulation, not a measurement of the real service."
            f"\nLatency preset: {self.preset} ({self.compression})."
        )

    def constants(self) -> str:
        """The latency model in a sentence."""
        model = self.latency
        rate = f"{model.tokens_per_second:g} tokens/s" if model.tokens_per_second else "at once"
        uplink = f"{model.uplink_mbit:g} Mbit/s" if model.uplink_mbit else "unlimited"
        return (
            f"{model.per_request_ms:g} ms for each request, {model.stateless_ms:g} ms more for one"
            f" that does not continue on a warm connection, {model.per_new_kb_ms:g} ms for each KB"
            f" of input not read before, {model.first_token_ms:g} ms to the first token, then"
            f" {rate}; uplink {uplink}"
        )

    def small_print(self) -> str:
        """What the figures are, and what they are not."""
        text = (
            "This is a simulation, not a measurement of OpenAI's service. The API is Turnwire's"
            f" simulator on this machine under the latency preset {self.preset}:"
            f" {self.constants()}. Time: {self.compression}. No network delay is added, and tools"
            " take no time. Each run has a fresh simulator and an HTTP connection that is warm and"
            " kept alive; the proxy opens its WebSocket within the measured time. Tool outputs are"
            f" {self.output_bytes} bytes; the last turn is the final answer, which is longer. Where"
            " the constants come from:"
        )
        source = textwrap.indent(self.latency.source, "  ")
        return f"{textwrap.fill(text, 98)}\n\n{source}"


@dataclass(frozen=True, slots=True)
class TurnResult:
    """
    One turn. Times are seconds from sending: to the first event, and to the end of the reply.
    `ended_s` counts from the start of the run.

    `mode` is the `turnwire-mode` header, None without the proxy. `answer` compares equal between
    runs if the answers are the same.
    """

    first_event_s: float
    duration_s: float
    ended_s: float
    mode: str | None
    answer: object


@dataclass(frozen=True, slots=True)
class Run:
    """One conversation: its turns, its time from end to end, and what upstream received."""

    turns: Sequence[TurnResult]
    duration_s: float
    uploaded_bytes: int

    @property
    def deltas(self) -> int:
        """How many turns were sent as a delta."""
        return sum(turn.mode == _DELTA for turn in self.turns)

    def turn_s(self, fraction: float) -> float:
        """A quantile of the turns' durations."""
        return quantile([turn.duration_s for turn in self.turns], fraction)

    def first_event_s(self, fraction: float) -> float:
        """A quantile of the turns' times to the first event."""
        return quantile([turn.first_event_s for turn in self.turns], fraction)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs under one setting."""

    setting: Setting
    straight: Run
    via: Run

    @property
    def is_identical(self) -> bool:
        """Whether the answers are the same, turn by turn."""
        return self.first_difference is None

    @property
    def first_difference(self) -> int | None:
        """The number, from 1, of the first turn whose answers differ."""
        pairs = zip(self.straight.turns, self.via.turns, strict=False)
        for number, (one, other) in enumerate(pairs, 1):
            if one.answer != other.answer:
                return number
        lengths = len(self.straight.turns), len(self.via.turns)
        return None if lengths[0] == lengths[1] else min(lengths) + 1

    @property
    def change(self) -> float:
        """How much longer, from end to end, the run through the proxy took: -0.4 is 40 % less."""
        return self.via.duration_s / self.straight.duration_s - 1

    def columns(self) -> tuple[str, str, str, str]:
        """The heads of the table's columns."""
        return "", Way.STRAIGHT.value, Way.VIA.value, "change"

    def rows(self) -> list[tuple[str, str, str, str]]:
        """The table."""
        one, other = self.straight, self.via
        deltas = f"{other.deltas / len(other.turns):.0%} ({other.deltas} of {len(other.turns)})"
        return [
            _row("end to end", one.duration_s, other.duration_s, "s"),
            _row("turn, median", one.turn_s(0.5), other.turn_s(0.5), "ms"),
            _row("turn, p95", one.turn_s(0.95), other.turn_s(0.95), "ms"),
            _row("first event, median", one.first_event_s(0.5), other.first_event_s(0.5), "ms"),
            _row("first event, p95", one.first_event_s(0.95), other.first_event_s(0.95), "ms"),
            _row("uploaded", one.uploaded_bytes, other.uploaded_bytes, "KB"),
            ("turns sent as a delta", "-", deltas, ""),
            ("answers identical", "", "yes" if self.is_identical else "no", ""),
        ]

    def verdict(self) -> str:
        """The outcome in a sentence."""
        if not self.is_identical:
            return f"The answers differ, first in turn {self.first_difference}."
        word = "less" if self.change <= 0 else "more"
        return (
            f"The same answers in {abs(self.change):.0%} {word} time:"
            f" {self.straight.duration_s:.2f} s straight, {self.via.duration_s:.2f} s through"
            " Turnwire."
        )


def quantile(values: Sequence[float], fraction: float) -> float:
    """The value below which so much of the values lies, between neighbours by interpolation."""
    if len(values) == 1:
        return values[0]
    percent = round(fraction * 100)
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def _row(name: str, one: float, other: float, unit: str) -> tuple[str, str, str, str]:
    change = f"{other / one - 1:+.0%}" if one else ""
    return name, _written(one, unit), _written(other, unit), change


def _written(value: float, unit: str) -> str:
    """A time in seconds, or a number of bytes, in the unit."""
    match unit:
        case "ms":
            return f"{value * 1000:.0f} ms"
        case "KB":
            return f"{value / 1000:,.1f} KB"
        case _:
            return f"{value:.2f} {unit}"
