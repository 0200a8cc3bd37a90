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
    try:
        child = await asyncio.create_subprocess_exec(*command, env=environment)
    except FileNotFoundError:
        raise CommandFailed(f"{command[0]}: no such command", NOT_FOUND) from None
    except OSError as error:
        raise CommandFailed(f"{command[0]}: {error.strerror}", CANNOT_RUN) from error
    with _signals_passed_to(child):
        status = await child.wait()
    return status if status >= 0 else SIGNALLED - status


@contextlib.contextmanager
def _signals_passed_to(child: asyncio.subprocess.Process) -> Iterator[None]:
    """Leave Ctrl-C to the agent, and hand on what asks this process to end."""
    loop = asyncio.get_running_loop()

    def hand_on(number: int) -> None:
        if child.returncode is None:
            child.send_signal(number)

    # The terminal sends these to the agent as well.
    ignored = [signal.SIGINT, signal.SIGQUIT] if hasattr(signal, "SIGQUIT") else [signal.SIGINT]
    passed = [signal.SIGTERM] + ([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])
    taken = []
    for number in ignored + passed:
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C raises instead
            if number in passed:
                loop.add_signal_handler(number, hand_on, number)
            else:
                loop.add_signal_handler(number, lambda: None)
            taken.append(number)
    try:
        yield
    finally:
        for number in taken:
            loop.remove_signal_handler(number)
