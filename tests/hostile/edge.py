"""
A proxy before a ledger, on a loop of its own, for tests that are not coroutines.

Hypothesis calls a test thousands of times; one proxy serves all of them, and each call runs that
proxy's loop until it has what it wants.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Self
from unittest import mock

from harness import serving

from hostile.ledger import LAST_TARGET, Ledger, Line
from proxy.downstream.deadlines import build_runner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from structlog.testing import CapturingLogger

    from hostile.ledger import Reply, Seen
    from proxy.app import Turnwire

IMPATIENT = {"header_timeout_s": 0.15, "body_timeout_s": 0.15, "max_body_bytes": "1MiB"}


class Edge:
    """A running proxy; `ask` sends it raw bytes. A context manager."""

    proxy: Turnwire
    log: CapturingLogger

    def __init__(self, **config: Any) -> None:
        self.ledger = Ledger()
        self._config = {"limits": IMPATIENT} | config
        self._runner = asyncio.Runner()
        self._stack = contextlib.AsyncExitStack()

    def __enter__(self) -> Self:
        self._runner.run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()

    async def _start(self) -> None:
        # Nobody here waits a second to see whether a refused body comes to its end after all.
        defaults = build_runner.__kwdefaults__
        self._stack.enter_context(mock.patch.dict(defaults, lingering_time_s=0.05))
        await self._stack.enter_async_context(self.ledger)
        self.proxy, self.log = await self._stack.enter_async_context(
            serving(self.ledger.url, tolerates=["Error handling request"], **self._config)
        )

    @property
    def port(self) -> int:
        """The port of the proxy."""
        return int(self.proxy.base_url.split(":")[2].split("/")[0])

    def run(self, step: Any) -> Any:
        """Run a coroutine on the proxy's loop."""
        return self._runner.run(step)

    def ask(self, *parts: bytes, methods: Sequence[str] = ()) -> tuple[list[Reply], list[Seen]]:
        """
        Send the parts on a new connection, until the proxy closes it.

        Return the replies, and what reached upstream meanwhile but for the last request.
        """
        self.ledger.seen.clear()
        replies = self._runner.run(Line(self.port).exchange(*parts, methods=methods))
        return replies, [seen for seen in self.ledger.seen if seen.target != LAST_TARGET]
