"""
The whole benchmark: which measurements make a round, the rounds, and what is shown in the end.
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy.bench import agents, footprint, plot, relays, report, tls, turns
from proxy.bench.children import BenchFailed, may_run_realtime, unwinding
from proxy.bench.goals import GATES
from proxy.bench.load import Bench, find_programs, make_certificates
from proxy.bench.samples import Samples
from proxy.bench.ways import Way, available
from proxy.demo.screen import open_screen
from proxy.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from proxy.bench.links import Shape
    from proxy.demo.screen import Screen

DEFAULT_ROUNDS = 5
MAX_ROUNDS = 100
OK, FAILED = 0, 1

_GATE_WAYS = (Way.TURNWIRE, Way.PLAIN, Way.NAIVE)
# These take long and hardly vary: the first rounds are enough.
_LONG_ROUNDS = 3
_STATE_SIZES = (("10 KB", 10_000), ("1 MB", 1_000_000))


@dataclass(frozen=True, slots=True)
class Step:
    """One measurement of a round."""

    name: str
    run: Callable[[int], None]


def main(arguments: argparse.Namespace) -> int:
    """
    Run the benchmark; return the exit status: 1 if it failed, or a gate did not hold.

    `arguments` has `part` (turn, relay, chat, tls, agent or all), `rounds` (None for the default),
    `quick`, `gate`, `realtime`, `python_load`, and `json` and `plot` (paths or None).

    Raises ConfigError.
    """
    if arguments.rounds is None:
        arguments.rounds = 1 if arguments.quick else DEFAULT_ROUNDS
    if arguments.realtime is None:
        arguments.realtime = may_run_realtime()
    _check(arguments)
    folder = Path(tempfile.mkdtemp(prefix="turnwire-bench-"))
    screen = open_screen(sys.stdout)
    samples = Samples()
    try:
        programs = find_programs(use_c=not arguments.python_load)
        bench = Bench(programs, folder, realtime=arguments.realtime)
        machine = report.machine()
        screen.say(f"{report.machine_line(machine)}\nload programs: {programs.description}")
        if arguments.realtime:
            screen.say("priority: real-time, the proxy alone on its core")
        secured = _secured(bench, screen, arguments)
        began = time.monotonic()
        with unwinding():
            _measure(bench, secured, samples, arguments)
        spent_s = time.monotonic() - began
    except BenchFailed as failure:
        sys.stderr.write(f"turnwire: the benchmark failed: {failure}\n")
        return FAILED
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    options = {
        "part": "gate" if arguments.gate else arguments.part,
        "rounds": arguments.rounds,
        "quick": arguments.quick,
        "realtime": arguments.realtime,
        "load": programs.description,
        "duration_s": round(spent_s, 1),
    }
    document = report.document(samples, machine, options)
    _show(samples, screen, arguments, document)
    return _gate(samples, screen) if arguments.gate else OK


def _check(arguments: argparse.Namespace) -> None:
    """Find out what can't work before minutes have passed. Raises ConfigError."""
    if arguments.rounds > MAX_ROUNDS:
        raise ConfigError(f"--rounds {arguments.rounds} is too many; {MAX_ROUNDS} at most")
    if arguments.plot and arguments.plot.suffix.lower() not in plot.SUFFIXES:
        raise ConfigError(f"--plot {arguments.plot} must end in {' or '.join(plot.SUFFIXES)}")
    for path in (arguments.json, arguments.plot):
        if path and not path.absolute().parent.is_dir():
            raise ConfigError(f"{path} can't be written: there is no folder {path.parent}")


def _secured(bench: Bench, screen: Screen, arguments: argparse.Namespace) -> Bench | None:
    """Return what measures with TLS, None where that is not wanted; say what loads it."""
    if arguments.gate or arguments.part not in ("tls", "all"):
        return None
    programs = find_programs(use_c=not arguments.python_load, tls=True)
    try:
        certificates = make_certificates(bench.folder)
    except ImportError:
        lack = "trustme is missing; pip install 'turnwire[bench]' brings it"
        if arguments.part == "tls":
            raise BenchFailed(lack) from None
        screen.say(f"No TLS: {lack}.")
        return None
    screen.say(f"load programs with TLS: {programs.description}")
    return replace(bench, programs=programs, certificates=certificates)


def _measure(
    bench: Bench, secured: Bench | None, samples: Samples, arguments: argparse.Namespace
) -> None:
    for round_ in range(arguments.rounds):
        for step in _steps(bench, secured, samples, arguments, round_):
            sys.stderr.write(f"round {round_ + 1} of {arguments.rounds}: {step.name}\n")
            step.run(round_)


def _steps(
    bench: Bench,
    secured: Bench | None,
    samples: Samples,
    arguments: argparse.Namespace,
    round_: int,
) -> Iterator[Step]:
    if arguments.gate:
        yield from _gate_steps(bench, samples, round_)
        return
    part, quick = arguments.part, arguments.quick
    if part in ("turn", "all"):
        yield from _turn_steps(bench, samples, round_, quick=quick)
    if part in ("relay", "all"):
        yield from _relay_steps(bench, samples, round_, quick=quick)
    if part in ("chat", "all"):
        sizes = turns.QUICK_SIZES if quick else turns.CHAT_SIZES
        yield Step(
            "turns, either API", lambda round_: turns.measure_chat(bench, round_, samples, sizes)
        )
    if secured is not None:
        yield from _tls_steps(secured, samples, round_, quick=quick)
    if round_ >= _LONG_ROUNDS:
        return
    if part == "all":
        yield from _footprint_steps(bench, samples, quick=quick)
    if part in ("agent", "all"):
        yield from _agent_steps(bench, samples, quick=quick)


def _turn_steps(bench: Bench, samples: Samples, round_: int, *, quick: bool) -> Iterator[Step]:
    sizes = turns.QUICK_SIZES if quick else turns.SIZES
    for way in _rotated(available(), round_):
        run = functools.partial(_turn, bench, samples, way, sizes)
        yield Step(f"turns, {way}", run)


def _turn(
    bench: Bench, samples: Samples, way: Way, sizes: tuple[turns.Size, ...], round_: int
) -> None:
    turns.measure(bench, way, round_, samples, sizes)


def _relay_steps(bench: Bench, samples: Samples, round_: int, *, quick: bool) -> Iterator[Step]:
    bursts = relays.QUICK_BURSTS if quick else relays.BURSTS
    paces = relays.QUICK_PACES if quick else relays.PACES
    for way in _rotated(available(), round_):
        run = functools.partial(_relay, bench, samples, way, bursts, paces)
        yield Step(f"relay, {way}", run)


def _relay(
    bench: Bench,
    samples: Samples,
    way: Way,
    bursts: tuple[relays.Burst, ...],
    paces: tuple[relays.Pace, ...],
    round_: int,
) -> None:
    relays.measure(bench, way, round_, samples, bursts, paces)


def _tls_steps(bench: Bench, samples: Samples, round_: int, *, quick: bool) -> Iterator[Step]:
    for way in _rotated(available(tls=True), round_):
        run = functools.partial(_tls, bench, samples, way, tls.QUICK if quick else tls.FULL)
        yield Step(f"relay and turns, {way}", run)


def _tls(bench: Bench, samples: Samples, way: Way, extent: tls.Extent, round_: int) -> None:
    tls.measure(bench, way, round_, samples, extent)


def _footprint_steps(bench: Bench, samples: Samples, *, quick: bool) -> Iterator[Step]:
    conversations, stored = (20, 5) if quick else (300, 60)
    history_bytes = 100_000 if quick else 1_000_000
    yield Step("start", lambda round_: footprint.measure_start(bench, round_, samples))
    yield Step(
        "memory", lambda round_: footprint.measure_memory(bench, round_, samples, conversations)
    )
    yield Step(
        "state", lambda round_: footprint.measure_state(round_, samples, _STATE_SIZES, stored)
    )
    yield Step(
        "lookup", lambda round_: footprint.measure_lookup(bench, round_, samples, history_bytes)
    )


def _agent_steps(bench: Bench, samples: Samples, *, quick: bool) -> Iterator[Step]:
    calls = 2 if quick else agents.CALLS
    for shape in agents.QUICK_SHAPES if quick else agents.SHAPES:
        yield Step(f"agent, {shape.name}", functools.partial(_agent, bench, samples, shape, calls))


def _agent(bench: Bench, samples: Samples, shape: Shape, calls: int, round_: int) -> None:
    agents.measure_run(bench, shape, round_, samples, calls)
    agents.measure_warm_turn(bench, shape, round_, samples)


def _gate_steps(bench: Bench, samples: Samples, round_: int) -> Iterator[Step]:
    for way in _rotated(_GATE_WAYS, round_):
        if way is not Way.NAIVE:
            run = functools.partial(_turn, bench, samples, way, turns.GATE_SIZES)
            yield Step(f"turns, {way}", run)
        if way is not Way.PLAIN:
            run = functools.partial(_relay, bench, samples, way, relays.GATE_BURSTS, ())
            yield Step(f"relay, {way}", run)
    if round_ == 0:
        yield Step(
            "state", lambda round_: footprint.measure_state(round_, samples, _STATE_SIZES[:1], 50)
        )
    if round_ < _LONG_ROUNDS:
        yield Step(
            "lookup", lambda round_: footprint.measure_lookup(bench, round_, samples, 1_000_000)
        )


def _rotated(ways: Sequence[Way], by: int) -> Sequence[Way]:
    """Begin with another way in every round, so that none always comes first."""
    by %= len(ways)
    return (*ways[by:], *ways[:by])


# --- the end -------------------------------------------------------------------------------------


def _show(
    samples: Samples, screen: Screen, arguments: argparse.Namespace, document: dict[str, Any]
) -> None:
    for table in report.tables(samples):
        screen.table(table.columns, table.rows)
    if arguments.part == "all" and not arguments.gate:
        goals = report.goals_table(samples)
        screen.table(goals.columns, goals.rows)
    if arguments.json:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
        screen.say(f"JSON: {arguments.json}")
    if arguments.plot:
        screen.say(_draw(samples, report.machine_line(document["machine"]), arguments.plot))


def _draw(samples: Samples, caption: str, path: Path) -> str:
    try:
        plot.write(samples, caption, path)
    except ImportError:
        return "No plot: matplotlib is missing; pip install 'turnwire[bench]' brings it."
    return f"Plot: {path}"


def _gate(samples: Samples, screen: Screen) -> int:
    table = report.gates_table(GATES, samples)
    screen.table(table.columns, table.rows)
    holds = all(gate.holds(gate.measure(samples)) for gate in GATES)
    return OK if holds else FAILED
