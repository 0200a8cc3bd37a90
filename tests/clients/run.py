"""
Run real clients against Turnwire and compare: the conformance suite's one command.

    python tests/clients/run.py                    every client, installed as needed
    python tests/clients/run.py quick              the few of the test run
    python tests/clients/run.py codex ai-sdk-7     these clients, or rows
    python tests/clients/run.py --list             the names
    python tests/clients/run.py --install codex    install only

The table also goes into a Markdown document with `--markdown README.md`, between the markers
`<!-- clients:begin -->` and `<!-- clients:end -->`, or into a new file. The exit status is 1 if a
row failed.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

# As a script, this finds its own package and the project's modules.
sys.path[:1] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from clients import catalogue, install, isolation, report  # noqa: E402  after the path is set
from clients.harness import Result, missing_tool, run_row  # noqa: E402

if TYPE_CHECKING:
    from clients.rows import Row


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    options = _parse(arguments)
    try:
        rows = catalogue.select(options.names)
    except ValueError as error:
        _say(str(error))
        return 2
    if options.list:
        for row in rows:
            _say(f"{row.name:<30} {row.client.title} {row.client.version}, {row.variant}")
        return 0
    if isolation.is_isolated():
        return asyncio.run(_run(rows, options))
    failed = _install(rows)
    if options.install:
        return int(failed)
    return isolation.run_isolated([__file__, *arguments]) or int(failed)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run real clients against Turnwire.")
    parser.add_argument("names", nargs="*", help="rows, clients, or `quick`; all by default")
    parser.add_argument("--install", action="store_true", help="install the clients, run nothing")
    parser.add_argument("--list", action="store_true", help="list the rows")
    parser.add_argument("--markdown", type=Path, help="write the table into this document")
    parser.add_argument("--jobs", type=int, default=2, help="rows that run at one time")
    parser.add_argument("--bodies", type=Path, help="keep the requests of each row under here")
    parser.add_argument("--output", action="store_true", help="show what the clients said")
    return parser.parse_args(arguments)


def _install(rows: list[Row]) -> bool:
    """Install what is missing; return whether anything failed."""
    failed = False
    for client in install.needed(row.client for row in rows if missing_tool(row) is None):
        _say(f"installing {client.title} {client.version}")
        try:
            install.install(client)
        except install.InstallFailed as error:
            _say(f"FAIL {client.name}: {error}")
            failed = True
    return failed


async def _run(rows: list[Row], options: argparse.Namespace) -> int:
    logging.disable(logging.NOTSET)
    if not isolation.raise_loopback():
        _say("no network namespaces here: clients are kept off the network by their settings only")
    gate = asyncio.Semaphore(options.jobs)

    async def one(row: Row) -> Result | None:
        async with gate:
            if not install.is_installed(row.client):
                _say(f"---  {row.name:<28} {missing_tool(row) or 'not installed'}")
                return None
            result = await run_row(row)
            _say(report.line(result))
            if options.output:
                _say(result.output)
            if options.bodies:
                _keep(options.bodies, result)
            return result

    found = await asyncio.gather(*(one(row) for row in rows))
    results = [result for result in found if result is not None]
    passed = sum(result.passed for result in results)
    _say(f"{passed} of {len(rows)} rows passed")
    if options.markdown:
        _write(options.markdown, report.markdown(results, catalogue.NOT_RUN))
    return int(passed != len(rows))


def _keep(place: Path, result: Result) -> None:
    for number, body in enumerate(result.bodies):
        path = place / result.row.name / f"{number:03}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)


def _write(path: Path, table: str) -> None:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    path.write_text(report.embed(text, table) if text else table, encoding="utf-8")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
