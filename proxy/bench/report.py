"""
What the benchmark says in the end: tables, the goals, and a JSON document with everything.

Pure, but for `machine`, which looks at the machine that it runs on.
"""

from __future__ import annotations

import importlib.metadata
import operator
import os
import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy import __version__
from proxy.bench import agents, footprint, relays, tls, turns
from proxy.bench.goals import GOALS
from proxy.bench.ways import Way

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from proxy.bench.goals import Gate
    from proxy.bench.samples import Samples, Spread

SCHEMA = 1
_PACKAGES = ("aiohttp", "websockets", "uvloop", "msgspec", "xxhash", "pydantic")
_NOTHING = "-"
_STRAIGHT = Way.STRAIGHT.value


@dataclass(frozen=True, slots=True)
class Table:
    """A table: a title, the heads of its columns, and rows of text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


# --- tables --------------------------------------------------------------------------------------


def tables(samples: Samples) -> list[Table]:
    """Return a table of each value that was measured."""
    grids = [
        _grid(samples, turns.PART, "turn_us", "whole turn, us"),
        _added(samples, turns.PART, "turn_us", "added to a whole turn, us"),
        _grid(samples, turns.PART, "cpu_us", "CPU per turn, us"),
        _grid(samples, turns.PART, "upstream_bytes", "bytes sent upstream per turn, KB", 1e-3),
        _grid(samples, turns.CHAT_PART, "turn_us", "whole turn in either API, us"),
        _grid(samples, turns.CHAT_PART, "cpu_us", "CPU per turn in either API, us"),
        _grid(samples, relays.BURST, "rate", "relay in bursts, thousand events/s", 1e-3),
        _grid(samples, relays.BURST, "cpu_us", "the same, CPU per event, us", decimals=2),
        _grid(samples, relays.PACED, "p50_us", "latency of an event at a pace, p50, us"),
        _added(samples, relays.PACED, "p50_us", "added to it, p50, us"),
        _grid(samples, relays.PACED, "p99_us", "latency of an event at a pace, p99, us"),
        _added(samples, relays.PACED, "p99_us", "added to it, p99, us"),
        _grid(samples, relays.PACED, "cpu_us", "at a pace, CPU per event, us", decimals=1),
        _grid(samples, relays.PACED, "kept_share", "at a pace, share of the rate kept, %", 100),
        _grid(samples, tls.TURN, "turn_us", "with and without TLS: whole turn, us"),
        _grid(samples, tls.TURN, "cpu_us", "with and without TLS: CPU per turn, us"),
        _grid(samples, tls.BURST, "cpu_us", "the same, CPU per event in bursts, us", decimals=2),
        _grid(samples, tls.PACED, "cpu_us", "the same, CPU per event at a pace, us", decimals=1),
        _grid(samples, tls.PACED, "p50_us", "the same, latency of an event, p50, us"),
        _added(samples, tls.PACED, "p50_us", "the same, added to it, p50, us"),
        _added(samples, tls.PACED, "p99_us", "the same, added to it, p99, us"),
        _grid(samples, footprint.START, "ready_s", "ready after, s", decimals=2),
        _grid(samples, footprint.START, "resident_bytes", "resident memory, idle, MB", 1e-6),
        _grid(samples, footprint.MEMORY, "idle_bytes", "memory per idle conversation, KB", 1e-3),
        _grid(samples, footprint.MEMORY, "active_bytes", "memory per active one, KB", 1e-3),
        _grid(samples, footprint.STATE, "bytes_per_turn", "state kept per stored turn, bytes"),
        _grid(samples, footprint.LOOKUP, "find_us", "finding 1 of 10,000 conversations, us"),
        _grid(samples, footprint.LOOKUP, "receive_cpu_us", "receiving the body, CPU us"),
        _grid(samples, agents.RUN, "duration_s", "agent, 24 tool calls, s", decimals=2),
        _grid(samples, agents.WARM, "round_trips", "first event of a warm turn, RTTs", decimals=2),
    ]
    return [grid for grid in grids if grid is not None]


def _grid(
    samples: Samples, part: str, value: str, title: str, scale: float = 1.0, decimals: int = 0
) -> Table | None:
    """Ways down, cells across; the median of each."""
    cells = samples.cells(part)
    rows = []
    for way in samples.ways(part):
        medians = [samples.median(part, way, cell, value) for cell in cells]
        if any(median is not None for median in medians):
            rows.append((way, *(_number(median, scale, decimals) for median in medians)))
    return Table(title, (title, *cells), tuple(rows)) if rows else None


def _added(samples: Samples, part: str, value: str, title: str) -> Table | None:
    """What a proxy adds to a latency, over the way without one."""
    cells = samples.cells(part)
    rows = []
    for way in samples.ways(part):
        spreads = [
            samples.combined(operator.sub, (part, way, cell, value), (part, _STRAIGHT, cell, value))
            for cell in cells
        ]
        if way != _STRAIGHT and any(spreads):
            rows.append((way, *(_number(each.median if each else None) for each in spreads)))
    return Table(title, (title, *cells), tuple(rows)) if rows else None


def _number(value: float | None, scale: float = 1.0, decimals: int = 0) -> str:
    return _NOTHING if value is None else f"{value * scale:,.{decimals}f}"


def goals_table(samples: Samples) -> Table:
    """Return what each goal asks for and what was measured, with the extremes of the rounds."""
    rows = []
    for goal in GOALS:
        sign = ">=" if goal.at_least else "<="
        measured = goal.measure(samples)
        rows.append(
            (
                goal.figure,
                f"{sign} {goal.unit.written(goal.reach)}",
                f"{sign} {goal.unit.written(goal.hope)}",
                _written(measured, goal.unit.written),
                _range(measured, goal.unit.written),
                goal.verdict(measured).value,
            )
        )
    columns = ("goal", "reach", "hope for", "measured", "rounds", "verdict")
    return Table("goals", columns, tuple(rows))


def gates_table(gates: Sequence[Gate], samples: Samples) -> Table:
    """Return what the gates ask for and what was measured."""
    rows = []
    for gate in gates:
        measured = gate.measure(samples)
        sign = ">=" if gate.at_least else "<="
        rows.append(
            (
                gate.figure,
                f"{sign} {gate.unit.written(gate.limit)}",
                _written(measured, gate.unit.written),
                _range(measured, gate.unit.written),
                "holds" if gate.holds(measured) else "BROKEN",
            )
        )
    return Table("gates", ("gate", "limit", "measured", "rounds", "verdict"), tuple(rows))


def _written(spread: Spread | None, write: Callable[[float], str]) -> str:
    return _NOTHING if spread is None else write(spread.median)


def _range(spread: Spread | None, write: Callable[[float], str]) -> str:
    return _NOTHING if spread is None else f"{write(spread.low)} - {write(spread.high)}"


# --- the whole of it -----------------------------------------------------------------------------


def document(
    samples: Samples, machine_: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return everything as plain values: machine, options, goals and all samples."""
    goals = []
    for goal in GOALS:
        measured = goal.measure(samples)
        goals.append(
            {
                "figure": goal.figure,
                "reach": goal.reach,
                "hope": goal.hope,
                "at_least": goal.at_least,
                "measured": None if measured is None else asdict(measured),
                "verdict": goal.verdict(measured).value,
            }
        )
    return {
        "schema": SCHEMA,
        "turnwire": __version__,
        "machine": dict(machine_),
        "options": dict(options),
        "goals": goals,
        "samples": samples.as_json(),
    }


def machine() -> dict[str, Any]:
    """Describe this machine and the versions of what is measured."""
    versions = {name: _package_version(name) for name in _PACKAGES}
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": versions | {"nginx": _nginx_version()},
    }


def machine_line(described: Mapping[str, Any]) -> str:
    """Say the same in two lines."""
    packages = ", ".join(
        f"{name} {version or 'none'}" for name, version in described["packages"].items()
    )
    return (
        f"{described['cpu']}, {described['cores']} cores (load {described['load_average']}), "
        f"{described['system']}, {described['python']}\n{packages}"
    )


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown CPU"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "unknown CPU")


def _nginx_version() -> str | None:
    program = shutil.which("nginx")
    if program is None:
        return None
    told = subprocess.run(  # noqa: S603  asks nginx for its version
        [program, "-v"], capture_output=True, text=True, check=False, timeout=10
    )
    return told.stderr.strip().rpartition("/")[2] or None
