"""
Where the demo prints: a terminal with live progress, or plain lines.

Plain lines are for pipes and logs, and for terminals where rich is not installed. Both show the
same words.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

_LINES_PER_TRACK = 5


class Screen(Protocol):
    """What the demo can show."""

    def say(self, text: str) -> None:
        """Print a paragraph."""

    def track(
        self, names: Sequence[str], total: int
    ) -> AbstractContextManager[Callable[[str], None]]:
        """Show the progress of several things in sequence, each of `total` steps.

        The context gives a function to call with a thing's name after each of its steps.
        """

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table: names on the left, figures to the right."""


def open_screen(out: TextIO) -> Screen:
    """The richest screen that `out` and what is installed allow."""
    if out.isatty() and importlib.util.find_spec("rich") is not None:
        return TerminalScreen(out)
    return PlainScreen(out)


class PlainScreen:
    """Lines of text, each flushed at once."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def say(self, text: str) -> None:
        """Print a paragraph."""
        self._line(f"{text}\n")

    @contextlib.contextmanager
    def track(self, names: Sequence[str], total: int) -> Iterator[Callable[[str], None]]:
        """Print a line every few steps."""
        done = dict.fromkeys(names, 0)
        every = -(-total // _LINES_PER_TRACK)
        width = max(map(len, names))
        started: dict[str, float] = {}
        last = time.monotonic()

        def advance(name: str) -> None:
            nonlocal last
            started.setdefault(name, last)
            last = time.monotonic()
            done[name] += 1
            if done[name] % every == 0 or done[name] == total:
                spent_s = last - started[name]
                self._line(f"{name:<{width}}  turn {done[name]:>3} of {total}  {spent_s:6.2f} s")

        yield advance
        self._line("")

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table in columns of spaces."""
        widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
        rule = ["-" * width for width in widths]
        for row in (columns, rule, *rows):
            name, *figures = row
            cells = [text.rjust(width) for text, width in zip(figures, widths[1:], strict=True)]
            self._line("  ".join([name.ljust(widths[0]), *cells]).rstrip())
        self._line("")

    def _line(self, text: str) -> None:
        self._out.write(f"{text}\n")
        self._out.flush()


class TerminalScreen:
    """A terminal, by way of rich."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console  # noqa: PLC0415  rich is optional

        self._console = Console(file=out, highlight=False, markup=False)

    def say(self, text: str) -> None:
        """Print a paragraph; the terminal breaks lines, so that they can be copied whole."""
        self._console.print(f"{text}\n", soft_wrap=True)

    @contextlib.contextmanager
    def track(self, names: Sequence[str], total: int) -> Iterator[Callable[[str], None]]:
        """Show a bar for each thing, with the time that it has taken so far."""
        from rich.progress import (  # noqa: PLC0415  rich is optional
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        with Progress(*columns, TimeElapsedColumn(), console=self._console) as progress:
            tasks = {name: progress.add_task(name, start=False, total=total) for name in names}
            waiting = iter(names)
            progress.start_task(tasks[next(waiting)])

            def advance(name: str) -> None:
                progress.advance(tasks[name])
                follower = next(waiting, None) if progress.tasks[tasks[name]].finished else None
                if follower is not None:
                    progress.start_task(tasks[follower])

            yield advance
        self._console.print()

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table with rules."""
        from rich import box  # noqa: PLC0415  rich is optional
        from rich.table import Table  # noqa: PLC0415  rich is optional

        table = Table(box=box.SIMPLE_HEAD)
        table.add_column(columns[0])
        for name in columns[1:]:
            table.add_column(name, justify="right")
        for row in rows:
            table.add_row(*row)
        self._console.print(table)
