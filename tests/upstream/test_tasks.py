"""Background tasks are kept alive, and their failures are seen."""

from __future__ import annotations

import asyncio
import gc

import pytest
from structlog.testing import capture_logs

from proxy.upstream.tasks import cancel_and_wait, spawn


async def test_a_task_that_nobody_holds_runs_to_its_end() -> None:
    """A collection in the middle of its work does not lose it."""
    started, finished = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        await asyncio.sleep(0)
        gc.collect()
        await asyncio.sleep(0)
        finished.set()

    spawn(work(), name="work")
    await started.wait()
    gc.collect()
    await finished.wait()


async def test_an_unexpected_exception_is_logged_under_the_tasks_name() -> None:
    """And still reaches whoever awaits the task."""

    async def fail() -> None:
        raise ValueError("no")

    with capture_logs() as logs:
        task = spawn(fail(), name="failing")
        with pytest.raises(ValueError, match="no"):
            await task

    assert [(entry["event"], entry["task"]) for entry in logs] == [("task_failed", "failing")]


async def test_cancelling_waits_and_logs_nothing() -> None:
    """Tasks that run, that have ended, and that never began are all ended afterwards."""
    cleaned = []

    async def work(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(name)

    async def nothing() -> None: ...

    with capture_logs() as logs:
        done = spawn(nothing(), name="done")
        await done
        tasks = [spawn(work("a"), name="a"), spawn(work("b"), name="b"), done]
        await asyncio.sleep(0)
        tasks.append(spawn(work("never"), name="never"))
        await cancel_and_wait(tasks)

    assert all(task.done() for task in tasks)
    assert cleaned == ["a", "b"]
    assert logs == []
    await cancel_and_wait([])
