"""
The one command of all long trials.

    python tests/campaign/run.py faults               100,000 turns, 20,000 faults and more
    python tests/campaign/run.py soak                 an hour: memory, descriptors, tasks
    python tests/campaign/run.py crowd                1,000 conversations of 20 turns at once
    python tests/campaign/run.py drain                SIGTERM while 200 streams run, five times
    python tests/campaign/run.py cancels              a pool of one, 10,000 cancels, 100 at a time
    python tests/campaign/run.py flood                2,000 heads that never end
    python tests/campaign/run.py readers              100 readers at 1 kB/s
    python tests/campaign/run.py report               REPORT.md anew, from results.json

Each writes its figures into results.json and REPORT.md beside it, and ends with 1 if one of them
is not what it has to be. `--turns` and `--seconds` make the campaign and the soak shorter. The
campaign keeps each round of it as it ends, and goes on where it was stopped; `--anew` forgets them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

# As a script, this finds its own package and the project's modules.
sys.path[:1] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from campaign import crowd, flood, ledger, report, rounds, soak  # noqa: E402  after the path is set

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

ROUNDS = Path(tempfile.gettempdir()) / "turnwire-campaign.jsonl"
TURNS_A_ROUND = 2000


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    options = _parse(arguments)
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # the simulator's
    results = report.load()
    if options.trial != "report":
        figures = asyncio.run(TRIALS[options.trial](options))
        results[options.trial] = {
            "when": datetime.now(UTC).date().isoformat(),
            "proxy_tree": _tree(),
            **figures,
        }
        report.save(results)
    report.write(results)
    missed = report.missed(results, [options.trial] if options.trial in results else None)
    for words, value in missed.items():
        _say(f"missed: {words}: {value}")
    return int(bool(missed))


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run a long trial of Turnwire.")
    parser.add_argument("trial", choices=[*TRIALS, "report"])
    parser.add_argument("--turns", type=int, default=100_000, help="of the campaign")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of the soak")
    parser.add_argument("--rounds", type=Path, default=ROUNDS, help="where rounds are kept")
    parser.add_argument("--anew", action="store_true", help="forget the rounds of before")
    return parser.parse_args(arguments)


async def _faults(options: argparse.Namespace) -> dict[str, Any]:
    done = _kept(options.rounds, anew=options.anew)
    while (turns := sum(each["turns"] for each in done)) < options.turns:
        number = len(done)
        result = await rounds.play_round(number, min(TURNS_A_ROUND, options.turns - turns))
        _keep(options.rounds, result)
        done.append(result)
        faults = sum(result["injected"].values())
        _say(
            f"round {number}, {result['profile']}: {result['turns']} turns, {faults} faults,"
            f" {sum(result['defects'].values())} defects, {result['seconds']} s"
        )
    return {
        "rounds": len(done),
        "seconds": round(sum(each["seconds"] for each in done)),
        "finished_upstream": sum(each["finished_upstream"] for each in done),
        **ledger.total(done),
    }


def _kept(path: Path, *, anew: bool) -> list[dict[str, Any]]:
    """Return the rounds of before."""
    if anew:
        path.unlink(missing_ok=True)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _keep(path: Path, result: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(result) + "\n")


TRIALS: dict[str, Callable[[argparse.Namespace], Awaitable[dict[str, Any]]]] = {
    "faults": _faults,
    "soak": lambda options: soak.soak(options.seconds),
    "crowd": lambda _: crowd.crowd(1000, 50),
    "drain": lambda _: crowd.drain(200, 5, gap_ms=500),
    "cancels": lambda _: crowd.cancels(100),
    "flood": lambda _: flood.flood(2000, 0, 2000),
    "readers": lambda _: flood.flood(0, 100, 2000),
}


def _tree() -> str:
    """Return what git calls the state of the program: it stays so whatever else is committed."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD:proxy"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201  a command's output


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
