"""Replays a turn against its machine: the test reads as what happened and what was ordered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.core.turn import State

if TYPE_CHECKING:
    from proxy.core.turn import Command, Event, Turn


class Playbook:
    """
    One play of a turn: `<<` names the next command that is due, `>>` tells an event.

    Every step is checked where it is written, so a failure points at its own line and shows all
    that went before.
    """

    def __init__(self, turn: Turn) -> None:
        self.turn = turn
        self._due: list[Command] = turn.start()
        self._transcript: list[str] = []

    def __lshift__(self, expected: Command) -> Playbook:
        assert self._due, self._tell(f"expected {expected}, and nothing is due")
        actual = self._due.pop(0)
        assert actual == expected, self._tell(f"expected {expected}, got {actual}")
        self._transcript.append(f"  << {actual}")
        return self

    def __rshift__(self, event: Event) -> Playbook:
        assert not self._due, self._tell(f"not named yet: {self._due}")
        self._transcript.append(f"  >> {event}")
        self._due = self.turn.handle(event)
        return self

    def ends(self) -> Turn:
        """Check that the turn is over and every command was named; return the turn."""
        assert not self._due, self._tell(f"not named yet: {self._due}")
        assert self.turn.state is State.CLOSED, self._tell(f"still {self.turn.state.name}")
        return self.turn

    def _tell(self, problem: str) -> str:
        return "\n".join([problem, *self._transcript])
