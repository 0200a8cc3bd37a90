"""
What came of the trials: results.json, and REPORT.md for people.

`GOALS` says what each trial's figures have to be; REPORT.md shows both.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from campaign import catalogue
from campaign.ledger import DEFECTS
from campaign.menu import KINDS
from campaign.saboteur import ROWS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    Figures = Mapping[str, Any]

RESULTS = Path(__file__).with_name("results.json")
REPORT = Path(__file__).with_name("REPORT.md")


@dataclass(frozen=True)
class Goal:
    """One figure of a trial: its words, its value as shown, and whether it is as it has to be."""

    trial: str
    words: str
    value: Callable[[Figures], Any]
    is_met: Callable[[Any], bool]


def _defects(figures: Mapping[str, Any]) -> int:
    return sum(figures["defects"].values())


def _zero(value: Any) -> bool:
    return bool(value == 0)


def _injected(figures: Mapping[str, Any]) -> int:
    return sum(figures["injected"].values())


GOALS: tuple[Goal, ...] = (
    Goal("faults", "turns, 100,000 or more", lambda f: f["turns"], lambda v: v >= 100_000),
    Goal("faults", "faults injected, 20,000 or more", _injected, lambda v: v >= 20_000),
    *(
        Goal("faults", name.replace("_", "-"), lambda f, name=name: f["defects"][name], _zero)
        for name in DEFECTS
    ),
    Goal("soak", "seconds, 3600", lambda f: f["seconds"], lambda v: v >= 3600),
    Goal(
        "soak",
        "growth of memory after the warm-up, at most 1 MiB an hour",
        lambda f: f["slope_mib_per_h"],
        lambda v: v <= 1,
    ),
    Goal("soak", "defects", _defects, _zero),
    Goal(
        "soak",
        "tasks before and after, the same",
        lambda f: f["tasks_before_and_after"],
        lambda v: v[1] <= v[0],
    ),
    Goal(
        "soak",
        "descriptors before and after, no more",
        lambda f: f["fds_before_and_after"],
        lambda v: v[1] <= v[0],
    ),
    Goal(
        "soak",
        "turns cut by the age limit, besides the faults that say so",
        lambda f: max(f["cut_by_the_age_limit"] - f["injected"].get("connection limit", 0), 0),
        _zero,
    ),
    Goal("crowd", "conversations of 20 turns, 1,000", lambda f: f["turns"], lambda v: v >= 20_000),
    Goal("crowd", "errors", lambda f: f["errors"], _zero),
    Goal(
        "crowd",
        "/livez at worst, in ms, 500 or less",
        lambda f: f["livez_max_ms"],
        lambda v: v <= 500,
    ),
    Goal(
        "drain", "streams of 200 that had ended before SIGTERM", lambda f: f["not_running"], _zero
    ),
    Goal("drain", "streams cut of 200, five times over", lambda f: f["cut"], _zero),
    Goal(
        "drain",
        "not ready after so many ms, 100 or less",
        lambda f: f["not_ready_after_ms"],
        lambda v: v <= 100,
    ),
    Goal("drain", "exit status", lambda f: f["exit_status"], _zero),
    Goal(
        "cancels",
        "requests cancelled of 10,000, 9,900 or more",
        lambda f: f["cancelled"],
        lambda v: v >= 9_900,
    ),
    Goal("cancels", "turns of another's touched", lambda f: f["others_touched"], _zero),
    Goal(
        "flood",
        "p99 of the others with 2,000 slow heads, 20 % more than beside them, or less",
        lambda f: f["p99_change"],
        lambda v: v <= 0.2,
    ),
    Goal(
        "flood",
        "KiB of memory for each head, 64 or less",
        lambda f: f["kib_for_each"],
        lambda v: v <= 64,
    ),
    Goal(
        "readers",
        "p99 of the others with 100 readers at 1 kB/s, 20 % more or less",
        lambda f: f["p99_change"],
        lambda v: v <= 0.2,
    ),
    Goal(
        "readers",
        "KiB of memory for each reader, 2,048 or less",
        lambda f: f["kib_for_each"],
        lambda v: v <= 2048,
    ),
)


OPEN: dict[str, str] = {}
"""The figures that are not met, and why; a test holds this to what the results say."""


def load() -> dict[str, Any]:
    """Return the results of all trials that were run."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def save(results: Mapping[str, Any]) -> None:
    """Keep the results."""
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")


def write(results: Mapping[str, Any]) -> None:
    """Write REPORT.md."""
    REPORT.write_text(rendered(results), encoding="utf-8")


def missed(results: Mapping[str, Any], trials: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the goals that were missed, of these trials or of all, with their values."""
    reached = {
        goal.words: (goal, goal.value(results[goal.trial]))
        for goal in GOALS
        if goal.trial in results and (trials is None or goal.trial in trials)
    }
    return {words: value for words, (goal, value) in reached.items() if not goal.is_met(value)}


def rendered(results: Mapping[str, Any]) -> str:
    """Return the text of REPORT.md."""
    return "\n".join([*_head(), *_goals(results), *_faults(results), *_rows()]) + "\n"


def _head() -> Iterator[str]:
    yield "# What Turnwire was put through"
    yield ""
    yield "Written by `tests/campaign/run.py`; do not edit. Every trial runs the program in a"
    yield "process of its own, in front of an upstream that knows what each answer has to be."
    yield "`tests/campaign/__init__.py` says how it is done, `results.json` has all figures."
    yield ""


def _goals(results: Mapping[str, Any]) -> Iterator[str]:
    yield "## Figures"
    yield ""
    yield "| Trial | Figure | Value | Met |"
    yield "| --- | --- | --- | --- |"
    for goal in GOALS:
        if goal.trial not in results:
            yield f"| `{goal.trial}` | {goal.words} | not run yet | |"
            continue
        value = goal.value(results[goal.trial])
        shown = f"{value:,}" if isinstance(value, int) else value
        met = "yes" if goal.is_met(value) else "no"
        yield f"| `{goal.trial}` | {goal.words} | {shown} | {met} |"
    yield ""
    for words, why in OPEN.items():
        yield f"Not met, *{words}*: {why}."
        yield ""
    yield "Again: `python tests/campaign/run.py NAME`, with the name of a trial. These have run:"
    yield ""
    for name, figures in results.items():
        yield (
            f"* `{name}`: {figures['when']},"
            f" with the program at `git rev-parse HEAD:proxy` = {figures['proxy_tree']}."
        )
    yield ""


def _faults(results: Mapping[str, Any]) -> Iterator[str]:
    if "faults" not in results:
        return
    figures = results["faults"]
    yield "## Faults that were injected"
    yield ""
    yield (
        f"{_injected(figures):,} in {figures['turns']:,} turns, {figures['rounds']} rounds and"
        f" {figures['seconds'] // 60} minutes. How the {sum(figures['outcomes'].values()):,}"
        f" attempts of the clients ended: {_told(figures['outcomes'])}. How the answers went"
        f" upstream: {_told(figures['modes'])}. What else clients did: {_told(figures['moves'])}."
    )
    yield ""
    yield "| Fault | Row | Times |"
    yield "| --- | --- | ---: |"
    rows = {name: kind.row for name, kind in KINDS.items()}
    for name, times in sorted(figures["injected"].items(), key=lambda pair: -pair[1]):
        row = rows.get(name) or ROWS.get(name.rpartition(": ")[2], "C4")
        yield f"| {name} | {row} | {times:,} |"
    yield ""


def _told(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in counts.items())


def _rows() -> Iterator[str]:
    yield "## The catalogue of tests, row by row"
    yield ""
    yield "A row is proved by tests, by a trial of the above, or it says why it is not."
    yield ""
    yield "| Row | What | Proof |"
    yield "| --- | --- | --- |"
    for row in catalogue.ROWS:
        yield f"| {row.id} | {row.what} | {_proof(row)} |"


def _proof(row: catalogue.Row) -> str:
    parts = [f"`{proof.removeprefix('tests/')}`" for proof in row.proofs]
    if row.why:
        parts.append(row.why)
    return "<br>".join(parts)


def trials_named(rows: Iterable[catalogue.Row]) -> set[str]:
    """Return the trials that these rows are proved by."""
    proofs = (proof for row in rows for proof in row.proofs)
    return {proof.removeprefix("run.py ") for proof in proofs if proof.startswith("run.py ")}
