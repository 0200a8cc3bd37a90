"""A turn whose body is here, between the client's connection and whoever carries it out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.core.plan import PassThrough

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.core.plan import Plan
    from proxy.core.principals import Principal
    from proxy.core.request import Endpoint
    from proxy.core.turn import Command
    from proxy.downstream.bodies import Body, Share
    from proxy.downstream.carrier import Carrier, WebSocketPlan
    from proxy.downstream.record import TurnRecord


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends turns, to which endpoint, and the trace they are part of, where that is asked."""

    principal: Principal
    endpoint: Endpoint
    trace: Mapping[str, str] | None = None


@dataclass(slots=True, eq=False)
class Intake:
    """
    Who sent a turn, what is told of it in the end, and how it is to be sent.

    `share` is what its body holds of the budget for bodies.

    `begun` is who has begun to carry it out and could not go on, `commands` what is to be done
    next then.
    """

    principal: Principal
    body: Body
    share: Share
    record: TurnRecord
    plan: Plan
    begun: Carrier | None = None
    commands: Sequence[Command] = ()

    @property
    def websocket_plan(self) -> WebSocketPlan:
        """The plan of a turn that is not left to plain HTTP."""
        assert not isinstance(self.plan, PassThrough), "it is left to plain HTTP"
        return self.plan
