"""
The proxy as a process of its own, under watch.

`started` runs `turnwire serve` with settings given as environment variables, reads its log, and
takes it down with SIGTERM. The process is the real program, but for one thing: on a signal it tells
what it holds (tasks, descriptors, memory, connections) in one line on standard output.

Memory and processor time come from /proc: this is for Linux.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

ROOT = Path(__file__).parents[2]
START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 30.0
_PR_SET_PDEATHSIG = 1


def environment(settings: Mapping[str, Any], prefix: str = "TURNWIRE") -> dict[str, str]:
    """Return nested settings as the variables that Turnwire reads."""
    variables: dict[str, str] = {}
    for name, value in settings.items():
        key = f"{prefix}_{name.upper()}"
        if isinstance(value, dict):
            variables |= environment(value, key)
        else:
            variables[key] = str(value).lower() if isinstance(value, bool) else str(value)
    return variables


@dataclass
class Proxy:
    """
    A running proxy.

    `events` counts the lines of its log by event, `alarms` are those that should not be there.
    `leaks` are the lines that hold one of `secrets`.
    """

    process: asyncio.subprocess.Process
    secrets: tuple[bytes, ...] = ()
    base_url: str = ""
    admin_url: str = ""
    events: Counter[str] = field(default_factory=Counter)
    alarms: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=50))
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    log_ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self.process.pid

    @property
    def port(self) -> int:
        """The port of the data listener."""
        return int(self.base_url.split(":")[2].split("/")[0])

    async def read_log(self) -> None:
        """Take note of every line, until the process ends."""
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self._note(line)
        self.log_ended.set()

    def _note(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        self.last_lines.append(text)
        if any(secret in line for secret in self.secrets):
            self.leaks.append(text)
        try:
            facts = json.loads(line)
        except ValueError:
            self.alarms.append(text)  # a traceback, or a warning of the interpreter
            return
        self.events[facts.get("event", "")] += 1
        if facts.get("level") in ("error", "critical"):
            self.alarms.append(text)
        if facts.get("event") == "serving":
            self.base_url, self.admin_url = facts["base_url"], facts["admin_url"]
            self.ready.set()

    async def holdings(self, *, collect: bool = False) -> dict[str, Any]:
        """
        Ask the process what it holds: `tasks`, `fds`, `rss_kib`, `objects`, `connections`.

        With `collect` it gets rid of its garbage first.
        """
        assert self.process.stdout is not None
        self.process.send_signal(signal.SIGUSR2 if collect else signal.SIGUSR1)
        async with asyncio.timeout(STOP_DEADLINE_S):
            return json.loads(await self.process.stdout.readline())

    def rss_kib(self) -> int:
        """Return the memory that the process has now, without asking it."""
        return _status(self.pid, "VmRSS")

    def peak_kib(self) -> int:
        """Return the most memory that the process ever had."""
        return _status(self.pid, "VmHWM")

    def cpu_s(self) -> float:
        """Return the processor time that the process has used."""
        fields = _stat(self.pid)
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def is_asleep(self) -> bool:
        """Tell whether the process waits for something to do, even where it is kept waiting."""
        return _stat(self.pid)[0] == "S"

    async def stop(self, *signals: signal.Signals) -> tuple[int, float]:
        """End the process; return its exit status and how many seconds that took."""
        began = time.monotonic()
        for number in signals or (signal.SIGTERM,):
            self.process.send_signal(number)
        async with asyncio.timeout(STOP_DEADLINE_S):
            status = await self.process.wait()
        return status, time.monotonic() - began


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on (proc(5): the third)."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def _status(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    return 0


@contextlib.asynccontextmanager
async def started(
    upstream: str,
    *,
    secrets: Iterable[str] = (),
    before: tuple[str, ...] = (),
    waits: bool = True,
    **settings: Any,
) -> AsyncIterator[Proxy]:
    """
    Run a proxy in front of `upstream`; `before` is put before its command, as in `taskset -c 0`.
    With `waits` it serves when this begins, and has said where.

    It is killed at the end if it still runs; a trial that wants to see it end calls `stop`.
    """
    wanted = {"upstream": upstream, "port": 0, "admin_port": 0, "log": {"format": "json"}}
    for name, value in settings.items():
        wanted[name] = {**wanted.get(name, {}), **value} if isinstance(value, dict) else value
    process = await asyncio.create_subprocess_exec(
        *before,
        sys.executable,
        __file__,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment(wanted)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=1 << 22,
    )
    proxy = Proxy(process, tuple(secret.encode() for secret in secrets))
    log = asyncio.get_running_loop().create_task(proxy.read_log(), name="read-log")
    try:
        if waits:
            async with asyncio.timeout(START_DEADLINE_S):
                await proxy.ready.wait()
        yield proxy
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await log


# --- In the process -------------------------------------------------------------------------------


def serve() -> int:
    """Be `turnwire serve` that tells what it holds, and ends with who started it."""
    with contextlib.suppress(OSError, AttributeError):  # Linux only; elsewhere it is left behind
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    from proxy import app, cli

    class Watched(app.Turnwire):
        """The proxy, with an answer to two signals."""

        async def _start(self) -> None:
            await super()._start()
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGUSR1, self._tell)
            loop.add_signal_handler(signal.SIGUSR2, self._tell_after_a_collection)

        def _tell_after_a_collection(self) -> None:
            gc.collect()
            self._tell()

        def _tell(self) -> None:
            tasks = asyncio.all_tasks()
            names = Counter(task.get_coro().__qualname__ for task in tasks)
            sample = self.metrics.registry.get_sample_value
            states = ("busy", "idle", "spare", "connecting")
            holdings = {
                "tasks": len(tasks),
                "names": names.most_common(8),
                "fds": len(os.listdir("/proc/self/fd")),  # noqa: PTH208  Path.iterdir holds one open
                "rss_kib": _status(os.getpid(), "VmRSS"),
                "objects": len(gc.get_objects()),
                "connections": {
                    state: int(sample("turnwire_connections", {"state": state}) or 0)
                    for state in states
                },
            }
            print(json.dumps(holdings), flush=True)  # noqa: T201  its reader waits for it

    app.Turnwire = Watched  # type: ignore[misc]
    return cli.main(["serve"])


if __name__ == "__main__":
    sys.path[:1] = []  # not this directory: its modules are not meant for the program
    raise SystemExit(serve())
