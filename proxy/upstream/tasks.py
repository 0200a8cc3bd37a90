"""
Background tasks that are neither lost nor silent.

The event loop keeps only a weak reference to a task, so one that nobody holds may vanish in the
middle of its work; and an exception that nobody awaits is reported when the garbage collector
gets to it, if ever. `spawn` is the one place where a task is started outside of a TaskGroup.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

_T = TypeVar("_T")

_running: set[asyncio.Task[Any]] = set()
_log = structlog.get_logger("proxy.upstream.tasks")


def spawn(coro: Coroutine[Any, Any, _T], *, name: str) -> asyncio.Task[_T]:
    """
    Run `coro` in the background.

    The task is kept alive until it ends. An exception ends up in the log under `name`, unless it
    is a cancellation; whoever awaits the task gets it, too.
    """
    task = asyncio.get_running_loop().create_task(coro, name=name)
    _running.add(task)
    task.add_done_callback(_finished)
    return task


def _finished(task: asyncio.Task[Any]) -> None:
    _running.discard(task)
    if task.cancelled():
        return
    error = task.exception()
    if error is not None:
        _log.error("task_failed", task=task.get_name(), exc_info=error)


async def cancel_and_wait(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks and return when all have ended; their outcomes are ignored."""
    pending = [task for task in tasks if not task.done()]
    for task in pending:
        task.cancel()
    if pending:
        await asyncio.wait(pending)
