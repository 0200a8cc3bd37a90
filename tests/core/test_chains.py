"""The store of heads against a dict: whatever is done to it, its indexes agree with each other."""

from __future__ import annotations

from dataclasses import replace

from builders import body, message, user
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from proxy.core.chains import LINEAGE_KEPT, ChainStore
from proxy.core.history import Answer, Head, new_head
from proxy.core.items import Fingerprinter
from proxy.core.request import Frame, Prefix, TurnRequest, parse_body

FINGERPRINTS = Fingerprinter(b"0123456789abcdef")
TTL_S = 100.0


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now_s


FRAMES: dict[Head, Frame] = {}


def make_store(max_bytes: int = 1_000_000, clock: Clock | None = None) -> ChainStore:
    """Return an empty store with a clock of its own."""
    return ChainStore(seed=7, max_bytes=max_bytes, ttl_s=TTL_S, timer=clock or Clock())


def prefixes(store: ChainStore, principal: str, raw: bytes) -> list[Prefix]:
    """Return all known beginnings of a body, longest first."""
    return list(store.prefixes(principal, store.walk(raw)))


def make_head(
    name: str, raw: bytes, principal: str = "p", like: Head | None = None
) -> tuple[Head, Prefix]:
    """Return a head that answers a body, in the frame of the one that `like` answered."""
    request = parse_body(raw, FINGERPRINTS.root(principal), FINGERPRINTS)
    assert isinstance(request, TurnRequest)
    if like is not None:
        frame = FRAMES[like]
        assert frame.envelope is not None
        request = replace(request, frame=frame, envelope=frame.envelope)
    answer = Answer(name, (), ())
    head = new_head(request, answer, principal=principal, connection_id=1)
    assert head is not None
    prefix = request.prefix()
    assert prefix is not None
    FRAMES[head] = prefix.frame
    return head, prefix


def record(
    store: ChainStore, name: str, raw: bytes, principal: str = "p", like: Head | None = None
) -> Head:
    """Record a head for a body and return it; it continues `like`."""
    head, prefix = make_head(name, raw, principal, like)
    store.record(head, raw, prefix, like)
    return head


FIRST = body(user("a"))
SECOND = body(user("a"), message("b"), user("c"))


def test_a_head_is_found_by_bytes_history_and_id() -> None:
    """All ways lead to the same head, for its own principal only."""
    store = make_store()
    head = record(store, "resp_1", FIRST)

    assert [prefix.history for prefix in prefixes(store, "p", SECOND)] == [head.history]
    assert list(store.heads_at(head.history)) == [head]
    assert store.head_of("p", "resp_1") is head
    assert not prefixes(store, "q", SECOND)
    assert store.head_of("q", "resp_1") is None
    assert not list(store.heads_at(FINGERPRINTS.root("q")))
    assert len(store) == 1


def test_heads_of_one_history_come_newest_first() -> None:
    """Parallel runs of one agent share their opening."""
    store = make_store()
    heads = [record(store, f"resp_{number}", FIRST) for number in range(3)]

    assert list(store.heads_at(heads[0].history)) == heads[::-1]


def test_a_repeated_id_names_the_latest_response() -> None:
    """The older head is forgotten, and ids are not trusted away from their connection any more."""
    store = make_store()
    older = record(store, "resp_1", FIRST)
    assert store.ids_are_unique
    elsewhere = record(store, "resp_1", FIRST, principal="q")
    assert store.ids_are_unique

    newer = record(store, "resp_1", SECOND)

    assert not store.ids_are_unique
    assert store.head_of("p", "resp_1") is newer
    assert not list(store.heads_at(older.history))
    assert store.head_of("q", "resp_1") is elsewhere


def test_an_id_taken_by_an_answer_that_makes_no_head() -> None:
    """The head that had the id is not what the connection holds any more."""
    store = make_store()
    record(store, "resp_1", FIRST)

    store.outdate("q", "resp_1")
    store.outdate("p", "resp_2")
    assert store.head_of("p", "resp_1")
    assert store.ids_are_unique

    store.outdate("p", "resp_1")
    assert store.head_of("p", "resp_1") is None
    assert not store.ids_are_unique


def test_forgetting() -> None:
    """A forgotten head is nowhere; forgetting twice, or its namesake, is no error."""
    store = make_store()
    head = record(store, "resp_1", FIRST)
    namesake, _ = make_head("resp_1", FIRST)

    store.forget(namesake)
    assert store.head_of("p", "resp_1") is head

    for _ in range(2):
        store.forget(head)
        assert store.head_of("p", "resp_1") is None
        assert not list(store.heads_at(head.history))
        assert not prefixes(store, "p", SECOND)
        assert (len(store), store.size_bytes) == (0, 0)


def test_a_head_is_gone_when_its_time_is_up() -> None:
    """Expiry takes a head out of every index, at the latest when it is looked for."""
    clock = Clock()
    store = make_store(clock=clock)
    head = record(store, "resp_1", FIRST)
    clock.now_s = TTL_S

    assert store.head_of("p", "resp_1") is None
    assert not list(store.heads_at(head.history))
    assert not prefixes(store, "p", SECOND)
    assert store.size_bytes == 0


def test_forgetting_a_head_whose_time_is_up() -> None:
    """It may be asked for before anybody noticed that the time was up."""
    clock = Clock()
    store = make_store(clock=clock)
    head = record(store, "resp_1", FIRST)
    clock.now_s = TTL_S

    store.forget(head)

    assert store.head_of("p", "resp_1") is None
    assert store.size_bytes == 0
    record(store, "resp_2", FIRST)
    assert len(store) == 1


def test_what_exceeds_the_store_is_not_held() -> None:
    """A head that is larger than the whole budget leaves no trace, nor do its settings."""
    store = make_store(max_bytes=1000)
    record(store, "resp_1", FIRST)
    assert (len(store), store.size_bytes) == (0, 0)
    assert not prefixes(store, "p", SECOND)

    store = make_store(max_bytes=5000)
    record(store, "resp_1", body(user("a"), instructions="x" * 9000))
    assert (len(store), store.size_bytes) == (0, 0)
    assert store.head_of("p", "resp_1") is None


def test_the_oldest_head_makes_room() -> None:
    """The budget holds, and who came first goes first."""
    store = make_store(max_bytes=20_000)
    for number in range(50):
        record(store, f"resp_{number}", body(user(f"question {number}")))
        assert store.size_bytes <= 20_000

    kept = [number for number in range(50) if store.head_of("p", f"resp_{number}")]
    assert kept == list(range(50 - len(kept), 50))
    assert kept


def test_settings_are_counted_as_long_as_anybody_holds_them() -> None:
    """The turns of a chain share their settings: counted once, also when the first turn is gone."""
    store = make_store()
    large = body(user("a"), instructions="x" * 50_000)
    first = record(store, "resp_1", large)
    alone = store.size_bytes
    second = record(store, "resp_2", large, like=first)
    assert store.size_bytes - alone < 2000

    store.forget(first)
    assert store.size_bytes > 100_000

    store.forget(second)
    assert store.size_bytes == 0


def test_a_chain_keeps_its_last_heads() -> None:
    """What no retry can need goes with the chain's growth; a response that is stored stays."""
    for stored in (False, True):
        store, head = make_store(), None
        items = [user("a")]
        for number in range(10):
            head = record(store, f"resp_{number}", body(*items, store=stored), like=head)
            items += [message(f"b{number}"), user(f"c{number}")]

        kept = [number for number in range(10) if store.head_of("p", f"resp_{number}")]
        assert kept == list(range(0 if stored else 10 - LINEAGE_KEPT, 10))
        assert len(prefixes(store, "p", body(*items))) == LINEAGE_KEPT


BODIES = [
    body(*[user(f"{start} {n}") for n in range(1 + count)]) for start in "ab" for count in range(3)
]


class Store(RuleBasedStateMachine):
    """Does anything to a store in any order, and keeps a dict beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store = make_store(12_000, self.clock)
        self.model: dict[tuple[str, str], tuple[Head, bytes, float]] = {}
        self.known: list[Head] = []

    def sync(self) -> None:
        """Drop from the model what the store let go for lack of room: always its oldest."""
        for key in list(self.model):
            if self.store.head_of(*key) is not None:
                break
            del self.model[key]

    @rule(
        number=st.integers(0, 9),
        principal=st.sampled_from("pq"),
        raw=st.sampled_from(BODIES),
        parent=st.none() | st.integers(0, 30),
    )
    def record(self, number: int, principal: str, raw: bytes, parent: int | None) -> None:
        """Record a head, now and then with an id that was there before."""
        own = [head for head in self.known if head.principal == principal]
        like = own[parent % len(own)] if own and parent is not None else None
        name = f"resp_{number}"
        head, prefix = make_head(name, raw, principal, like)
        head.stored = True  # so that nothing is thinned out, which has a test of its own
        self.model.pop((principal, name), None)
        self.store.record(head, raw, prefix, like)
        self.model[principal, name] = (head, raw, self.clock.now_s)
        self.known.append(head)
        self.sync()

    @precondition(lambda self: self.known)
    @rule(index=st.integers(0, 30))
    def forget(self, index: int) -> None:
        """Forget a head that is held, or was."""
        head = self.known[index % len(self.known)]
        key = (head.principal, head.response_id)
        self.store.forget(head)
        if key in self.model and self.model[key][0] is head:
            del self.model[key]

    @rule(seconds=st.sampled_from([1.0, TTL_S / 2, TTL_S]))
    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.now_s += seconds
        self.model = {
            key: row for key, row in self.model.items() if self.clock.now_s < row[2] + TTL_S
        }

    @invariant()
    def budget_holds(self) -> None:
        """The bytes are within the budget, and there are some just when there are heads."""
        assert self.store.size_bytes <= 12_000
        assert (len(self.store) > 0) == (self.store.size_bytes > 0)

    @invariant()
    def indexes_agree(self) -> None:
        """Every way to look something up gives what the dict gives."""
        heads = [head for head, _, _ in self.model.values()]
        assert len(self.store) == len(heads)
        for head in self.known:
            found = self.store.head_of(head.principal, head.response_id)
            assert (found is head) == (head in heads)
            assert (head in list(self.store.heads_at(head.history))) == (head in heads)
        for head, raw, _ in self.model.values():
            for prefix in prefixes(self.store, head.principal, raw):
                assert any(
                    other.history == prefix.history and other.principal == head.principal
                    for other in heads
                )

    def teardown(self) -> None:
        """Nothing is left behind when every head is forgotten."""
        for head in self.known:
            self.store.forget(head)
        assert (len(self.store), self.store.size_bytes) == (0, 0)
        inner = (self.store._by_history, self.store._by_response, self.store._frame_users)
        assert not any(inner)
        assert len(self.store._prefixes) == 0


TestStore = Store.TestCase
TestStore.__doc__ = "The store under any order of events."
TestStore.settings = profile(max_examples=25, stateful_step_count=25, deadline=None)
