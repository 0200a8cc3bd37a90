"""
Plans, judged by a world that only sees their messages.

`Rig` does what the driver does, without I/O: it carries a plan out on a `World`, which rebuilds
the context from what it is sent, and checks that this is what the client sent. The probes are
histories that went wrong elsewhere; the machine at the end makes up its own (`TURNWIRE_FUZZ=1`
makes it go on for long).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
from builders import World, body, call, meaning, message, output, reasoning, user
from hypothesis import settings as profile
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from proxy.core.chains import ChainStore
from proxy.core.history import Answer, Gap, Head, MatchingPolicy, new_head
from proxy.core.items import Fingerprinter
from proxy.core.plan import Continue, FollowClient, PassThrough, Plan, Planner, Start
from proxy.core.reasons import Reason
from proxy.core.request import TurnRequest

if TYPE_CHECKING:
    from collections.abc import Callable

Items = list[dict[str, Any]]


@dataclass
class Held:
    """What a connection remembers, and for whom."""

    principal: str
    response_id: str
    busy: bool = False


@dataclass
class Turned:
    """One turn: its plan, the connection it went over, and the id of its answer."""

    plan: Plan
    connection: int | None = None
    response_id: str | None = None

    @property
    def reason(self) -> Reason:
        """Why the plan is what it is."""
        return self.plan.reason

    @property
    def delta(self) -> Items:
        """The new items that were sent."""
        assert isinstance(self.plan, Continue), self.plan
        return [json.loads(item.raw) for item in self.plan.delta]


def thoughts(items: Items) -> set[str]:
    """Return what the reasoning items among `items` say."""
    kept = [item for item in items if item.get("type") == "reasoning"]
    return set(meaning(kept, with_reasoning=True))


@dataclass
class Rig:
    """The core on top of a world, with a book of connections as simple as can be."""

    world: World = field(default_factory=World)
    policy: MatchingPolicy = field(default_factory=MatchingPolicy)
    max_message_bytes: int = 1_000_000
    now_s: float = 0.0
    max_bytes: int = 10_000_000

    def __post_init__(self) -> None:
        self.fingerprints = Fingerprinter(b"0123456789abcdef")
        self.store = ChainStore(
            seed=7, max_bytes=self.max_bytes, ttl_s=3600, timer=lambda: self.now_s
        )
        self.connections: dict[int, Held] = {}
        self.opened = 0
        self.planner = Planner(
            self.store, self.fingerprints, self.policy, self.held, self.max_message_bytes
        )

    def held(self, head: Head) -> Reason | None:
        """Say why a head's connection can't continue it, as the lease book does."""
        held = self.connections.get(head.connection_id)
        if held is None or held.principal != head.principal:
            return Reason.CONNECTION_LOST
        if held.response_id != head.response_id:
            return Reason.CHAIN_ADVANCED
        return Reason.CHAIN_BUSY if held.busy else None

    def lose(self, connection: int) -> None:
        """Close a connection."""
        self.connections.pop(connection, None)
        self.world.lose(connection)

    def turn(
        self, raw: bytes, answer: Items, principal: str = "p", *, exact: bool = True
    ) -> Turned:
        """Plan a body, carry the plan out, check the context, answer and record."""
        plan = self.planner.plan(principal, raw)
        if isinstance(plan, PassThrough):
            return Turned(plan)
        connection = self.connection_for(plan)
        context = self.world.receive(connection, self.message(plan))
        asked = json.loads(raw)
        if exact and not isinstance(plan, FollowClient):
            assert meaning(context) == meaning(asked["input"]), plan
            assert not thoughts(asked["input"]) - thoughts(context), plan
        self.check_settings(plan, asked)
        stored = asked.get("store") is not False
        name = self.world.answer(connection, context, answer, store=stored)
        self.connections[connection] = Held(principal, name)
        self.record(plan, name, answer, principal, connection)
        return Turned(plan, connection, name)

    def connection_for(self, plan: Start | Continue | FollowClient) -> int:
        """Return the connection that holds the head, or a new one."""
        if not isinstance(plan, Start) and self.held(plan.head) is None:
            return plan.head.connection_id
        self.opened += 1
        return self.opened

    @staticmethod
    def message(plan: Start | Continue | FollowClient) -> bytes:
        """Return what goes upstream."""
        match plan:
            case Continue(request, head, delta):
                return request.delta_message(head.response_id, delta)
            case FollowClient(request):
                return request.chained_message()
        return plan.request.full_message()

    def check_settings(self, plan: Start | Continue | FollowClient, asked: dict[str, Any]) -> None:
        """Check that every setting of the body is in the message, and nothing else is."""
        sent = json.loads(self.message(plan))
        ours = {"type", "input", "previous_response_id"}
        left = {"input", "previous_response_id", "stream"}
        assert {key: value for key, value in sent.items() if key not in ours} == {
            key: value for key, value in asked.items() if key not in left
        }

    def record(
        self,
        plan: Start | Continue | FollowClient,
        name: str,
        answer: Items,
        principal: str,
        connection: int,
    ) -> None:
        """Record the answer as the driver does."""
        raws = [json.dumps(item).encode() for item in answer]
        head = new_head(
            plan.request, Answer(name, raws, raws), principal=principal, connection_id=connection
        )
        assert head is not None
        chained = isinstance(plan, FollowClient)
        if chained:
            head.history = self.fingerprints.digest(b"chained", name.encode())
        parent = None if isinstance(plan, Start) else plan.head
        prefix = None if chained else plan.request.prefix()
        self.store.record(head, plan.request.body, prefix, parent)


U1, U2, U3 = user("first " + "x" * 300), user("second"), user("third")
A1, A2, A3 = message("one"), message("two", number=2), message("three", number=3)


def talked(rig: Rig, **settings: Any) -> Rig:
    """Return a rig after two turns of one conversation, on connection 1."""
    assert rig.turn(body(U1, **settings), [A1]).reason is Reason.NEW_CONVERSATION
    second = rig.turn(body(U1, A1, U2, **settings), [A2])
    assert second.reason is Reason.CONTINUED
    assert second.delta == [U2]
    return rig


# Probes: after [U1] -> A1 and [U1, A1, U2] -> A2 comes this; with `store: false` this reason, and
# with storage upstream this delta, or the reason why there is none.
PROBES: dict[str, tuple[Items, dict[str, Any], Reason, Items | Reason]] = {
    "continued": ([U1, A1, U2, A2, U3], {}, Reason.CONTINUED, [U3]),
    "retried": ([U1, A1, U2], {}, Reason.CHAIN_ADVANCED, [U2]),
    "rewound to the first turn": ([U1, A1, U3], {}, Reason.CHAIN_ADVANCED, [U3]),
    "begun again": ([U1], {}, Reason.REPEATED, Reason.REPEATED),
    "first message edited": (
        [U3, A1, U2, A2, U3],
        {},
        Reason.UNKNOWN_HISTORY,
        Reason.UNKNOWN_HISTORY,
    ),
    "second message edited": ([U1, A1, U3, A2, U3], {}, Reason.HISTORY_CHANGED, [U3, A2, U3]),
    "first answer edited": (
        [U1, A3, U2, A2, U3],
        {},
        Reason.HISTORY_CHANGED,
        Reason.HISTORY_CHANGED,
    ),
    "last answer edited": ([U1, A1, U2, A3, U3], {}, Reason.ANSWER_CHANGED, [U2, A3, U3]),
    "last answer dropped": ([U1, A1, U2, U3], {}, Reason.ANSWER_CHANGED, [U2, U3]),
    "all answers dropped": ([U1, U2, U3], {}, Reason.HISTORY_CHANGED, Reason.HISTORY_CHANGED),
    "a turn dropped": ([U1, A1, A2, U3], {}, Reason.HISTORY_CHANGED, [A2, U3]),
    "order changed": ([U2, A1, U1, A2, U3], {}, Reason.UNKNOWN_HISTORY, Reason.UNKNOWN_HISTORY),
    "message inserted in front": (
        [U3, U1, A1, U2, A2, U3],
        {},
        Reason.UNKNOWN_HISTORY,
        Reason.UNKNOWN_HISTORY,
    ),
    "nothing new": ([U1, A1, U2, A2], {}, Reason.NOTHING_NEW, [U2, A2]),
    "another conversation": ([U3], {}, Reason.NEW_CONVERSATION, Reason.NEW_CONVERSATION),
    "same opening, another way": ([U1, A3, U3], {}, Reason.HISTORY_CHANGED, Reason.HISTORY_CHANGED),
    "replaced by a summary": (
        [U1, {"type": "compaction", "encrypted_content": "x"}, U3],
        {},
        Reason.HISTORY_CHANGED,
        Reason.HISTORY_CHANGED,
    ),
    "compacted on the way": (
        [U1, A1, U2, A2, {"type": "compaction", "encrypted_content": "x"}, U3],
        {},
        Reason.UNSAFE_ITEM,
        Reason.UNSAFE_ITEM,
    ),
    "to be compacted": (
        [U1, A1, U2, A2, {"type": "compaction_trigger"}],
        {},
        Reason.UNSAFE_ITEM,
        Reason.UNSAFE_ITEM,
    ),
    "tools added on the way": (
        [U1, A1, U2, A2, {"type": "additional_tools", "tools": []}, U3],
        {},
        Reason.UNSAFE_ITEM,
        Reason.UNSAFE_ITEM,
    ),
    "other tools": (
        [U1, A1, U2, A2, U3],
        {"tools": []},
        Reason.CHANGED_TOOLS,
        Reason.CHANGED_TOOLS,
    ),
    "no tools": ([U1, A1, U2, A2, U3], {"tools": ...}, Reason.CHANGED_TOOLS, Reason.CHANGED_TOOLS),
    "other instructions": (
        [U1, A1, U2, A2, U3],
        {"instructions": "Sing."},
        Reason.CHANGED_INSTRUCTIONS,
        Reason.CHANGED_INSTRUCTIONS,
    ),
    "another model": (
        [U1, A1, U2, A2, U3],
        {"model": "m"},
        Reason.CHANGED_MODEL,
        Reason.CHANGED_MODEL,
    ),
    "more effort": (
        [U1, A1, U2, A2, U3],
        {"reasoning": {"effort": "high"}},
        Reason.CHANGED_SETTINGS,
        Reason.CHANGED_SETTINGS,
    ),
    "another temperature": ([U1, A1, U2, A2, U3], {"temperature": 1}, Reason.CONTINUED, [U3]),
    "not streamed": ([U1, A1, U2, A2, U3], {"stream": False}, Reason.CONTINUED, [U3]),
}


@pytest.mark.parametrize("spaced", [False, True], ids=["same bytes", "respelled"])
@pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES)
def test_history_safety(probe: tuple[Items, dict[str, Any], Reason, Any], *, spaced: bool) -> None:
    """Whatever a client does to its history, upstream sees it; the reason is the right one."""
    items, changes, unstored, stored = probe
    for store in (False, True):
        rig = talked(Rig(), store=store)
        raw = body(*items, **{"store": store, **changes})
        if spaced:
            raw = json.dumps(json.loads(raw), indent=1).encode()

        turned = rig.turn(raw, [A3])

        if store and isinstance(stored, list):
            assert turned.reason is Reason.CONTINUED
            assert turned.delta == stored
        else:
            assert turned.reason is (stored if store else unstored)
            assert isinstance(turned.plan, Continue) == (turned.reason is Reason.CONTINUED)


def test_two_conversations_with_one_opening() -> None:
    """Each finds its own chain by the answer that it got, however often they meet."""
    rig = Rig()
    rig.turn(body(U1), [A1])
    rig.turn(body(U1), [A2])

    for answer, connection in ((A1, 1), (A2, 2)):
        turned = rig.turn(body(U1, answer, U2), [A3])
        assert (turned.connection, turned.delta) == (connection, [U2])


def test_two_conversations_with_one_opening_and_one_answer() -> None:
    """Nothing tells them apart, so nothing depends on it: each gets a chain of its own."""
    rig = Rig()
    rig.turn(body(U1), [A1])
    rig.turn(body(U1), [A1])

    connections = {rig.turn(body(U1, A1, text), [A2]).connection for text in (U2, U3)}

    assert connections == {1, 2}


def test_many_runs_of_one_agent() -> None:
    """However many chains have the same history, the one that can be used is found, or a reason."""
    rig = Rig()
    for _ in range(30):
        rig.turn(body(U1), [A1])
    last = [rig.turn(body(U1, A1, U2), [A2]) for _ in range(30)]

    assert {turned.connection for turned in last} == set(range(1, 31))
    late = rig.turn(body(U1, A1, U3), [A2])
    assert (late.reason, late.connection) == (Reason.CHAIN_ADVANCED, 31)


def test_two_tails_of_one_history() -> None:
    """The first to come continues; the other one forks, in full, and goes on by itself."""
    rig = talked(Rig())
    history = [U1, A1, U2, A2]
    one = rig.turn(body(*history, user("left")), [A3])
    two = rig.turn(body(*history, user("right")), [A3])

    assert (one.connection, one.reason) == (1, Reason.CONTINUED)
    assert (two.connection, two.reason) == (2, Reason.CHAIN_ADVANCED)
    for side, turned in (("left", one), ("right", two)):
        further = rig.turn(body(*history, user(side), A3, U3), [A1])
        assert (further.connection, further.delta) == (turned.connection, [U3])


def test_a_busy_chain_never_waits() -> None:
    """A second turn on a chain that is being answered goes elsewhere, in full or from storage."""
    for store in (False, True):
        rig = talked(Rig(), store=store)
        rig.connections[1].busy = True
        turned = rig.turn(body(U1, A1, U2, A2, U3, store=store), [A3])

        assert turned.reason is (Reason.CONTINUED if store else Reason.CHAIN_BUSY)
        assert turned.connection == 2


def test_a_lost_connection() -> None:
    """What is not stored is sent again; what is stored is loaded on another connection."""
    for store in (False, True):
        rig = talked(Rig(), store=store)
        rig.lose(1)
        turned = rig.turn(body(U1, A1, U2, A2, U3, store=store), [A3])

        assert turned.reason is (Reason.CONTINUED if store else Reason.CONNECTION_LOST)
        assert turned.connection == 2


def test_ids_that_repeat_are_not_used_elsewhere() -> None:
    """Where every response of a connection has one id, it names nothing on another connection."""
    rig = talked(Rig(World(one_id=True)), store=True)
    assert not rig.store.ids_are_unique
    again = rig.turn(body(U1, A1, U2, store=True), [A3])
    assert (again.reason, again.connection) == (Reason.REPEATED, 2)

    rig.lose(1)
    turned = rig.turn(body(U1, A1, U2, A2, U3, store=True), [A3])

    assert isinstance(turned.plan, Start)


def test_another_principal_sees_nothing() -> None:
    """The same history under other credentials is one that nobody knows, and stays so."""
    rig = talked(Rig(), store=True)
    raw = body(U1, A1, U2, A2, U3, store=True)

    turned = rig.turn(raw, [A3], "q")
    assert (turned.reason, turned.connection) == (Reason.UNKNOWN_HISTORY, 2)

    assert rig.turn(body(U1, store=True), [A1], "r").reason is Reason.NEW_CONVERSATION
    stolen = rig.turn(body(U3, previous_response_id=turned.response_id), [A3], "p")
    assert stolen.reason is Reason.UNKNOWN_CHAIN


def test_a_forgotten_chain_costs_one_full_send() -> None:
    """When its time is up, a chain begins anew with the next turn."""
    rig = talked(Rig())
    rig.now_s = 4000

    assert rig.turn(body(U1, A1, U2, A2, U3), [A3]).reason is Reason.UNKNOWN_HISTORY
    assert rig.turn(body(U1, A1, U2, A2, U3, A3, U1), [A1]).delta == [U1]


def test_tool_loops_continue() -> None:
    """Calls, outputs and reasoning: the delta is the outputs, and only they."""
    rig = Rig()
    answer = [reasoning(1), message("Looking.", phase="commentary"), call(1), call(2)]
    rig.turn(body(U1), answer)

    turned = rig.turn(body(U1, *answer, output(1), output(2)), [A1])
    assert turned.delta == [output(1), output(2)]

    rig.turn(body(U3), answer)
    half = rig.turn(body(U3, *answer, output(1)), [A1])
    assert half.reason is Reason.CALL_UNANSWERED
    assert rig.turn(body(U3, *answer[:-1], output(1)), [A1]).reason is Reason.ANSWER_CHANGED


def test_policies_reach_the_matching() -> None:
    """What the operator allows is continued."""
    lenient = MatchingPolicy(ignore_changed_tools=True, ignore_dropped_text=True)
    rig = talked(Rig(policy=lenient))
    assert rig.turn(body(U1, A1, U2, A2, U3, tools=[]), [A1, call(1)]).delta == [U3]
    history = [U1, A1, U2, A2, U3, call(1), output(1)]
    assert rig.turn(body(*history, tools=[]), [A2], exact=False).delta == [output(1)]


def test_gaps_are_told_once() -> None:
    """A client that we fail to follow is counted once a turn, on whichever plan it ends."""
    rig = Rig()
    rig.turn(body(U1), [call(1)])

    turned = rig.turn(body(U1, {**call(1), "novel": 1}, output(1)), [A1])

    assert turned.reason is Reason.ANSWER_CHANGED
    assert turned.plan.gaps == (Gap(("novel",)),)


def test_a_history_that_fits_into_no_message() -> None:
    """It goes over HTTP; its delta does not, as long as that fits, with its settings."""
    rig = Rig(max_message_bytes=3000)
    large = user("y" * 2500)
    assert rig.turn(body(large), [A1]).reason is Reason.NEW_CONVERSATION
    assert rig.turn(body(large, A1, user("z" * 600)), [A2]).delta == [user("z" * 600)]
    history = [large, A1, user("z" * 600), A2]

    full = rig.turn(body(large, user("z" * 600)), [A1])
    assert isinstance(full.plan, PassThrough)
    assert full.reason is Reason.TOO_LARGE
    assert rig.turn(body(*history, user("y" * 2900)), [A1]).reason is Reason.TOO_LARGE
    small = rig.turn(body(*history, U3, metadata={"a": "m" * 2900}), [A1])
    assert small.reason is Reason.TOO_LARGE
    assert rig.turn(body(*history, U3), [A1]).delta == [U3]


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"{", Reason.UNPARSABLE),
        (b'{"input":"a","\\ud83d":1}', Reason.UNPARSABLE),
        (b'{"input":[{"type":5}]}', Reason.UNPARSABLE),
        (b'{"model":"m"}', Reason.NO_INPUT),
        (body(U1, background=True), Reason.BACKGROUND),
        (body(U1, conversation="c"), Reason.CONVERSATION),
        (body(U1, stream_id="s"), Reason.HTTP_ONLY_FIELD),
        (body(U3, previous_response_id="resp_9"), Reason.UNKNOWN_CHAIN),
        (body(U3, previous_response_id=""), Reason.UNKNOWN_CHAIN),
    ],
)
def test_what_is_left_to_http(raw: bytes, reason: Reason) -> None:
    """It passes through untouched, with the reason, whatever is known of the conversation."""
    plan = talked(Rig()).planner.plan("p", raw)

    assert isinstance(plan, PassThrough)
    assert plan.reason is reason


@pytest.mark.parametrize(
    "tail", [b',{"type":5}]}', b',{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}]}"]
)
def test_hostile_tails_of_known_bodies(tail: bytes) -> None:
    """What can't be read behind a known beginning is left to HTTP, without an exception."""
    rig = Rig()
    first = b'{"input":[' + json.dumps(U1).encode()
    rig.turn(first + b"]}", [A1])

    assert rig.planner.plan("p", first + tail).reason is Reason.UNPARSABLE


# Clients that chain by themselves.


def test_a_client_that_chains_is_followed_on_its_connection() -> None:
    """Its request goes as it is, where the response lives, and again where that one lives."""
    rig = Rig()
    first = rig.turn(body(U1), [A1])
    second = rig.turn(body(U2, previous_response_id=first.response_id), [A2])
    third = rig.turn(body(U3, previous_response_id=second.response_id), [A3])

    for turned in (second, third):
        assert isinstance(turned.plan, FollowClient)
        assert (turned.reason, turned.connection) == (Reason.CLIENT_CHAINED, 1)
    assert meaning(rig.world.contexts[1, str(third.response_id)]) == meaning(
        [U1, A1, U2, A2, U3, A3]
    )
    late = rig.turn(body(U3, previous_response_id=first.response_id), [A3])
    assert late.reason is Reason.UNKNOWN_CHAIN


def test_a_chained_turn_is_nobodys_history() -> None:
    """What it sent is only the end of what upstream holds: no full history meets it."""
    rig = Rig()
    first = rig.turn(body(U1), [A1])
    rig.turn(body(U2, previous_response_id=first.response_id), [A2])

    turned = rig.turn(body(U2, A2, U3), [A3])

    assert isinstance(turned.plan, Start)
    assert turned.reason is Reason.UNKNOWN_HISTORY


def test_a_stored_response_that_a_client_names_is_left_to_http() -> None:
    """HTTP knows every stored response as well; only a connection that has it is better."""
    rig = Rig()
    first = rig.turn(body(U1, store=True), [A1])
    rig.lose(1)

    turned = rig.turn(body(U2, store=True, previous_response_id=first.response_id), [A2])

    assert turned.reason is Reason.UNKNOWN_CHAIN


# Any conversations, in any order.


def shortened(item: dict[str, Any]) -> dict[str, Any]:
    """Echo an item as a thrifty client does."""
    made = {key: value for key, value in item.items() if key not in ("id", "status")}
    if made.get("role") == "assistant":
        return {"role": "assistant", "content": made["content"][0]["text"]}
    return made


def respelled(item: dict[str, Any]) -> dict[str, Any]:
    """Echo an item with everything that may be spelled anew spelled anew."""
    made = {**dict(reversed(item.items())), "novel": None}
    if "arguments" in made:
        made["arguments"] = json.dumps(json.loads(made["arguments"]), indent=1)
    return made


STYLES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "verbatim": lambda item: item,
    "shortened": shortened,
    "respelled": respelled,
}


@dataclass(frozen=True)
class Talk:
    """A conversation as its client keeps it."""

    principal: str
    items: tuple[dict[str, Any], ...]
    stored: bool
    style: str
    keeps_reasoning: bool
    indent: int | None

    @property
    def raw(self) -> bytes:
        """The body that the client sends next."""
        asked = json.loads(body(*self.items, store=self.stored))
        return json.dumps(asked, indent=self.indent).encode()

    def answered(self, answer: Items) -> Talk:
        """Return the conversation with the client's echo of an answer."""
        kept = [item for item in answer if self.keeps_reasoning or item["type"] != "reasoning"]
        return replace(self, items=self.items + tuple(STYLES[self.style](item) for item in kept))

    def extended(self, *items: dict[str, Any]) -> Talk:
        """Return the conversation with more items."""
        return replace(self, items=self.items + items)

    @property
    def open_calls(self) -> list[int]:
        """The numbers of the calls that wait for their output."""
        numbers = {"function_call": set[int](), "function_call_output": set[int]()}
        for item in self.items:
            if "call_id" in item:
                numbers[item["type"]].add(int(item["call_id"].removeprefix("call_")))
        return sorted(numbers["function_call"] - numbers["function_call_output"])


@dataclass(frozen=True)
class Kept:
    """A response that a connection could continue, if what follows allows it."""

    principal: str
    stored: bool
    context: tuple[str, ...]
    connection: int
    response_id: str
    ends_with: frozenset[str]
    thoughts: frozenset[str]


class Core(RuleBasedStateMachine):
    """Makes up conversations of several principals, and asks the world after every turn."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(max_bytes=60_000)
        self.talks: list[Talk] = []
        self.kept: list[Kept] = []
        self.number = 0

    @rule(
        principal=st.sampled_from("pq"),
        opening=st.sampled_from(["a", "b"]),
        stored=st.booleans(),
        style=st.sampled_from(sorted(STYLES)),
        keeps_reasoning=st.booleans(),
        indent=st.sampled_from([None, 1]),
    )
    def open(self, opening: str, **traits: Any) -> None:
        """Begin a conversation, often with the opening of another one."""
        self.talks.append(Talk(items=(user(opening * 300),), **traits))

    @precondition(lambda self: self.talks)
    @rule(index=st.integers(0, 20), kind=st.sampled_from(["text", "calls", "thought", "mixed"]))
    def ask(self, index: int, kind: str) -> None:
        """Send a conversation and take its answer; the same answer may come in many places."""
        talk = self.talks[index % len(self.talks)]
        expected = self.best(talk)
        answer = self.answer(kind)
        turned = self.rig.turn(talk.raw, answer, talk.principal)
        if expected:
            assert isinstance(turned.plan, Continue), (turned.plan, talk, expected)
            assert turned.plan.head.item_count >= 1
            rest = meaning(list(talk.items))[max(len(kept.context) for kept in expected) :]
            assert meaning(turned.delta) == rest
        assert turned.connection is not None
        assert turned.response_id is not None
        told = talk.answered(answer)
        pending = frozenset(item["call_id"] for item in answer if "call_id" in item)
        self.kept.append(
            Kept(
                talk.principal,
                talk.stored,
                tuple(meaning([*talk.items, *answer])),
                turned.connection,
                turned.response_id,
                pending,
                frozenset(thoughts(self.rig.world.contexts[turned.connection, turned.response_id])),
            )
        )
        self.talks[index % len(self.talks)] = self.react(told)

    def answer(self, kind: str) -> Items:
        """Return an answer; texts repeat, calls and sealed reasoning do not."""
        self.number += 1
        number = self.number
        calls = [call(number), call(number + 1000, '{"n": 1.50, "a": "\u00e9"}')]
        return {
            "text": [message("fine", number=number)],
            "calls": calls,
            "thought": [reasoning(number), message("fine", number=number)],
            "mixed": [reasoning(number), message("so", number=number), *calls],
        }[kind]

    def react(self, talk: Talk) -> Talk:
        """Return the conversation with the outputs of its open calls, or with a new question."""
        opened = talk.open_calls
        if opened:
            return talk.extended(*(output(number) for number in opened))
        return talk.extended(user("and then"))

    @precondition(lambda self: self.talks)
    @rule(index=st.integers(0, 20), cut=st.integers(1, 6))
    def fork(self, index: int, cut: int) -> None:
        """Go back to an earlier point and say something else, beside the old conversation."""
        talk = self.talks[index % len(self.talks)]
        items = talk.items[: max(1, len(talk.items) - cut)]
        self.talks.append(self.react(replace(talk, items=items)))

    @precondition(lambda self: self.talks)
    @rule(index=st.integers(0, 20), place=st.integers(0, 10))
    def edit(self, index: int, place: int) -> None:
        """Change one message of the client's own, anywhere in the history."""
        talk = self.talks[index % len(self.talks)]
        own = [i for i, item in enumerate(talk.items) if item.get("role") == "user"]
        chosen = own[place % len(own)]
        changed = user(f"edited {place}")
        self.talks[index % len(self.talks)] = replace(
            talk, items=(*talk.items[:chosen], changed, *talk.items[chosen + 1 :])
        )

    @precondition(lambda self: self.rig.connections)
    @rule(index=st.integers(0, 20))
    def lose(self, index: int) -> None:
        """Close a connection."""
        names = sorted(self.rig.connections)
        self.rig.lose(names[index % len(names)])

    @rule(seconds=st.sampled_from([10, 4000]))
    def wait(self, seconds: int) -> None:
        """Let time pass."""
        self.rig.now_s += seconds

    def best(self, talk: Talk) -> list[Kept]:
        """Return the responses that the longest possible delta could follow."""
        said = tuple(meaning(list(talk.items)))
        usable = [kept for kept in self.kept if self.could_continue(kept, talk, said)]
        longest = max((len(kept.context) for kept in usable), default=0)
        return [kept for kept in usable if len(kept.context) == longest]

    def could_continue(self, kept: Kept, talk: Talk, said: tuple[str, ...]) -> bool:
        """Tell whether a delta could follow a response, for all that the world knows."""
        rest = said[len(kept.context) :]
        if (kept.principal, kept.stored) != (talk.principal, talk.stored) or not rest:
            return False
        if said[: len(kept.context)] != kept.context:
            return False
        if self.rig.store.head_of(kept.principal, kept.response_id) is None:
            return False  # evicted, expired or outgrown
        delta = self.tail(talk, len(rest))
        before = list(talk.items[: len(talk.items) - len(delta)])
        if thoughts(delta) or not thoughts(before) <= kept.thoughts:
            return False  # upstream would not see what the client kept
        if not kept.ends_with <= {item.get("call_id") for item in delta}:
            return False
        held = self.rig.connections.get(kept.connection)
        return kept.stored or (held is not None and held.response_id == kept.response_id)

    @staticmethod
    def tail(talk: Talk, count: int) -> Items:
        """Return the last items of a conversation of which `count` are no reasoning."""
        found: Items = []
        for item in reversed(talk.items):
            if item.get("type") != "reasoning":
                if not count:
                    break
                count -= 1
            found.append(item)
        return found

    @invariant()
    def memory_is_bounded(self) -> None:
        """The store keeps its budget, whatever the conversations do."""
        assert self.rig.store.size_bytes <= 60_000


TestCore = Core.TestCase
TestCore.__doc__ = "The whole core under any conversations."
TestCore.settings = profile(
    max_examples=2_000 if os.environ.get("TURNWIRE_FUZZ") else 60,
    stateful_step_count=30,
    deadline=None,
)


def test_the_rig_carries_requests() -> None:
    """A plan that goes upstream has the request that it was made for."""
    turned = Rig().turn(body(U1), [A1])

    assert isinstance(turned.plan, Start)
    assert isinstance(turned.plan.request, TurnRequest)
