"""The book gives each turn the connection that costs the least, and never one that is in use."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from proxy.core.connection_state import (
    Action,
    ConnectionRecord,
    ConnectionState,
    LifePolicy,
    TransitionError,
)
from proxy.core.leases import Evict, Grant, LeaseBook, LeaseLimits, Open, Refuse, Want
from proxy.core.reasons import Reason

POLICY = LifePolicy()


def book(**limits: float) -> LeaseBook:
    """Make a book with these limits and no handshake budget to speak of."""
    return LeaseBook(LeaseLimits(**({"handshake_burst": 1000} | limits)), POLICY)


def begin(book: LeaseBook, principal: str = "a", now: float = 0.0) -> ConnectionRecord:
    """Open a connection for a turn and return it, BUSY."""
    opening = book.assign(principal, None, now, fresh=True)
    assert isinstance(opening, Open | Evict)
    book.opened(opening.record, now, jitter=0, lease=True)
    return opening.record


def chain(
    book: LeaseBook, response_id: str, principal: str = "a", now: float = 0.0, *, turns: int = 1
) -> ConnectionRecord:
    """Leave an idle connection whose chain had so many turns, the last one `response_id`."""
    ids = [f"{response_id}.{turn}" for turn in range(1, turns)] + [response_id]
    record = begin(book, principal, now)
    book.release(record, reusable=True, response_id=ids[0], now=now)
    for previous, following in pairwise(ids):
        assert book.assign(principal, Want(record.id, previous), now) == Grant(record, True)
        book.release(record, reusable=True, response_id=following, now=now)
    return record


def spare(book: LeaseBook, principal: str = "a", now: float = 0.0) -> ConnectionRecord:
    """Leave an idle connection that never had a turn."""
    record = book.open_spare(principal, now)
    book.opened(record, now, jitter=0, lease=False)
    return record


def fill(book: LeaseBook, count: int, principal: str = "a", now: float = 0.0) -> None:
    """Occupy so many connections with turns that don't end."""
    for _ in range(count):
        begin(book, principal, now)


# Which connection.


def test_a_continuing_turn_gets_the_connection_that_holds_its_chain() -> None:
    """However many others are idle."""
    leases = book()
    held = chain(leases, "r")
    chain(leases, "s")
    spare(leases)

    assert leases.assign("a", Want(held.id, "r"), 1.0) == Grant(held, holds_chain=True)
    assert held.state is ConnectionState.BUSY


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda leases, record: leases.closed(record), Reason.CONNECTION_LOST),
        (
            lambda leases, record: leases.assign("a", Want(record.id, "r"), 1.0),
            Reason.CHAIN_BUSY,
        ),
        (lambda leases, record: setattr(record, "response_id", "later"), Reason.CHAIN_ADVANCED),
        (lambda leases, record: setattr(record, "retire_at", 1.0), Reason.CONNECTION_EXPIRING),
    ],
)
def test_a_chain_that_cannot_be_had_costs_another_connection(spoil: object, reason: Reason) -> None:
    """The question says why, and the assignment goes on without the chain."""
    leases = book()
    held = chain(leases, "r")
    other = spare(leases)
    want = Want(held.id, "r")
    assert leases.status("a", want, 1.0) is None
    spoil(leases, held)

    assert leases.status("a", want, 1.0) is reason
    assert leases.assign("a", want, 1.0) == Grant(other, holds_chain=False)


def test_nobody_gets_another_principals_connection() -> None:
    """Not by naming it, not as a spare, and not as a last resort."""
    leases = book(max_per_principal=1, max_total=2)
    held = chain(leases, "r", "a")
    want = Want(held.id, "r")

    assert leases.status("b", want, 0.0) is Reason.CONNECTION_LOST
    assert isinstance(leases.assign("b", want, 0.0), Open)
    assert leases.assign("b", want, 0.0) == Refuse(Reason.CONNECTION_CAP)


def test_a_new_conversation_gets_the_youngest_spare() -> None:
    """It has the most life left."""
    leases = book()
    spare(leases, now=1.0)
    young = spare(leases, now=3.0)
    spare(leases, now=2.0)

    assert leases.assign("a", None, 4.0) == Grant(young, holds_chain=False)


def test_a_retiring_spare_is_left_to_retire() -> None:
    """A new conversation on it would soon lose its chain."""
    leases = book()
    old = spare(leases)

    assert isinstance(leases.assign("a", None, old.retire_at), Open)


def test_new_conversations_open_connections_until_the_nursery_is_full() -> None:
    """From then on each ends the longest unused chain that nobody continued."""
    leases = book(nursery_size=3)
    first = chain(leases, "r1", now=1.0)
    chain(leases, "r2", now=2.0)
    begin(leases, now=0.0)
    assert isinstance(leases.assign("a", None, 9.0), Open)
    chain(leases, "r3", now=3.0)

    assert leases.assign("a", None, 9.0) == Grant(first, holds_chain=False)
    assert first.response_id is None


def test_only_idle_chains_that_were_never_continued_fill_the_nursery() -> None:
    """Busy connections, established chains and spares of other principals are no surplus."""
    leases = book(nursery_size=2)
    fill(leases, 5)
    for number in range(5):
        chain(leases, f"e{number}", turns=2)
        chain(leases, f"o{number}", "b")
    chain(leases, "n")

    assert isinstance(leases.assign("a", None, 1.0), Open)


def test_a_thousand_one_shot_requests_share_a_few_connections() -> None:
    """And a conversation that is being continued keeps its own all the while."""
    leases = LeaseBook(LeaseLimits(), POLICY)
    kept = chain(leases, "kept", turns=2)
    opened = 0
    for number in range(1000):
        assigned = leases.assign("a", None, 1.0)
        if isinstance(assigned, Open):
            opened += 1
            leases.opened(assigned.record, 1.0, jitter=0, lease=True)
        leases.release(assigned.record, reusable=True, response_id=f"r{number}", now=1.0)

    assert opened == 16
    assert leases.status("a", Want(kept.id, "kept"), 1.0) is None


def test_a_fresh_turn_gets_only_what_never_had_a_turn() -> None:
    """Neither its chain, nor a spare that was used before, nor anything from the nursery."""
    leases = book(nursery_size=1)
    held = chain(leases, "r")
    used = begin(leases)
    leases.release(used, reusable=True, response_id=None, now=0.0)
    assert isinstance(leases.assign("a", Want(held.id, "r"), 1.0, fresh=True), Open)
    unused = spare(leases)

    assert leases.assign("a", Want(held.id, "r"), 1.0, fresh=True) == Grant(unused, False)


# Limits.


def test_at_its_own_limit_a_principal_gives_up_its_longest_unused_chain() -> None:
    """One that was never continued."""
    leases = book(max_per_principal=3)
    chain(leases, "new", now=2.0)
    old = chain(leases, "old", now=1.0)
    chain(leases, "kept", now=0.0, turns=2)

    assert leases.assign("a", None, 3.0) == Grant(old, holds_chain=False)


def test_an_established_chain_yields_only_after_a_rest() -> None:
    """Until then the new conversation goes to HTTP: the chain is probably in a tool call."""
    leases = book(max_per_principal=2, yield_after_s=300.0)
    old = chain(leases, "old", now=1.0, turns=3)
    chain(leases, "new", now=2.0, turns=2)

    assert leases.assign("a", None, 301.0) == Refuse(Reason.CONNECTION_CAP)
    assert leases.assign("a", None, 301.5) == Grant(old, holds_chain=False)
    assert not old.continued


def test_a_fresh_turn_at_its_limit_ends_a_chain_of_its_own_principal() -> None:
    """Since it may not use what there is, it takes its place."""
    leases = book(max_per_principal=2)
    chain(leases, "kept", turns=2)
    old = chain(leases, "old")

    evict = leases.assign("a", None, 1.0, fresh=True)
    assert isinstance(evict, Evict)
    assert evict.victim is old
    assert old.state is ConnectionState.CLOSED
    assert leases.assign("a", None, 1.0, fresh=True) == Refuse(Reason.CONNECTION_CAP)


def test_connections_being_opened_count() -> None:
    """Otherwise a burst of turns would open any number."""
    leases = book(max_per_principal=2)
    for _ in range(2):
        assert isinstance(leases.assign("a", None, 0.0), Open)

    assert leases.assign("a", None, 0.0) == Refuse(Reason.CONNECTION_CAP)


def test_at_the_total_limit_another_principals_idle_connection_makes_room() -> None:
    """The longest unused one without an established chain."""
    leases = book(max_total=4)
    chain(leases, "b1", "b", now=3.0)
    old = spare(leases, "c", now=2.0)
    chain(leases, "b2", "b", now=1.0, turns=2)
    begin(leases, "b", now=0.0)

    evict = leases.assign("a", None, 4.0)
    assert isinstance(evict, Evict)
    assert evict.victim is old
    assert sum(leases.counts().values()) == 4
    assert leases.status("c", Want(old.id, "x"), 4.0) is Reason.CONNECTION_LOST


def test_nobody_is_evicted_for_a_handshake_that_may_not_be_made() -> None:
    """The budget is asked before the victim is struck off."""
    leases = LeaseBook(LeaseLimits(max_total=2, handshake_burst=1), POLICY)
    chain(leases, "b", "b")
    begin(leases, "a")

    assert leases.assign("a", None, 0.0) == Refuse(Reason.HANDSHAKE_BUDGET)
    assert leases.counts()["idle"] == 1


def test_handshakes_come_at_a_rate_for_each_principal() -> None:
    """A burst, then three a second; others have a budget of their own."""
    leases = LeaseBook(LeaseLimits(handshake_burst=2), POLICY)
    fill(leases, 2)

    assert leases.assign("a", None, 0.0) == Refuse(Reason.HANDSHAKE_BUDGET)
    assert isinstance(leases.assign("b", None, 0.0), Open)
    assert isinstance(leases.assign("a", None, 0.5), Open)


def test_what_is_open_is_given_out_while_opening_is_barred() -> None:
    """During a cool-down the longest unused chain is worth less than the WebSocket."""
    leases = book()
    held = chain(leases, "r")

    assert leases.assign("b", None, 0.0, barred=Reason.COOLING_DOWN) == Refuse(Reason.COOLING_DOWN)
    assert leases.assign("a", None, 0.0, barred=Reason.COOLING_DOWN) == Grant(held, False)
    refusal = leases.assign("a", None, 0.0, fresh=True, barred=Reason.UPGRADE_REFUSED)
    assert refusal == Refuse(Reason.UPGRADE_REFUSED)


# Leases.


def test_a_chain_is_established_by_its_second_turn() -> None:
    """And in the nursery again when its connection begins another."""
    leases = book(max_per_principal=1)
    record = chain(leases, "r")
    assert not record.continued
    leases.assign("a", Want(record.id, "r"), 1.0)
    leases.release(record, reusable=True, response_id="r2", now=1.0)
    assert record.continued
    assert leases.assign("a", None, 302.0) == Grant(record, holds_chain=False)
    leases.release(record, reusable=True, response_id="s", now=302.0)

    assert not record.continued
    assert record.turns == 3


def test_a_lease_that_was_not_used_changes_nothing() -> None:
    """Released with the id it had, a chain is as young or as old as before."""
    leases = book()
    record = chain(leases, "r")
    leases.assign("a", Want(record.id, "r"), 1.0)
    leases.release(record, reusable=True, response_id="r", now=1.0)

    assert leases.status("a", Want(record.id, "r"), 1.0) is None
    assert not record.continued


def test_a_released_connection_without_a_response_is_a_spare() -> None:
    """After a turn that failed cleanly it may serve a new conversation."""
    leases = book()
    record = begin(leases)
    leases.release(record, reusable=True, response_id=None, now=0.0)

    assert leases.counts()["spare"] == 1
    assert leases.assign("a", None, 0.0) == Grant(record, holds_chain=False)


def test_a_discarded_connection_is_gone() -> None:
    """Its place is free at once."""
    leases = book(max_per_principal=1)
    record = begin(leases)
    leases.release(record, reusable=False, response_id="r", now=0.0)

    assert sum(leases.counts().values()) == 0
    assert isinstance(leases.assign("a", None, 0.0), Open)


@pytest.mark.parametrize("reusable", [True, False])
def test_a_second_release_raises(reusable: bool) -> None:
    """A lease ends once; the next turn's is not the last one's to end."""
    leases = book()
    record = begin(leases)
    leases.release(record, reusable=reusable, response_id=None, now=0.0)

    with pytest.raises(TransitionError):
        leases.release(record, reusable=True, response_id=None, now=0.0)
    assert leases.counts()["spare"] == reusable


def test_events_out_of_turn_raise() -> None:
    """A connection can't fail to open, open or end idle in a state where it can't."""
    leases = book()
    record = begin(leases)

    with pytest.raises(TransitionError):
        leases.open_failed(record)
    with pytest.raises(TransitionError):
        leases.closed(record)
    with pytest.raises(TransitionError):
        leases.opened(record, 0.0, jitter=0, lease=True)


def test_a_connection_that_could_not_be_opened_frees_its_place() -> None:
    """But not the handshake: that was spent."""
    leases = LeaseBook(LeaseLimits(max_per_principal=1, handshake_burst=1), POLICY)
    opening = leases.assign("a", None, 0.0)
    assert isinstance(opening, Open)
    leases.open_failed(opening.record)

    assert leases.assign("a", None, 0.0) == Refuse(Reason.HANDSHAKE_BUDGET)


# Spares.


def test_a_spare_is_wanted_after_the_last_one_was_taken() -> None:
    """Once, even while it is being opened."""
    leases = book()
    assert not leases.wants_spare("a", 0.0)
    begin(leases)
    assert leases.wants_spare("a", 0.0)
    record = leases.open_spare("a", 0.0)
    assert not leases.wants_spare("a", 0.0)
    leases.opened(record, 0.0, jitter=0, lease=False)
    assert not leases.wants_spare("a", 0.0)
    leases.assign("a", None, 0.0)

    assert leases.wants_spare("a", 0.0)


@pytest.mark.parametrize(
    ("limits", "now"),
    [
        ({"spare_per_principal": 0}, 0.0),
        ({"max_per_principal": 2}, 0.0),
        ({"max_total": 2}, 0.0),
        ({"nursery_size": 1}, 0.0),
        ({"handshake_burst": 10, "handshakes_per_s": 0}, 0.0),
        ({}, 301.0),
    ],
)
def test_a_spare_is_not_wanted_where_it_would_be_in_the_way(
    limits: dict[str, float], now: float
) -> None:
    """At a limit, with a full nursery, with handshakes running short, or after a long silence."""
    leases = book(**limits)
    chain(leases, "r")
    fill(leases, 1)
    if "handshake_burst" in limits:
        fill(leases, 6)

    assert not leases.wants_spare("a", now)


# The sweep.


def test_a_sweep_strikes_off_what_is_to_be_closed() -> None:
    """Idle connections at once; a busy one when its holder lets go of it."""
    leases = book()
    idle, busy = chain(leases, "r"), begin(leases)
    for second in range(1, 20):
        assert leases.sweep(float(second)) == []
    assert leases.sweep(20.0) == [(idle, Action.PING), (busy, Action.PING)]
    for second in range(21, 30):
        assert leases.sweep(float(second)) == []

    assert leases.sweep(30.0) == [(idle, Action.CLOSE_SILENT), (busy, Action.CLOSE_SILENT)]
    assert leases.counts() == {"connecting": 0, "busy": 1, "idle": 0, "spare": 0}
    leases.release(busy, reusable=False, response_id=None, now=30.0)
    assert sum(leases.counts().values()) == 0


def test_a_principal_without_connections_is_forgotten() -> None:
    """Once its handshake budget is full again, so that forgetting gives nothing away."""
    leases = LeaseBook(LeaseLimits(handshake_burst=3), POLICY)
    leases.release(begin(leases), reusable=False, response_id=None, now=0.0)
    leases.sweep(0.1)
    assert "a" in leases._accounts
    leases.sweep(0.4)

    assert "a" not in leases._accounts
    assert list(leases.idle_records("a")) == []


# Everything at once, against a model.

PRINCIPALS = ("a", "b")


@dataclass
class Model:
    """What the test itself knows of a connection."""

    principal: str
    state: str
    response_id: str | None = None
    turns_of_chain: int = 0
    turns: int = 0
    used_at: float = 0.0

    @property
    def kind(self) -> str:
        """What the connection is good for."""
        if self.state != "idle":
            return self.state
        if self.response_id is None:
            return "spare"
        return "nursing" if self.turns_of_chain < 2 else "established"


class LeaseMachine(RuleBasedStateMachine):
    """Any order of events keeps the promises of the module docstring."""

    @initialize(
        per_principal=st.integers(1, 5),
        total=st.integers(2, 8),
        nursery=st.integers(1, 4),
        burst=st.sampled_from([2, 1000]),
    )
    def make(self, per_principal: int, total: int, nursery: int, burst: int) -> None:
        """Draw tight limits."""
        self.limits = LeaseLimits(
            max_per_principal=per_principal,
            max_total=total,
            nursery_size=nursery,
            handshakes_per_s=0.5,
            handshake_burst=burst,
        )
        self.book = LeaseBook(self.limits, POLICY)
        self.records: dict[int, ConnectionRecord] = {}
        self.models: dict[int, Model] = {}
        self.held: dict[int, bool] = {}  # what each lease was told of its chain
        self.now = 0.0
        self.names = 0
        self.handshakes = dict.fromkeys(PRINCIPALS, 0)

    def of(self, principal: str, *kinds: str) -> list[int]:
        """Return the principal's usable connections of these kinds, the longest unused first."""
        ids = [
            id_
            for id_, model in self.models.items()
            if model.principal == principal
            and model.kind in kinds
            and (model.state != "idle" or self.now < self.records[id_].retire_at)
        ]
        return sorted(ids, key=lambda id_: self.models[id_].used_at)

    def count(self, principal: str) -> int:
        """Return how many places the principal occupies."""
        return sum(model.principal == principal for model in self.models.values())

    def cap_is_reached(self, principal: str) -> bool:
        """Tell whether a limit stands in the way of a new connection."""
        return (
            self.count(principal) >= self.limits.max_per_principal
            or len(self.models) >= self.limits.max_total
        )

    def enrol(self, record: ConnectionRecord) -> None:
        """Take a new connection into the model."""
        assert record.id not in self.models
        self.records[record.id] = record
        self.models[record.id] = Model(record.principal, "connecting")
        self.handshakes[record.principal] += 1

    @rule(
        principal=st.sampled_from(PRINCIPALS),
        pick=st.integers(0, 20),
        stale=st.booleans(),
        fresh=st.sampled_from([False, False, False, True]),
        barred=st.sampled_from([None, None, None, Reason.COOLING_DOWN]),
    )
    def assign(
        self, principal: str, pick: int, stale: bool, fresh: bool, barred: Reason | None
    ) -> None:
        """A turn asks for a connection, perhaps a certain one."""
        want = None
        if self.models and pick < 15:
            wanted = list(self.models)[pick % len(self.models)]
            want = Want(wanted, "stale" if stale else self.models[wanted].response_id or "none")
        status = self.book.status(principal, want, self.now) if want else Reason.NEW_CONVERSATION
        assigned = self.book.assign(principal, want, self.now, fresh=fresh, barred=barred)
        match assigned:
            case Grant(record, holds_chain):
                self.check_grant(principal, record, want, status, holds_chain, fresh, barred)
            case Open(record):
                assert barred is None
                assert not self.cap_is_reached(principal)
                self.check_nothing_better(principal, fresh)
                self.enrol(record)
            case Evict(victim, record):
                assert barred is None
                assert self.cap_is_reached(principal)
                self.check_nothing_better(principal, fresh)
                model = self.models.pop(victim.id)
                assert model.kind in {"spare", "nursing"}
                assert fresh or model.principal != principal
                self.enrol(record)
            case Refuse(reason):
                assert barred in {None, reason}
                self.check_nothing_better(principal, fresh)
                assert fresh or not self.of(principal, "spare", "nursing")
                if reason is Reason.CONNECTION_CAP:
                    assert self.cap_is_reached(principal)

    def check_grant(
        self,
        principal: str,
        record: ConnectionRecord,
        want: Want | None,
        status: Reason | None,
        holds_chain: bool,
        fresh: bool,
        barred: Reason | None,
    ) -> None:
        """An idle connection of its own; its chain exactly if that was wanted and could be had."""
        model = self.models[record.id]
        assert model.state == "idle"
        assert model.principal == principal
        assert self.now < record.retire_at
        assert holds_chain == (status is None and not fresh)
        if holds_chain:
            assert want == Want(record.id, model.response_id)
        elif fresh:
            assert model.kind == "spare"
            assert model.turns == 0
        elif model.kind != "spare":
            assert not self.of(principal, "spare")
            self.check_sacrifice(principal, record.id, barred)
        if not holds_chain:
            model.response_id, model.turns_of_chain = None, 0
        model.state = "busy"
        model.turns += 1
        self.held[record.id] = holds_chain

    def check_sacrifice(self, principal: str, id_: int, barred: Reason | None) -> None:
        """The longest unused chain goes first, and none without need."""
        nursing = self.of(principal, "nursing")
        used_at = self.models[id_].used_at
        could_open = barred is None and not self.cap_is_reached(principal)
        if self.models[id_].kind == "nursing":
            assert used_at == self.models[nursing[0]].used_at
            is_surplus = (
                sum(
                    model.principal == principal and model.kind == "nursing"
                    for model in self.models.values()
                )
                >= self.limits.nursery_size
            )
            assert is_surplus or not could_open or self.tokens_are_short(principal)
        else:
            assert not nursing
            assert self.now - used_at > self.limits.yield_after_s
            assert not could_open or self.tokens_are_short(principal)

    def tokens_are_short(self, principal: str) -> bool:
        """Tell whether the handshake budget may be what stands in the way."""
        return self.handshakes[principal] >= self.limits.handshake_burst

    def check_nothing_better(self, principal: str, fresh: bool) -> None:
        """No new connection and no refusal while a spare lies ready."""
        spares = self.of(principal, "spare")
        assert not [id_ for id_ in spares if not fresh or self.models[id_].turns == 0]

    @rule(principal=st.sampled_from(PRINCIPALS), seconds=st.integers(0, 3))
    def complete_turn(self, principal: str, seconds: int) -> None:
        """A new conversation has its first turn, from the first question to the last event."""
        self.assign(principal, 20, False, False, None)
        self.finish_handshake(-1, True, 0.0)
        self.now += seconds
        self.release(-1, "done")

    @rule(
        pick=st.integers(0, 20), works=st.sampled_from([True, True, False]), jitter=st.floats(-1, 1)
    )
    def finish_handshake(self, pick: int, works: bool, jitter: float) -> None:
        """A handshake succeeds or fails."""
        connecting = [id_ for id_, model in self.models.items() if model.state == "connecting"]
        if not connecting:
            return
        id_ = connecting[pick % len(connecting)]
        record, model = self.records[id_], self.models[id_]
        if not works:
            self.book.open_failed(record)
            del self.models[id_]
            return
        lease = not record.ahead
        self.book.opened(record, self.now, jitter=jitter, lease=lease)
        model.state, model.used_at = ("busy" if lease else "idle"), self.now
        model.turns = int(lease)
        self.held[id_] = False

    @rule(
        pick=st.integers(0, 20), outcome=st.sampled_from(["done", "done", "spare", "cut", "unused"])
    )
    def release(self, pick: int, outcome: str) -> None:
        """A turn ends, one way or another; releasing it again is refused."""
        busy = [id_ for id_, model in self.models.items() if model.state == "busy"]
        if not busy:
            return
        id_ = busy[pick % len(busy)]
        record, model = self.records[id_], self.models[id_]
        self.names += 1
        response_id = {"done": f"r{self.names}", "unused": model.response_id}.get(outcome)
        self.book.release(record, reusable=outcome != "cut", response_id=response_id, now=self.now)
        if outcome == "cut":
            del self.models[id_]
        else:
            if outcome == "done":
                model.turns_of_chain = model.turns_of_chain + 1 if self.held[id_] else 1
            elif outcome == "spare":
                model.turns_of_chain = 0
            model.state, model.response_id, model.used_at = "idle", response_id, self.now
        with pytest.raises(TransitionError):
            self.book.release(record, reusable=True, response_id=None, now=self.now)

    @rule(pick=st.integers(0, 20))
    def peer_closes(self, pick: int) -> None:
        """An idle connection ends by itself."""
        idle = [id_ for id_, model in self.models.items() if model.state == "idle"]
        if idle:
            id_ = idle[pick % len(idle)]
            self.book.closed(self.records[id_])
            del self.models[id_]

    @rule(principal=st.sampled_from(PRINCIPALS))
    def want_spare(self, principal: str) -> None:
        """A spare is opened when the book says so, and only within the limits."""
        if self.book.wants_spare(principal, self.now):
            assert not self.cap_is_reached(principal)
            spares = [id_ for id_, model in self.models.items() if model.kind == "spare"]
            assert principal not in {self.models[id_].principal for id_ in spares}
            self.enrol(self.book.open_spare(principal, self.now))

    @rule(seconds=st.sampled_from([0.5, 10.0, 301.0, 3000.0]))
    def wait(self, seconds: float) -> None:
        """Time goes by."""
        self.now += seconds

    @precondition(lambda self: self.models)
    @rule(alive=st.booleans())
    def sweep(self, alive: bool) -> None:
        """Whatever is closed was idle and overdue, or silent."""
        if alive:
            for record in self.records.values():
                record.last_inbound_at = self.now
        for record, action in self.book.sweep(self.now):
            model = self.models[record.id]
            assert not (alive and action is Action.CLOSE_SILENT)
            if action is Action.CLOSE_UNUSED:
                ttl_s = POLICY.nursery_ttl_s if model.kind == "nursing" else POLICY.idle_ttl_s
                assert self.now - model.used_at >= ttl_s
            if action in {Action.CLOSE_UNUSED, Action.CLOSE_EXPIRING}:
                assert model.state == "idle"
            if action.closes and model.state == "idle":
                del self.models[record.id]

    @invariant()
    def book_agrees_with_the_model(self) -> None:
        """The same connections in the same states, within the limits."""
        if not hasattr(self, "book"):
            return
        records = {record.id: record for record in self.book.records()}
        assert records.keys() == self.models.keys()
        for id_, model in self.models.items():
            record = records[id_]
            assert record.state.value == model.state
            assert record.response_id == model.response_id
            assert record.principal == model.principal
            if model.response_id is not None:
                assert record.continued == (model.turns_of_chain > 1)
        assert len(records) <= self.limits.max_total
        for principal in PRINCIPALS:
            assert self.count(principal) <= self.limits.max_per_principal
            earned = self.limits.handshake_burst + self.limits.handshakes_per_s * self.now
            assert self.handshakes[principal] <= earned + 1e-6
        kinds = [model.kind for model in self.models.values()]
        assert self.book.counts() == {
            "connecting": kinds.count("connecting"),
            "busy": kinds.count("busy"),
            "idle": kinds.count("nursing") + kinds.count("established"),
            "spare": kinds.count("spare"),
        }


LeaseMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestLeaseMachine = LeaseMachine.TestCase
