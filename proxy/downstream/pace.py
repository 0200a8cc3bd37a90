"""
How many turns are taken in before the event loop comes round again.

A loop hands out everything that its sockets have in one go. When a thousand clients speak in the
same moment that is a thousand plans to make, seconds of work, and until they are made no stream
goes on, no health check is answered and no deadline is looked at. So turns are let in by weight, a
little at each round of the loop; those above that wait in line, in the order they came, and are
next at the round after, once all others had their say.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

WEIGHT_PER_ROUND: Final = 16
"""What is let in at one round: a turn of the ordinary size weighs 1, and costs some 2 ms at most
where its connection is still to be opened, a fifth of that otherwise."""

_BYTES_PER_WEIGHT: Final = 128 * 1024  # what takes about as long to read as the rest of a turn


class Pace:
    """
    The line in which turns wait; one for all clients of an event loop.

    The first in line is let in whatever it weighs.
    """

    def __init__(self, weight_per_round: int = WEIGHT_PER_ROUND) -> None:
        self._loop = asyncio.get_running_loop()
        self._per_round = weight_per_round
        self._left = weight_per_round
        self._line: deque[tuple[int, Callable[[], None]]] = deque()
        self._is_round_due = False

    def enter(self, body_bytes: int) -> bool:
        """
        Tell whether a turn may be taken in at once; if so, it has been counted.

        If not, it must `wait_in_line`.
        """
        if self._line or self._left <= 0:
            return False
        self._count(_weight(body_bytes))
        return True

    def wait_in_line(self, body_bytes: int, then: Callable[[], None]) -> None:
        """Have `then` called when it is this turn's time; it must not raise."""
        self._line.append((_weight(body_bytes), then))
        self._expect_round()

    async def let_in(self, body_bytes: int) -> None:
        """Wait until a turn may be taken in."""
        if self.enter(body_bytes):
            return
        its_time = asyncio.Event()
        self.wait_in_line(body_bytes, its_time.set)
        await its_time.wait()

    def _count(self, weight: int) -> None:
        self._left -= weight
        if self._left <= 0:
            self._expect_round()

    def _expect_round(self) -> None:
        if not self._is_round_due:
            self._is_round_due = True
            self._loop.call_soon(self._begin_round)

    def _begin_round(self) -> None:
        """Let in who is next; the loop calls this once it has come round."""
        self._is_round_due = False
        self._left = self._per_round
        while self._line:
            weight, then = self._line.popleft()
            self._count(weight)
            then()
            if self._left <= 0:
                break


def _weight(body_bytes: int) -> int:
    return 1 + body_bytes // _BYTES_PER_WEIGHT
