"""
What was measured, and the statistics of it. Pure.

A sample is one way's values for one cell of a table in one round. All ways are measured in every
round, one after the other, so the ratio of two ways is taken within each round and only then
reduced to its median: a machine that is slow for a while is slow for both.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Sample:
    """The `values` of one `way` in one `cell` of one `part`, as measured in round `round`."""

    part: str
    way: str
    cell: str
    round: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Spread:
    """A median over rounds, with the lowest and the highest of them."""

    median: float
    low: float
    high: float


class Samples:
    """All samples of a run, in the order in which they came."""

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        self._samples = list(samples)

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, part: str, way: str, cell: str, round_: int, **values: float | None) -> None:
        """Add a sample. A value that is None could not be measured, and is left out."""
        known = {name: value for name, value in values.items() if value is not None}
        self._samples.append(Sample(part, way, cell, round_, known))

    def cells(self, part: str) -> list[str]:
        """The cells of a part, in the order in which they were measured."""
        return list(dict.fromkeys(s.cell for s in self._samples if s.part == part))

    def ways(self, part: str) -> list[str]:
        """The ways that were measured in a part, in order."""
        return list(dict.fromkeys(s.way for s in self._samples if s.part == part))

    def by_round(self, part: str, way: str, cell: str, name: str) -> dict[int, float]:
        """Return one value's measurements, by round."""
        return {
            s.round: s.values[name]
            for s in self._samples
            if (s.part, s.way, s.cell) == (part, way, cell) and name in s.values
        }

    def spread(self, part: str, way: str, cell: str, name: str) -> Spread | None:
        """Return the median of a value, None if it was not measured."""
        return spread(self.by_round(part, way, cell, name).values())

    def median(self, part: str, way: str, cell: str, name: str) -> float | None:
        """Return the median of a value, None if it was not measured."""
        found = self.spread(part, way, cell, name)
        return found.median if found else None

    def combined(
        self,
        operation: Callable[..., float],
        *series: tuple[str, str, str, str],
    ) -> Spread | None:
        """
        Combine several series, each (part, way, cell, name), round by round.

        Rounds that one of them lacks, or where the operation divides by zero, do not count.
        """
        rounds = [self.by_round(*each) for each in series]
        common = sorted(set(rounds[0]).intersection(*rounds[1:]))
        results = []
        for number in common:
            try:
                results.append(operation(*(values[number] for values in rounds)))
            except ZeroDivisionError:
                continue
        return spread(results)

    def as_json(self) -> list[dict[str, Any]]:
        """Return the samples as plain values."""
        return [asdict(sample) for sample in self._samples]


def spread(values: Iterable[float]) -> Spread | None:
    """Return median and extremes of some values, None if there are none."""
    known = list(values)
    if not known:
        return None
    return Spread(statistics.median(known), min(known), max(known))


def worst(spreads: Sequence[Spread | None]) -> Spread | None:
    """Return the spread with the highest median among those that are known."""
    known = [each for each in spreads if each is not None]
    return max(known, key=lambda each: each.median, default=None)
