"""
The picture of a benchmark: turns against history, bursts, paced events, and the agent's runs.

Colours are those of the Okabe-Ito palette, which colour-blind people can tell apart; markers
differ too, for prints without colour. What was not measured is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.bench import agents, relays, turns
from proxy.bench.ways import Way

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from proxy.bench.samples import Samples

SUFFIXES = (".png", ".svg")
"""The formats, by the suffix of the file."""

_STYLES = {
    Way.STRAIGHT: ("#000000", "."),
    Way.TURNWIRE: ("#0072B2", "s"),
    Way.PLAIN: ("#D55E00", "o"),
    Way.NAIVE: ("#CC79A7", "^"),
    Way.NGINX: ("#009E73", "D"),
}
_PANELS = (
    (turns.PART, "turn_us", "Whole turn, by length of history", "microseconds"),
    (relays.BURST, "cpu_us", "Relay in bursts, CPU per event", "microseconds"),
    (relays.PACED, "p50_us", "Latency of an event at a pace, p50", "microseconds"),
    (agents.RUN, "duration_s", "An agent's run of 24 tool calls, by link", "seconds"),
)


def write(samples: Samples, caption: str, path: Path) -> None:
    """Write the plot as the path's suffix says. Raises ImportError without matplotlib, OSError."""
    from matplotlib.figure import Figure  # noqa: PLC0415  matplotlib is optional

    panels = [panel for panel in _PANELS if samples.cells(panel[0])]
    figure = Figure(figsize=(11, 4.2 * max(1, (len(panels) + 1) // 2)), layout="constrained")
    places = figure.subplots((len(panels) + 1) // 2, 2, squeeze=False).flat if panels else ()
    for axes, (part, value, title, unit) in zip(places, panels, strict=False):
        _draw(axes, samples, part, value)
        axes.set_title(title, fontsize=11)
        axes.set_ylabel(unit)
    figure.supxlabel(caption, fontsize=7, color="#555555")
    figure.savefig(path, dpi=150, format=path.suffix.lower().removeprefix("."))


def _draw(axes: Axes, samples: Samples, part: str, value: str) -> None:
    cells = samples.cells(part)
    for way, (colour, marker) in _STYLES.items():
        medians = [samples.median(part, way, cell, value) for cell in cells]
        if any(median is not None for median in medians):
            heights = [float("nan") if median is None else median for median in medians]
            axes.plot(range(len(cells)), heights, marker, ls="-", color=colour, label=way.value)
    _furnish(axes, cells)


def _furnish(axes: Axes, cells: Sequence[str]) -> None:
    axes.set_yscale("log")
    axes.set_xticks(range(len(cells)), cells, fontsize=7, rotation=20, ha="right")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
