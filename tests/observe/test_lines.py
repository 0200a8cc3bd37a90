"""The log's writer: whoever reads the log, nobody waits for them."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any, TextIO

import pytest

from proxy.observe import lines
from proxy.observe.lines import LineWriter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

posix = pytest.mark.skipif(os.name != "posix", reason="elsewhere nobody can be asked for room")


class Pipe:
    """A pipe with a writer of lines at one end."""

    def __init__(self, max_aside_bytes: int = 1 << 20) -> None:
        self.reads_from, writes_to = os.pipe()
        self.stream: TextIO = os.fdopen(writes_to, "w", encoding="utf-8")
        self.writer = LineWriter(self.stream, "{} dropped\n".format, max_aside_bytes)

    def fill(self) -> bytes:
        """Write until there is no room at all; return what was written."""
        os.set_blocking(self.stream.fileno(), False)
        written = 0
        try:
            while True:
                written += os.write(self.stream.fileno(), b"." * 1024)
        except BlockingIOError:
            pass
        os.set_blocking(self.stream.fileno(), True)
        return b"." * written

    def read(self, size: int) -> bytes:
        """Read so many bytes, however long it takes for them to come."""
        got = b""
        while len(got) < size:
            got += os.read(self.reads_from, size - len(got))
        return got

    def read_all(self) -> bytes:
        """Read until everything is written and the pipe has ended."""
        got: list[bytes] = []

        def take() -> None:
            while data := os.read(self.reads_from, 1 << 16):
                got.append(data)

        reader = threading.Thread(target=take)
        reader.start()
        self.writer.drain(30)
        self.stream.close()
        reader.join()
        return b"".join(got)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """A pipe that nobody reads but the test."""
    pipe = Pipe()
    yield pipe
    os.close(pipe.reads_from)
    if not pipe.stream.closed:
        pipe.stream.close()


def test_a_line_is_there_at_once(pipe: Pipe) -> None:
    """Where there is room a line is written when `write` returns, and no thread is needed."""
    before = threading.active_count()
    pipe.writer.write("a line\n")
    assert threading.active_count() == before
    assert os.read(pipe.reads_from, 100) == b"a line\n"


@posix
def test_nobody_waits_for_a_reader(pipe: Pipe) -> None:
    """Into a full pipe `write` returns as well; what it was given comes out in order."""
    filling = pipe.fill()
    lines = [f"line {number} \u20ac\n" for number in range(1000)]
    for line in lines:
        pipe.writer.write(line)
    assert pipe.read_all() == filling + "".join(lines).encode()
    assert pipe.writer.dropped == 0


@posix
def test_order_is_kept_while_a_reader_catches_up(pipe: Pipe) -> None:
    """What is written when there is room again does not overtake what was put aside."""
    filling = pipe.fill()
    written = []
    for number in range(200):
        written.append(f"{number}: {'x' * 300}\n")
        pipe.writer.write(written[-1])
        if number == 100:
            assert pipe.read(len(filling)) == filling
    assert pipe.read_all() == "".join(written).encode()


@posix
def test_a_line_longer_than_the_room_does_not_wait(pipe: Pipe) -> None:
    """A pipe tells of room for 4 KiB only: a line of a megabyte is put aside at once."""
    line = "y" * 1_000_000 + "\n"
    pipe.writer.write(line)
    pipe.writer.write("next\n")
    assert pipe.read_all() == (line + "next\n").encode()


@posix
def test_lines_that_nobody_takes_are_dropped_and_told() -> None:
    """What is put aside is bounded; the newest are dropped, and a line says how many."""
    pipe = Pipe(max_aside_bytes=1000)
    filling = pipe.fill()
    for number in range(100):
        pipe.writer.write(f"line {number:02} {'z' * 91}\n")  # 100 bytes
    assert 89 <= pipe.writer.dropped <= 90  # one may be with the thread, and not aside any more
    got = pipe.read_all()[len(filling) :].decode().splitlines()
    kept = 100 - pipe.writer.dropped
    assert [line[:7] for line in got[:-1]] == [f"line {number:02}" for number in range(kept)]
    assert got[-1] == f"{pipe.writer.dropped} dropped"
    os.close(pipe.reads_from)


@posix
def test_after_a_jam_lines_are_written_at_once_again(pipe: Pipe) -> None:
    """The thread ends when it has nothing left to write, and is there for the next jam."""
    for _ in range(2):
        filling = pipe.fill()
        pipe.writer.write("aside\n")
        assert pipe.read(len(filling) + 6) == filling + b"aside\n"
        pipe.writer.drain(30)
        pipe.writer.write("at once\n")
        assert os.read(pipe.reads_from, 100) == b"at once\n"


@posix
def test_a_file_made_non_blocking_by_others_loses_nothing(pipe: Pipe) -> None:
    """Who shares our stderr may have made it so: a part of a line that was taken goes on."""
    os.set_blocking(pipe.stream.fileno(), False)
    lines = [f"{number}: {'x' * 3000}\n" for number in range(100)]
    for line in lines:
        pipe.writer.write(line)
    assert pipe.read_all() == "".join(lines).encode()


def test_a_reader_that_is_gone_is_nobodys_business(pipe: Pipe) -> None:
    """Lines vanish, at once and from the thread; nothing is raised."""
    filled = os.dup(pipe.reads_from)
    pipe.fill()
    pipe.writer.write("aside\n")
    os.close(pipe.reads_from)
    pipe.reads_from = filled
    os.close(filled)
    pipe.reads_from = os.open(os.devnull, os.O_RDONLY)
    pipe.writer.drain(30)
    pipe.writer.write("gone\n")


@posix
@pytest.mark.timeout(20)
def test_a_line_may_be_logged_within_another(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection may run a finalizer that logs at any place, also within a write."""
    takes = lines._takes

    def takes_after_a_collection(file: int, timeout_s: float | None) -> bool:
        monkeypatch.setattr(lines, "_takes", takes)
        pipe.writer.write("inner\n")
        return takes(file, timeout_s)

    monkeypatch.setattr(lines, "_takes", takes_after_a_collection)
    pipe.writer.write("outer\n")
    filling = pipe.fill()
    thread = threading.Thread

    def made_after_a_collection(**wanted: Any) -> threading.Thread:
        monkeypatch.setattr(threading, "Thread", thread)
        pipe.writer.write("second inner\n")
        return thread(**wanted)

    monkeypatch.setattr(threading, "Thread", made_after_a_collection)
    pipe.writer.write("second outer\n")
    assert pipe.read_all() == b"inner\nouter\n" + filling + b"second outer\nsecond inner\n"


def test_a_regular_file_never_waits(tmp_path: Path) -> None:
    """Whatever its length, a line goes into a file when it is written."""
    path = tmp_path / "log"
    with path.open("w") as stream:
        writer = LineWriter(stream, str)
        writer.write("z" * 1_000_000 + "\n")
        assert path.stat().st_size == 1_000_001


def test_a_stream_without_a_file_is_written_to() -> None:
    """A stream in memory, or one of a test runner, has no descriptor."""
    stream = io.StringIO()
    LineWriter(stream, str).write("a line\n")
    assert stream.getvalue() == "a line\n"


PROGRAM = """
import sys
from proxy.observe.log import configure, get_logger
configure("info", "json")
for number in range(2000):
    get_logger().info("line", number=number)
print("done", flush=True)
"""


@posix
def test_the_last_words_of_a_process_are_heard() -> None:
    """What was put aside when the process ends is still written, if somebody reads."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == b"done\n"  # it did not wait for us
    lines = process.stderr.read().splitlines()
    process.stdout.close()
    process.stderr.close()
    assert process.wait() == 0
    assert len(lines) == 2000
    assert b'"number": 1999' in lines[-1]


@posix
def test_a_process_whose_log_nobody_reads_ends() -> None:
    """It waits a second for a reader, and no longer."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.wait(60) == 0
    assert process.stderr is not None
    process.stderr.close()
