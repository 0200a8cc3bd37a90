"""
The picture: each turn's latency, and how the time adds up.

Colours are vermilion and blue of the Okabe-Ito palette, which colour-blind people can tell apart;
markers and line styles differ too, for prints without colour. The caption says that it shows a
simulation, because a picture travels without the text that it came with.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from proxy.demo.results import Way

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from proxy.demo.results import Comparison, Run

SUFFIXES = (".png", ".svg")
"""The formats, by the suffix of the file."""

_COLOURS = {Way.STRAIGHT: "#D55E00", Way.VIA: "#0072B2"}
_LINES = {Way.STRAIGHT: "o--", Way.VIA: "s-"}
_GREY = "#555555"


def write(comparison: Comparison, path: Path) -> None:
    """Write the demo's plot as the path's suffix says. Raises ImportError, OSError as `draw`."""
    runs = {Way.STRAIGHT: comparison.straight, Way.VIA: comparison.via}
    draw(runs, comparison.verdict(), _caption(comparison), path)


def draw(runs: Mapping[Way, Run], title: str, caption: str, path: Path) -> None:
    """Draw runs to a file of the path's suffix. Raises ImportError without matplotlib, OSError."""
    from matplotlib.figure import Figure  # noqa: PLC0415  matplotlib is optional

    # A figure of its own, without pyplot: no display is looked for, no state is left behind.
    figure = Figure(figsize=(11, 5), layout="constrained")
    latency, total = figure.subplots(1, 2)
    _draw_latency(latency, runs)
    _draw_total(total, runs)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    figure.supxlabel(caption, fontsize=8, color=_GREY)
    figure.savefig(path, dpi=150, format=path.suffix.lower().removeprefix("."))


def _draw_latency(axes: Axes, runs: Mapping[Way, Run]) -> None:
    for way, run in runs.items():
        seconds = [turn.duration_s for turn in run.turns]
        _draw_line(axes, way, range(1, len(seconds) + 1), seconds)
    axes.set_ylim(bottom=0)
    _furnish(axes, "Latency of each turn", "seconds")
    axes.legend(loc="lower left", frameon=False)


def _draw_total(axes: Axes, runs: Mapping[Way, Run]) -> None:
    for way, run in runs.items():
        seconds = [0.0, *(turn.ended_s for turn in run.turns)]
        _draw_line(axes, way, range(len(seconds)), seconds)
        axes.annotate(
            f"{seconds[-1]:.1f} s",
            (len(seconds) - 1, seconds[-1]),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=_COLOURS[way],
            fontweight="bold",
        )
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    _furnish(axes, "Time spent so far", "seconds")
    axes.legend(loc="upper left", frameon=False)


def _draw_line(axes: Axes, way: Way, turns: Sequence[int], seconds: Sequence[float]) -> None:
    axes.plot(turns, seconds, _LINES[way], color=_COLOURS[way], label=way.value, markersize=4)


def _furnish(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel("turn")
    axes.set_ylabel(unit)
    axes.locator_params(axis="x", integer=True)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _caption(comparison: Comparison) -> str:
    setting = comparison.setting
    text = (
        f"Simulation under the latency preset {setting.preset} ({setting.compression}); not a"
        f" measurement of the real service. {setting.constants()}."
    )
    return textwrap.fill(text, 150)
