"""Results as tables: lines for a terminal, Markdown for the README."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from clients.harness import Result
    from clients.rows import NotRun

_HEADINGS = ("Client", "Version", "Variant", "Turns", "Deltas", "Not a delta, because", "Result")


def line(result: Result) -> str:
    """One line about a row, as soon as it is over."""
    mark = "ok  " if result.passed else "FAIL"
    others = ", ".join(f"{count} {reason}" for reason, count in result.others.items())
    text = (
        f"{mark} {result.row.name:<28} {result.turns:>3} turns, "
        f"{result.deltas}/{result.follow_ups} deltas, {result.contexts} contexts"
        f"{', ' + others if others else ''} ({result.duration_s:.1f} s)"
    )
    return "\n".join([text, *(f"       {problem}" for problem in result.problems)])


def markdown(results: Iterable[Result], not_run: Sequence[NotRun]) -> str:
    """The table of all rows, with what did not run and why."""
    rows = [_cells(result) for result in results]
    lines = [_row(_HEADINGS), _row("---" for _ in _HEADINGS), *map(_row, rows)]
    if not_run:
        lines += ["", "Did not run:", ""]
        lines += [f"* {each.title}: {each.why}." for each in not_run]
    return "\n".join(lines) + "\n"


def _cells(result: Result) -> tuple[str, ...]:
    row = result.row
    excuses = [
        f"{count} `{reason}`: {row.excuses.get(Reason[reason.upper()], 'unexplained')}"
        if reason
        else f"{count} without a reason"
        for reason, count in sorted(result.others.items())
    ]
    same = row.difference or "same output, same contexts"
    if not result.passed:
        same = f"FAILED: {result.problems[0]}"
    deltas = f"{result.deltas} of {result.follow_ups}"
    why = "; ".join(excuses)
    return (row.client.title, row.client.version, row.variant, str(result.turns), deltas, why, same)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def embed(text: str, table: str) -> str:
    """A document with the table between its markers. Raises ValueError if it has none."""
    begin, end = "<!-- clients:begin -->", "<!-- clients:end -->"
    before, found, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise ValueError(f"no {begin} … {end} in the document")
    return f"{before}{begin}\n\n{table}\n{end}{after}"
