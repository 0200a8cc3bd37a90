"""
A proxy before a ledger or a rogue, on a loop of its own, for tests that are not coroutines.

Hypothesis calls a test thousands of times; one proxy serves all of them, and each call runs that
proxy's loop until it has what it wants.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from typing import TYPE_CHECKING, Any, Self
from unittest import mock

from harness import eventually, serving

from hostile.ledger import LAST_TARGET, Ledger, Line
from hostile.upstream import Rogue
from proxy.downstream.bodies import BodyBudget
from proxy.downstream.deadlines import build_runner

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from structlog.testing import CapturingLogger

    from hostile.ledger import Reply, Seen
    from proxy.app import Turnwire

IMPATIENT = {"header_timeout_s": 0.1, "body_timeout_s": 0.1}


IN_FLIGHT = "turnwire_turns_in_flight"


class _Running:
    """A proxy on a loop of its own, before an upstream that is started with it."""

    proxy: Turnwire
    log: CapturingLogger

    def __init__(self, upstream: Ledger | Rogue, **config: Any) -> None:
        self._upstream = upstream
        self._config = config
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
        await self._stack.enter_async_context(self._upstream)
        self.proxy, self.log = await self._stack.enter_async_context(
            serving(self._upstream.url, tolerates=["Error handling request"], **self._config)
        )

    @property
    def port(self) -> int:
        """The port of the proxy."""
        return int(self.proxy.base_url.split(":")[2].split("/")[0])

    @property
    def admin_port(self) -> int:
        """The port of its admin listener."""
        return int(self.proxy.admin_url.split(":")[2])

    @contextlib.contextmanager
    def serving_aside(self) -> Iterator[None]:
        """Serve in a thread meanwhile, for clients that block."""
        loop = self._runner.get_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        try:
            yield
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()

    @property
    def held_bytes(self) -> int:
        """What the proxy holds of bodies, once all turns are over."""
        self.run(eventually(lambda: not self.proxy.metrics.registry.get_sample_value(IN_FLIGHT)))
        budgets = [each for each in gc.get_objects() if type(each) is BodyBudget]
        return sum(budget.held_bytes for budget in budgets)

    def run(self, step: Any) -> Any:
        """Run a coroutine on the proxy's loop."""
        return self._runner.run(step)

    def exchange(
        self,
        *parts: bytes,
        methods: Sequence[str] = (),
        port: int | None = None,
        pace_s: float = 0.0,
    ) -> list[Reply]:
        """Send the parts on a new connection; return the replies once the proxy has closed it."""
        line = Line(port or self.port, pace_s)
        replies: list[Reply] = self.run(line.exchange(*parts, methods=methods))
        return replies


class Edge(_Running):
    """A proxy before a ledger."""

    def __init__(self, **config: Any) -> None:
        self.ledger = Ledger()
        super().__init__(self.ledger, **config)

    def ask(
        self, *parts: bytes, methods: Sequence[str] = (), pace_s: float = 0.0
    ) -> tuple[list[Reply], list[Seen]]:
        """Exchange; also return what reached upstream meanwhile but for the last request."""
        self.ledger.seen.clear()
        replies = self.exchange(*parts, methods=methods, pace_s=pace_s)
        return replies, [seen for seen in self.ledger.seen if seen.target != LAST_TARGET]


class RogueEdge(_Running):
    """A proxy before a rogue that is impatient with it, and never leaves it alone."""

    def __init__(self) -> None:
        self.rogue = Rogue()
        super().__init__(
            self.rogue,
            websocket={"first_event_timeout_s": 0.1, "silence_timeout_s": 0.1},
            connections={
                "spare_per_principal": 0,
                "handshakes_per_s": 100_000,
                "handshake_burst": 1_000_000,
            },
            resends={"budget_per_s": 100_000},
            cooldown={"first_s": 0.001, "max_s": 0.001},
        )

    def ask(self, *parts: bytes) -> list[Reply]:
        """Exchange."""
        return self.exchange(*parts)
