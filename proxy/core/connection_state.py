"""
The life of one upstream connection, as a state machine.

    CONNECTING ---> IDLE <---> BUSY
         |           |          |
         +-------> CLOSED <-----+

BUSY is entered before a message is sent and left only when its answer is complete; a connection
whose answer is not complete goes to CLOSED and to nobody else. That one rule is what keeps a reply
from reaching the wrong turn.

An IDLE connection is either a *spare* (upstream remembers nothing on it) or holds a chain: the
response that `response_id` names. A chain is in the *nursery* until its second turn, since most
conversations never have one; from then on it is *established* and kept longer.

Life and death: text silence proves nothing (8.5 minutes of reasoning were measured), so liveness
is ping and pong, and any inbound byte counts as a pong. Two things would make a live peer look
dead, and suspend the deadline: a long message of ours that the pong's ping is queued behind, and
reading paused by back-pressure. A third is our own process being stopped: after a gap between two
ticks no deadline is judged before a whole new one has passed.

Upstream closes a connection at the age of 60 minutes, whatever happens on it. A connection is
given no more turns from `retire_at` on, which leaves the last one time to finish.

Times are monotonic seconds, passed in.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import msgspec


class TransitionError(RuntimeError):
    """A connection was used out of turn: a bug of ours, never a condition to handle."""


class ConnectionState(enum.Enum):
    """Where a connection is in its life."""

    CONNECTING = "connecting"
    IDLE = "idle"
    BUSY = "busy"
    CLOSED = "closed"


_TRANSITIONS = {
    ConnectionState.CONNECTING: {
        ConnectionState.IDLE,
        ConnectionState.BUSY,
        ConnectionState.CLOSED,
    },
    ConnectionState.IDLE: {ConnectionState.BUSY, ConnectionState.CLOSED},
    ConnectionState.BUSY: {ConnectionState.IDLE, ConnectionState.CLOSED},
    ConnectionState.CLOSED: set(),
}


class Action(enum.Enum):
    """What is to be done about a connection now. The values of closing actions are log labels."""

    NONE = "none"
    PING = "ping"
    CLOSE_SILENT = "silent"
    CLOSE_UNUSED = "unused"
    CLOSE_EXPIRING = "expiring"

    @property
    def closes(self) -> bool:
        """Whether the connection's life is over."""
        return self not in {Action.NONE, Action.PING}


@dataclass(frozen=True, slots=True)
class LifePolicy:
    """How long connections live, and how it is found out that they don't. All in seconds."""

    ping_interval_s: float = 20.0
    ping_timeout_s: float = 10.0
    probe_after_idle_s: float = 20.0
    max_age_s: float = 3600.0
    retire_margin_s: float = 600.0
    retire_jitter: float = 0.1  # a fraction of the margin
    nursery_ttl_s: float = 300.0
    idle_ttl_s: float = 1800.0

    def retire_at(self, opened_at: float, jitter: float) -> float:
        """
        Return from when on a connection gets no more turns.

        `jitter` is in [-1, 1]: connections that were opened together must not end together.
        """
        margin_s = self.retire_margin_s * (1 + self.retire_jitter * jitter)
        return opened_at + self.max_age_s - margin_s


@dataclass(slots=True, eq=False)
class ConnectionRecord:
    """
    What is known of one connection. Only `LeaseBook` and `tick` change it.

    `response_id` is the latest response that upstream remembers here; None means that it holds no
    chain. `continued` tells whether that chain had a second turn. `ahead` marks a connection that
    is being, or was, opened before anybody asked for it. The shell keeps `last_inbound_at`,
    `sending` and `paused` up to date.
    """

    id: int
    principal: str
    opened_at: float
    state: ConnectionState = ConnectionState.CONNECTING
    retire_at: float = float("inf")
    last_used_at: float = 0.0
    last_inbound_at: float = 0.0
    ping_sent_at: float | None = None
    ticked_at: float = 0.0
    response_id: str | None = None
    continued: bool = False
    turns: int = 0
    ahead: bool = False
    sending: bool = False
    paused: bool = False

    def enter(self, state: ConnectionState) -> None:
        """Change state, or raise `TransitionError`."""
        if self.state is ConnectionState.IDLE and state is ConnectionState.BUSY:
            self.state = state  # the two of every turn, told without a look into the table
            return
        if self.state is ConnectionState.BUSY and state is ConnectionState.IDLE:
            self.state = state
            return
        if state not in _TRANSITIONS[self.state]:
            raise TransitionError(f"connection {self.id}: {self.state.value} -> {state.value}")
        self.state = state

    def is_retiring(self, now: float) -> bool:
        """Tell whether the connection is too old to be given another turn."""
        return now >= self.retire_at

    @property
    def is_spare(self) -> bool:
        """Whether the connection is idle and holds no chain."""
        return self.state is ConnectionState.IDLE and self.response_id is None

    @property
    def is_nursing(self) -> bool:
        """Whether the connection is idle and its chain never had a second turn."""
        return (
            self.state is ConnectionState.IDLE
            and self.response_id is not None
            and not self.continued
        )

    @property
    def is_established(self) -> bool:
        """Whether the connection is idle and its chain had a second turn."""
        return (
            self.state is ConnectionState.IDLE and self.response_id is not None and self.continued
        )

    @property
    def awaits_life(self) -> bool:
        """Whether a ping went out and nothing has come in since."""
        return self.ping_sent_at is not None and self.last_inbound_at < self.ping_sent_at


def tick(record: ConnectionRecord, now: float, policy: LifePolicy) -> Action:
    """
    Say what is to be done about a connection at `now`, and note a ping as sent.

    Call it about once a second. A closing action is final: the caller closes the connection.
    """
    if record.state in {ConnectionState.CONNECTING, ConnectionState.CLOSED}:
        return Action.NONE
    was_stopped = now - record.ticked_at > policy.ping_timeout_s
    record.ticked_at = now
    if record.state is ConnectionState.IDLE:
        if record.is_retiring(now):
            return Action.CLOSE_EXPIRING
        ttl_s = policy.nursery_ttl_s if record.is_nursing else policy.idle_ttl_s
        if now - record.last_used_at >= ttl_s:
            return Action.CLOSE_UNUSED
    return _check_life(record, now, policy, excused=was_stopped or record.sending or record.paused)


def _check_life(
    record: ConnectionRecord, now: float, policy: LifePolicy, *, excused: bool
) -> Action:
    pinged_at = record.opened_at if record.ping_sent_at is None else record.ping_sent_at
    if record.awaits_life:
        if excused:
            record.ping_sent_at = now  # the deadline starts anew
            return Action.NONE
        silent = now - pinged_at >= policy.ping_timeout_s
        return Action.CLOSE_SILENT if silent else Action.NONE
    if now - pinged_at >= policy.ping_interval_s:
        record.ping_sent_at = now
        return Action.PING
    return Action.NONE


def needs_probe(record: ConnectionRecord, now: float, policy: LifePolicy) -> bool:
    """Tell whether the peer was silent for so long that it must answer a ping before a turn."""
    return now - record.last_inbound_at > policy.probe_after_idle_s


class _Typed(msgspec.Struct):
    type: str


_TYPED = msgspec.json.Decoder(_Typed)


def is_harmless_when_idle(message: bytes) -> bool:
    """
    Tell whether a message that arrived between turns leaves the connection fit for the next one.

    Vendor notices (`codex.rate_limits`, `responsesapi.*`, keep-alives) do. An `error`, a late
    event of an answer (`response.*`) and anything that can't be read do not: the next turn could
    take them for its own.
    """
    try:
        kind = _TYPED.decode(message).type
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return kind != "error" and not kind.startswith("response.")
