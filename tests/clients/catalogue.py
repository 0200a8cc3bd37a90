"""All rows, and the clients that don't run here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clients import chat, mishaps, npm, pip

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clients.rows import NotRun, Row

ROWS: tuple[Row, ...] = (*npm.ROWS, *pip.ROWS, *chat.ROWS, *mishaps.ROWS)

NOT_RUN: tuple[NotRun, ...] = (*npm.NOT_RUN, *pip.NOT_RUN)

QUICK = (
    "openai-node-stream",
    "ai-sdk-7-stream",
    "codex",
    "openai-python-stream",
    "openai-node-stream-chat",
    "ai-sdk-7-stream-chat",
    "openai-python-stream-chat",
)
"""The rows that run with the tests: one of each kind of client, in either API."""


def select(names: Sequence[str]) -> list[Row]:
    """
    The rows with these names, all for none; a name may also be a client's, or `quick`.

    Raises ValueError for a name that is none of them.
    """
    if not names:
        return list(ROWS)
    wanted = [name for each in names for name in (QUICK if each == "quick" else (each,))]
    known = {row.name for row in ROWS} | {row.client.name for row in ROWS}
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"no such row or client: {', '.join(unknown)}")
    return [row for row in ROWS if row.name in wanted or row.client.name in wanted]
