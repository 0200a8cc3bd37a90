"""
Histories that are not what they were: each goes through the real proxy, and upstream must see it.

Every other proxy of this kind that could be tested gets some of these wrong: it sends new items
after a response that the client's history does not contain. Here each case ends with the same
check: the context that the simulator held is the history that the client sent.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import aiohttp
import pytest
from harness import play, stack

from proxy.simulator import AnswerOptions, SimulatorOptions
from proxy.simulator.agent import user
from proxy.simulator.faults import Break, EndIncomplete, SlowStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness import Stack

    from proxy.simulator.agent import Reply
    from proxy.simulator.wire import Item

STORES = (False, True)
TALKATIVE = SimulatorOptions(answers=AnswerOptions(rounds=0))  # calls tools only when told to
READ = {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}}


@dataclass
class Talk:
    """A conversation of three answers: `history`, and the replies so far."""

    stack: Stack
    store: bool
    history: list[Item] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)

    async def begin(self) -> Talk:
        """Hold the conversation: a tool call, its answer, and one more question."""
        self.agent = self.stack.agent(settings={"store": self.store})
        for item in (user("[calls=1] Look."), user("And?"), user("Why?")):
            while True:
                self.history.append(item)
                reply = await self.send()
                self.history.extend(reply.items)
                if not reply.calls:
                    break
                (item,) = self.agent.answer_calls(reply.items)
        assert [reply.mode for reply in self.replies] == ["full", "delta", "delta", "delta"]
        return self

    async def send(self, history: list[Item] | None = None, **settings: object) -> Reply:
        """Send a history, by default the conversation's, and check what upstream made of it."""
        kept = self.agent.settings
        self.agent.settings = {**kept, **settings}
        reply = await self.agent.send(self.history if history is None else history)
        self.agent.settings = kept
        self.replies.append(reply)
        self.stack.check_contexts([reply])
        return reply


def places(history: list[Item], role: str) -> list[int]:
    """Return where the messages of a role are."""
    return [place for place, item in enumerate(history) if item.get("role") == role]


def rewound(history: list[Item]) -> list[Item]:
    """Go back to the second question and ask another one there."""
    return [*history[: places(history, "user")[1]], user("Something else?")]


def old_message_edited(history: list[Item]) -> list[Item]:
    """Change the first question."""
    return [user("[calls=1] Look again."), *history[1:], user("Next?")]


def middle_message_edited(history: list[Item]) -> list[Item]:
    """Change the second question, and keep all that came after it."""
    edited = [*history, user("Next?")]
    edited[places(history, "user")[1]] = user("Or?")
    return edited


def tool_output_edited(history: list[Item]) -> list[Item]:
    """Change what a tool had said."""
    changed = [
        {**item, "output": "nothing"} if item.get("type") == "function_call_output" else item
        for item in history
    ]
    return [*changed, user("Next?")]


def last_answer_edited(history: list[Item]) -> list[Item]:
    """Change a word of the last answer."""
    return [*history[:-1], {"role": "assistant", "content": "No."}, user("Next?")]


def last_answer_dropped(history: list[Item]) -> list[Item]:
    """Ask again after the last question, as if it had not been answered."""
    return [*history[: places(history, "user")[-1] + 1], user("Next?")]


def old_answer_dropped(history: list[Item]) -> list[Item]:
    """Leave the first answer out."""
    first = places(history, "assistant")[0]
    return [*history[:first], *history[first + 1 :], user("Next?")]


def item_inserted(history: list[Item]) -> list[Item]:
    """Put a message at the front."""
    return [{"role": "developer", "content": "Be brief."}, *history, user("Next?")]


def items_swapped(history: list[Item]) -> list[Item]:
    """Swap two questions."""
    one, other = places(history, "user")[1:3]
    swapped = [*history, user("Next?")]
    swapped[one], swapped[other] = swapped[other], swapped[one]
    return swapped


def compacted_by_client(history: list[Item]) -> list[Item]:
    """Put a summary in the place of everything but the last exchange."""
    return [user("Summary: looked, and asked."), *history[places(history, "user")[-1] :], user("?")]


CHAIN = "chain_advanced"
HISTORY = "history_changed"
UNKNOWN = "unknown_history"  # nothing of it is where it was
ANSWER = "answer_changed"
CHANGES = [
    (rewound, CHAIN),
    (old_message_edited, UNKNOWN),
    (middle_message_edited, HISTORY),
    (tool_output_edited, HISTORY),
    (last_answer_edited, ANSWER),
    (last_answer_dropped, ANSWER),
    (old_answer_dropped, HISTORY),
    (item_inserted, UNKNOWN),
    (items_swapped, HISTORY),
    (compacted_by_client, UNKNOWN),
]
# Where the changed history begins with a stored one, upstream may load that by its id.
HYDRATED = {rewound, last_answer_dropped}


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("change", "reason"), CHANGES)
async def test_a_changed_history_is_what_upstream_sees(
    store: bool, change: Callable[[list[Item]], list[Item]], reason: str
):
    """Whatever the client changed, upstream answers the changed history and the reason says why."""
    async with stack(sim=TALKATIVE) as s:
        talk = await Talk(s, store).begin()

        reply = await talk.send(change(talk.history))

        is_hydrated = store and change in HYDRATED
        expected = ("delta", "continued") if is_hydrated else ("full", reason)
        assert (reply.mode, reply.reason) == expected
        # What was there before still is: the untouched conversation goes on as if nothing was.
        untouched = await talk.send([*talk.history, user("Untouched?")])
        assert untouched.mode == "delta"


SETTINGS = [
    ({"tools": [READ]}, "changed_tools"),
    ({"tools": None}, "changed_tools"),
    ({"instructions": "You are quick."}, "changed_instructions"),
    ({"instructions": None}, "changed_instructions"),
    ({"model": "gpt-6"}, "changed_model"),
    ({"reasoning": {"effort": "high"}}, "changed_settings"),
    ({"text": {"format": {"type": "json_object"}}}, "changed_settings"),
    ({"truncation": "auto"}, "changed_settings"),
    ({"prompt_cache_key": "other"}, "changed_settings"),
    ({"service_tier": "flex"}, "changed_settings"),
]


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(("settings", "reason"), SETTINGS)
async def test_changed_settings_send_the_whole_history(
    store: bool, settings: dict[str, object], reason: str
):
    """Other settings are another chain; with them, and back with the old ones, it continues."""
    async with stack(sim=TALKATIVE) as s:
        talk = await Talk(s, store).begin()

        changed = await talk.send([*talk.history, user("Next?")], **settings)
        history = [*talk.history, user("Next?"), *changed.items, user("And?")]
        followed = await talk.send(history, **settings)
        back = await talk.send([*talk.history, user("Untouched?")])

        assert (changed.mode, changed.reason) == ("full", reason)
        assert followed.mode == back.mode == "delta"


PER_RESPONSE = [
    {"tool_choice": "none"},
    {"parallel_tool_calls": False},
    {"max_output_tokens": 2000},
    {"temperature": 0.5, "top_p": 0.9},
    {"metadata": {"turn": "4"}},
    {"include": ["reasoning.encrypted_content"]},
    {"user": "someone", "safety_identifier": "else"},
    {"stream": False},
]


@pytest.mark.parametrize("settings", PER_RESPONSE)
async def test_settings_of_one_response_do_not_end_a_chain(settings: dict[str, object]):
    """What steers this response only is sent again anyway, and may differ within a chain."""
    async with stack(sim=TALKATIVE) as s:
        talk = await Talk(s, store=False).begin()

        reply = await talk.send([*talk.history, user("Next?")], **settings)

        assert (reply.mode, reply.reason) == ("delta", "continued")


async def test_changed_tools_may_continue_if_so_configured():
    """With `changed_tools = continue`, other tools go out with a delta."""
    async with stack(sim=TALKATIVE, matching={"changed_tools": "continue"}) as s:
        talk = await Talk(s, store=False).begin()

        reply = await talk.send([*talk.history, user("[calls=1] Next?")], tools=[READ])

        assert reply.mode == "delta"
        assert [call["name"] for call in reply.calls] == ["read"]


@pytest.mark.parametrize("store", STORES)
async def test_two_conversations_with_one_opening_stay_apart(store: bool):
    """Two conversations that begin alike, word for word, go on each by itself, by deltas."""
    async with stack(sim=TALKATIVE) as s:
        agents = [s.agent(settings={"store": store}) for _ in range(2)]
        histories: list[list[Item]] = [[], []]
        replies = []
        for prompt in ("Hello.", "[calls=2] Same.", None, None):
            for number, (agent, history) in enumerate(zip(agents, histories, strict=True)):
                text = prompt or f"Now {number}."
                replies.append(await play(agent, history, user(text)))
            if prompt and replies[-1].calls:
                for agent, history in zip(agents, histories, strict=True):
                    while (reply := await agent.send(history)).calls:
                        history.extend([*agent.echo(reply.items), *agent.answer_calls(reply.items)])
                        replies.append(reply)
                    history.extend(agent.echo(reply.items))
                    replies.append(reply)

        s.check_contexts(replies)
        full = [reply.reason for reply in replies if reply.mode != "delta"]
        assert full == ["new_conversation", "repeated"]


@pytest.mark.parametrize("store", STORES)
async def test_two_parallel_tails_of_one_history_do_not_mix(store: bool):
    """Two requests that extend one answer at one time each get the answer to their own."""
    async with stack(sim=TALKATIVE) as s:
        talk = await Talk(s, store).begin()
        s.sim.faults.arm(SlowStream(times=2, gap_ms=2))

        tails = [[*talk.history, user(f"Tail {number}.")] for number in range(2)]
        first = await asyncio.gather(*map(talk.send, tails))
        tails = [
            [*tail, *reply.items, user("On?")] for tail, reply in zip(tails, first, strict=True)
        ]
        second = await asyncio.gather(*map(talk.send, tails))

        modes = {(reply.mode, reply.reason) for reply in first}
        other = ("delta", "continued") if store else ("full", "chain_busy")
        assert modes == {("delta", "continued"), other}
        assert [reply.mode for reply in second] == ["delta", "delta"]
        assert len({s.seen_for(reply).connection for reply in first}) == 2


@pytest.mark.parametrize("store", STORES)
async def test_a_retry_of_a_turn_answers_the_same_history(store: bool):
    """The same body again is answered again, and either answer may be continued."""
    async with stack(sim=TALKATIVE) as s:
        talk = await Talk(s, store).begin()
        last = talk.replies[-1]

        again = await talk.agent.post(last.body)

        s.check_contexts([again])
        assert again.answer == last.answer
        assert again.mode == ("delta" if store else "full")
        for items in (last.items, again.items):
            history = [*talk.history[: -len(last.items)], *items, user(f"After {items[0]['id']}?")]
            assert (await talk.send(history)).mode == "delta"


COMPACTION = {"type": "compaction_trigger"}


@pytest.mark.parametrize("store", STORES)
async def test_a_compaction_is_sent_with_the_whole_history(store: bool):
    """A request to compact, a compacted history, and what follows it never lean on a chain."""
    async with stack(sim=TALKATIVE) as s:
        talk = await Talk(s, store).begin()

        asked = await talk.send([*talk.history, COMPACTION])
        after = await talk.send([*talk.history, COMPACTION, *asked.items, user("On?")])
        blob = asked.items[0].get("encrypted_content") or "sealed"
        compacted = [{"type": "compaction", "encrypted_content": blob}, user("On?")]
        begun = await talk.send(compacted)
        inside = await talk.send([*talk.history, *compacted])
        followed = await talk.send([*compacted, *begun.items, user("And?")])

        assert [reply.mode for reply in (asked, after, begun, inside)] == ["full"] * 4
        assert after.reason == "compacted"
        assert followed.mode in {"full", "delta"}


async def test_an_incomplete_answer_is_not_continued():
    """Upstream keeps no incomplete response: the next turn is full, the one after it a delta."""
    async with stack(sim=TALKATIVE) as s:
        talk = await Talk(s, store=False).begin()
        s.sim.faults.arm(EndIncomplete())
        talk.history.append(user("Next?"))
        incomplete = await talk.send()
        assert incomplete.response is not None
        assert incomplete.response["status"] == "incomplete"
        talk.history.extend([*incomplete.items, user("Go on.")])

        after = await talk.send()
        talk.history.extend([*after.items, user("And on.")])
        later = await talk.send()

        assert [reply.mode for reply in (after, later)] == ["full", "delta"]


async def test_a_lost_reply_leaves_the_history_as_the_client_has_it():
    """After an answer that broke off, the client's retry and its next turns are right."""
    async with stack(sim=TALKATIVE) as s:
        talk = await Talk(s, store=False).begin()
        s.sim.faults.arm(Break(after_events=5))
        talk.history.append(user("Next?"))
        with pytest.raises(aiohttp.ClientPayloadError):
            await talk.agent.send(talk.history)

        retried = await talk.send()
        talk.history.extend([*retried.items, user("And?")])
        later = await talk.send()

        assert [reply.mode for reply in (retried, later)] == ["full", "delta"]


@pytest.mark.parametrize("store", STORES)
async def test_references_to_items_are_resolved_or_refused_as_over_http(store: bool):
    """An `item_reference` to the last answer continues the chain; to anything else it is sent."""
    async with stack(sim=TALKATIVE) as s:
        talk = await Talk(s, store).begin()
        answer = talk.replies[-1].items
        references = [{"type": "item_reference", "id": item["id"]} for item in answer]
        history = [*talk.history[: -len(answer)], *references, user("Next?")]

        reply = await talk.agent.send(history)
        straight = await s.agent(straight=True, settings={"store": store}).send(history)

        if store:
            assert reply.answer == straight.answer
        assert reply.status == 200
        assert (reply.mode, reply.reason) == ("delta", "continued")
        unknown = [*talk.history, {"type": "item_reference", "id": "msg_unknown"}, user("?")]
        refused = await talk.agent.send(unknown)
        assert (refused.status, refused.mode) == (400, "full")
        assert "not found" in str(refused.error)
