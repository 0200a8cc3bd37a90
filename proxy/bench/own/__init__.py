"""
`turnwire bench agent --upstream URL`: one agent against your own upstream, straight and through us.

Everything else in this package measures on loopback and costs nothing. This spends tokens of yours,
so it says how many beforehand and asks. What it measures is what you would have: your network, your
model, your provider's queues.

    account   what a run will cost, and what came of the runs (pure)
    loop      the agent: a fixed number of forced tool calls over a growing history
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
from typing import TYPE_CHECKING

from proxy.app import Turnwire, loop_factory
from proxy.bench.own.account import Outcome, Task
from proxy.bench.own.loop import LoopFailed, run_agent
from proxy.config import load
from proxy.demo import plot
from proxy.demo.results import Way
from proxy.demo.screen import open_screen
from proxy.errors import ConfigError
from proxy.observe import log

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from proxy.config import Config
    from proxy.demo.screen import Screen

OK, FAILED = 0, 1


def main(arguments: argparse.Namespace) -> int:
    """
    Ask, run, show; return the exit status: 1 if it was declined or a turn failed.

    `arguments` has `upstream`, `model`, `key_from`, `calls`, `output_bytes`, `rounds` (None for
    one), `yes`, and `json` and `plot` (paths or None). Raises ConfigError.
    """
    config, task, key = _prepared(arguments)
    screen = open_screen(sys.stdout)
    screen.say(task.announcement(config.upstream))
    if not arguments.yes and not _agreed():
        sys.stderr.write("turnwire: nothing was sent\n")
        return FAILED
    log.configure("error", "auto")
    try:
        with asyncio.Runner(loop_factory=loop_factory(config)) as runner:
            outcome = runner.run(_measure(config, task, key, screen))
    except LoopFailed as failure:
        sys.stderr.write(f"turnwire: {failure}\n")
        return FAILED
    _show(outcome, screen, arguments.plot)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(outcome.document(), indent=2), encoding="utf-8")
    return OK


def _prepared(arguments: argparse.Namespace) -> tuple[Config, Task, str]:
    """Check everything before anybody is asked. Raises ConfigError."""
    if arguments.model is None:
        raise ConfigError("which model? --model NAME; it will be billed for this")
    if arguments.plot is not None and arguments.plot.suffix.lower() not in plot.SUFFIXES:
        raise ConfigError(f"--plot {arguments.plot} must end in {' or '.join(plot.SUFFIXES)}")
    for flag, path in (("--plot", arguments.plot), ("--json", arguments.json)):
        if path is not None and not _is_writable(path):
            raise ConfigError(f"{flag} {path} can't be written")
    key = os.environ.get(arguments.key_from, "").strip()
    if not key:
        raise ConfigError(f"{arguments.key_from} is not set; --key-from names another variable")
    flags = {"--upstream": arguments.upstream, "--port": "0", "--admin-port": "0"}
    config = load(flags, os.environ, None).config
    if config.mode != "live" or not config.websocket.enabled:
        raise ConfigError("there is nothing to compare in shadow mode or without WebSockets")
    task = Task(
        model=arguments.model,
        calls=arguments.calls,
        output_bytes=arguments.output_bytes,
        rounds=arguments.rounds or 1,
    )
    return config, task, key


def _is_writable(path: Path) -> bool:
    return os.access(path if path.exists() else path.parent, os.W_OK) and not path.is_dir()


def _agreed() -> bool:
    """Ask whoever is there; nobody there means no."""
    if not sys.stdin.isatty():
        sys.stderr.write("turnwire: there is nobody to ask; --yes goes on without asking\n")
        return False
    sys.stdout.write("Go on? [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


async def _measure(config: Config, task: Task, key: str, screen: Screen) -> Outcome:
    """Run the rounds, each way first in every other one. Raises LoopFailed, ConfigError."""
    outcome = Outcome(task)
    names = [f"{way.value}, round {number + 1}" for number, way in task.order()]
    async with Turnwire(config) as proxy:
        urls = {Way.STRAIGHT: config.upstream, Way.VIA: proxy.base_url}
        with screen.track(names, task.turns) as advance:
            for name, (_, way) in zip(names, task.order(), strict=True):
                outcome.add(
                    way, await run_agent(urls[way], key, task, functools.partial(advance, name))
                )
        outcome.note_upload(proxy.live.bytes_up)
    return outcome


def _show(outcome: Outcome, screen: Screen, path: Path | None) -> None:
    screen.table(outcome.columns(), outcome.rows())
    screen.say(outcome.small_print())
    if path is None:
        return
    try:
        plot.draw(outcome.typical_runs(), outcome.verdict(), outcome.caption(), path)
        screen.say(f"Plot: {path}")
    except ImportError:
        screen.say("No plot: matplotlib is missing; pip install 'turnwire[bench]' brings it.")
    except OSError as error:
        screen.say(f"No plot: {path} can't be written ({error.strerror or error}).")
