"""
`turnwire run -- COMMAND`: an agent with a proxy of its own, which lives as long as it does.

The proxy takes free ports, the agent gets the environment that leads there, and the terminal is the
agent's: the proxy logs nothing below an error, and says what it saved in one line on standard error
when the agent has ended. Signals from the terminal reach the agent directly; one that is sent to
this process alone is passed on. The exit status is the agent's, as a shell would have told it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from typing import TYPE_CHECKING

from proxy.agents import prepared
from proxy.app import Turnwire, loop_factory
from proxy.errors import TurnwireError
from proxy.observe import log
from proxy.upstream.tasks import cancel_and_wait, spawn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from proxy.config import Config

# As shells have it: the command can't be run, there is none, it was ended by signal N (128 + N).
CANNOT_RUN = 126
NOT_FOUND = 127
SIGNALLED = 128


class CommandFailed(TurnwireError):
    """The command could not be started; `status` is the exit status to end with."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def run(config: Config, command: Sequence[str]) -> int:
    """
    Run a command behind a proxy of its own and return its exit status.

    Raises ConfigError if the proxy can't listen, CommandFailed if the command can't be started.
    """
    log.configure(config.log.level, config.log.format)
    with asyncio.Runner(loop_factory=loop_factory(config)) as runner:
        return runner.run(_run(config, command))


async def _run(config: Config, command: Sequence[str]) -> int:
    async with Turnwire(config) as proxy:
        line, environment = prepared(command, os.environ, proxy.base_url)
        status = await _run_child(line, environment)
    sys.stderr.write(f"turnwire: {proxy.metrics.summary()}\n")
    return status


async def _run_child(command: Sequence[str], environment: dict[str, str]) -> int:
    with _signals() as received:
        try:
            child = await asyncio.create_subprocess_exec(*command, env=environment)
        except FileNotFoundError:
            raise CommandFailed(f"{command[0]}: no such command", NOT_FOUND) from None
        except OSError as error:
            raise CommandFailed(f"{command[0]}: {error.strerror}", CANNOT_RUN) from error
        handing_on = spawn(_hand_on(received, child), name="hand-signals-on")
        status = await child.wait()
        await cancel_and_wait([handing_on])
    return status if status >= 0 else SIGNALLED - status


async def _hand_on(received: asyncio.Queue[int], child: asyncio.subprocess.Process) -> None:
    while True:
        number = await received.get()
        if child.returncode is None:
            child.send_signal(number)


@contextlib.contextmanager
def _signals() -> Iterator[asyncio.Queue[int]]:
    """
    Collect the signals that ask this process to end, from before the agent starts.

    Those that a terminal sends are the agent's own affair: it gets them as well.
    """
    loop = asyncio.get_running_loop()
    received: asyncio.Queue[int] = asyncio.Queue()
    taken = []
    for name in ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT"):
        number = getattr(signal, name, None)
        if number is None:
            continue
        is_for_us = name in ("SIGTERM", "SIGHUP")
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C raises instead
            loop.add_signal_handler(number, received.put_nowait if is_for_us else _ignore, number)
            taken.append(number)
    try:
        yield received
    finally:
        for number in taken:
            loop.remove_signal_handler(number)


def _ignore(_number: int) -> None:
    """Leave a signal to the agent."""
