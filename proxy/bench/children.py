"""
The processes of the benchmark: started, placed on cores, watched and ended.

Only children of this process are ever ended, each by its own handle, and all of them are: also
when a signal ends the benchmark, which is why `unwinding` keeps signals from coming between the
birth of a child and the note of it. The proxy under test gets a
core for itself where there are two; everything else shares the others. CPU time comes from
`/proc/PID/task/*/schedstat`, in nanoseconds; where that does not exist it is None.
"""

from __future__ import annotations

import contextlib
import enum
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from proxy.errors import TurnwireError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

START_TIMEOUT_S = 20.0
END_TIMEOUT_S = 5.0
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class BenchFailed(TurnwireError):
    """A measurement could not be made. The message says why, in a sentence or a few lines."""


class Role(enum.Enum):
    """What a process is in a measurement: it decides about its core and its priority."""

    PROXY = 5
    UPSTREAM = 10
    CLIENT = 20


def cores_for(role: Role, cores: Sequence[int]) -> set[int]:
    """Return the cores for a role, of those that there are: the first one is the proxy's."""
    if len(cores) < 2:
        return set(cores)
    return {cores[0]} if role is Role.PROXY else set(cores[1:])


class Child:
    """
    A process that talks in lines.

    Give `errors` a file to write standard error to; its end is part of every failure's message.
    """

    def __init__(
        self,
        command: Sequence[str],
        role: Role,
        errors: Path,
        *,
        realtime: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = Path(command[0]).name
        self._errors = errors
        with errors.open("ab") as sink, _birth(self):
            self._process = subprocess.Popen(  # noqa: S603  programs of ours, and nginx
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env=dict(env or os.environ),
                start_new_session=True,  # Ctrl-C reaches us alone, and we end the others
            )
            assert self._process.stdout is not None
            self._out = self._process.stdout
            self._selector = selectors.DefaultSelector()
            self._selector.register(self._out, selectors.EVENT_READ)
            self._rest = b""
        self.pid = self._process.pid
        _place(self.pid, role, realtime=realtime)

    def read_line(self, timeout_s: float) -> str:
        """Return the next line of its output. Raises BenchFailed if none comes in time."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._selector.select(left_s):
                raise self.failure(f"said nothing for {timeout_s:.0f} s")
            part = os.read(self._out.fileno(), 1 << 16)
            if not part:
                raise self.failure("has ended")
            self._rest += part
        line, self._rest = self._rest.split(b"\n", 1)
        return line.decode()

    def say(self, line: str) -> None:
        """Write a line to its input. Raises BenchFailed if it has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self.failure("has ended") from None

    def failure(self, what: str) -> BenchFailed:
        """Make the exception that tells what became of it."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)
        status = self._process.returncode
        ended = "" if status is None else f" (status {status})"
        told = self._errors.read_bytes()[-600:].decode(errors="replace").strip()
        return BenchFailed(f"{self.name} {what}{ended}{': ' if told else ''}{told}")

    @property
    def has_ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def end(self) -> None:
        """End it: with the end of its input, then SIGTERM, then SIGKILL. May be repeated."""
        process = self._process
        with contextlib.suppress(BrokenPipeError):
            if process.stdin is not None:
                process.stdin.close()
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                process.send_signal(number)
            try:
                process.wait(END_TIMEOUT_S if number else 0.05)
                break
            except subprocess.TimeoutExpired:
                continue
        self._selector.close()
        self._out.close()
        _Births.living.discard(self)


class _Births:
    """Which children live, and a signal that came while one was being born."""

    living: ClassVar[set[Child]] = set()
    is_under_way = False
    missed_signal: int | None = None


@contextlib.contextmanager
def _birth(newborn: Child) -> Iterator[None]:
    """Note a child once it is there; a signal that came meanwhile acts then."""
    _Births.is_under_way = True
    try:
        yield
        _Births.living.add(newborn)
    finally:
        _Births.is_under_way = False
    if (number := _Births.missed_signal) is not None:
        _Births.missed_signal = None
        _unwind(number, None)


def _unwind(number: int, _frame: object) -> None:
    if _Births.is_under_way:
        _Births.missed_signal = number
    elif number == signal.SIGINT:
        raise KeyboardInterrupt
    else:
        sys.exit(128 + number)


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """Let SIGINT and SIGTERM leave by an exception; end all children at the end of the context."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, _unwind) for number in numbers]
    try:
        yield
    finally:
        for living in list(_Births.living):
            living.end()
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of ours."""
    return [sys.executable, "-m", module, *arguments]


def python_environment() -> dict[str, str]:
    """
    Return an environment in which our modules are found.

    Settings of the person's own Turnwire, and their web proxy, are left out.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TURNWIRE_")}
    for name in ("http_proxy", "https_proxy", "all_proxy", "ws_proxy", "wss_proxy"):
        kept.pop(name, None)
        kept.pop(name.upper(), None)
    known = kept.get("PYTHONPATH")
    kept["PYTHONPATH"] = os.pathsep.join([str(_PACKAGE_ROOT), *([known] if known else [])])
    return kept


def may_run_realtime() -> bool:
    """Tell whether processes may be given real-time priority here, and a core each."""
    if not hasattr(os, "sched_setscheduler") or len(os.sched_getaffinity(0)) < 2:
        return False
    usual = os.sched_getscheduler(0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        return False
    os.sched_setscheduler(0, usual, os.sched_param(0))
    return True


def _place(pid: int, role: Role, *, realtime: bool) -> None:
    if not hasattr(os, "sched_setaffinity"):
        return
    with contextlib.suppress(OSError):  # it may have ended already, or not be allowed
        os.sched_setaffinity(pid, cores_for(role, sorted(os.sched_getaffinity(0))))
        if realtime:
            os.sched_setscheduler(pid, os.SCHED_FIFO, os.sched_param(role.value))


# --- what a process uses -------------------------------------------------------------------------


def cpu_s(pid: int) -> float | None:
    """Return the CPU time of a process's live threads, in seconds."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        spent_ns = sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)
    except OSError:
        return None
    return spent_ns / 1e9


def resident_bytes(pid: int) -> int | None:
    """Return the resident memory of a process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    found: Any = next((line.split()[1] for line in lines if line.startswith("VmRSS:")), None)
    return None if found is None else int(found) * 1024
