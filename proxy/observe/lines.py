"""
Writes log lines, and never makes the event loop wait for whoever reads them.

A log mostly goes into a pipe: to a container runtime, to journald, to the program that started us.
When its reader is slow the pipe is soon full (64 KiB on Linux, some 150 turns), and the next write
waits for as long as that takes: with it every stream, deadline and health check.

So a line is written at once only where that can't wait: into a regular file, or where the system
says that there is room, which for a pipe means room for `PIPE_BUF` bytes (POSIX, pipe(7)). What
has no room is put aside, and a thread writes it, in order, as it is taken. What is put aside is
bounded; beyond that lines are dropped and counted, and a line says so when there is room again.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import stat
import threading
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

MAX_ASIDE_BYTES: Final = 4 * 1024 * 1024
LAST_WORDS_S: Final = 1.0
"""How long the end of the process waits for a reader."""

_PIPE_BUF: Final = getattr(select, "PIPE_BUF", 512)  # POSIX: never less


class LineWriter:
    """
    Writes to the file behind `stream`, or, if there is none, to `stream` itself.

    `notice` makes the line that tells of so many dropped ones. A file that is gone is nobody's
    business here: lines for it vanish. Lines may come from any thread.
    """

    def __init__(
        self,
        stream: TextIO,
        notice: Callable[[int], str],
        max_aside_bytes: int = MAX_ASIDE_BYTES,
    ) -> None:
        self.dropped = 0
        self._stream = stream
        self._notice = notice
        self._max_aside_bytes = max_aside_bytes
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._file = _file_of(stream)
        self._never_waits = self._file is not None and stat.S_ISREG(os.fstat(self._file).st_mode)
        # Reentrant: a collection in the middle of a write may run a finalizer that logs.
        self._lock = threading.RLock()
        self._aside: deque[bytes] = deque()
        self._aside_bytes = 0
        self._untold = 0
        self._thread: threading.Thread | None = None

    def write(self, text: str) -> None:
        """Write lines, the line feed of the last one included."""
        if self._file is None:
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(text)
                self._stream.flush()
            return
        data = text.encode(self._encoding, "backslashreplace")
        with self._lock:
            if self._thread is None and self._has_room(self._file, data):
                try:
                    written = os.write(self._file, data)
                except BlockingIOError:
                    written = 0
                except OSError:
                    return
                data = data[written:]  # all of it, but for what others do with the same file
            if data:
                self._put_aside(self._file, data)

    def flush(self) -> None:
        """Do nothing: what could be written has been."""

    def drain(self, timeout_s: float) -> None:
        """Wait until all that was put aside is written, but no longer than this."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _has_room(self, file: int, data: bytes) -> bool:
        if self._never_waits:
            return True
        return len(data) <= _PIPE_BUF and _takes(file, 0)

    def _put_aside(self, file: int, data: bytes) -> None:
        if self._aside_bytes + len(data) > self._max_aside_bytes:
            self.dropped += 1
            self._untold += 1
            return
        self._aside.append(data)
        self._aside_bytes += len(data)
        if self._thread is None:
            # A daemon, so that a reader who never comes does not keep the process from its end.
            thread = threading.Thread(
                target=self._write_aside, args=(file,), name="turnwire-log", daemon=True
            )
            if self._thread is None:  # still: making one may have been where somebody logged
                self._thread = thread
                atexit.register(self.drain, LAST_WORDS_S)
                thread.start()

    def _write_aside(self, file: int) -> None:
        """Write what was put aside, until there is no more: what the thread does."""
        while (data := self._next_aside()) is not None:
            with contextlib.suppress(OSError):
                while data:
                    _takes(file, None)  # for a file that somebody else has made non-blocking
                    data = data[os.write(file, data) :]

    def _next_aside(self) -> bytes | None:
        with self._lock:
            if self._aside:
                data = self._aside.popleft()
                self._aside_bytes -= len(data)
                return data
            if self._untold:
                untold, self._untold = self._untold, 0
                return self._notice(untold).encode(self._encoding, "backslashreplace")
            self._thread = None
            atexit.unregister(self.drain)
            return None


def _file_of(stream: TextIO) -> int | None:
    """Return the descriptor behind a stream, if it is one that can be asked for room."""
    if os.name != "posix":
        return None
    try:
        stream.flush()
        file = stream.fileno()
        _takes(file, 0)
    except (AttributeError, OSError, ValueError):
        return None
    return file


def _takes(file: int, timeout_s: float | None) -> bool:
    """Tell whether a descriptor takes something now, or within a time; None waits for ever."""
    return bool(select.select((), (file,), (), timeout_s)[1])
