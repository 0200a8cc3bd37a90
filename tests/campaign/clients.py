"""
Clients that behave as people and SDKs do: they leave, repeat, fork, edit, rewind, compact.

A `Customer` is an agent that makes one attempt at a time and says how it ended; `insist` tries
until it has the answer, as an SDK does. A `Conversation` is a history and its customer; `MOVES`
are what may happen between two of its prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import json
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import aiohttp

from proxy.simulator import AnswerOptions, EchoStyle
from proxy.simulator.agent import Agent, Streaming, user
from proxy.simulator.streams import TERMINALS, SseParser, StreamError, check_stream
from proxy.simulator.wire import dumps

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from campaign.ledger import Ledger
    from proxy.simulator.wire import Item

ATTEMPTS_MAX = 200
SILENCE_DEADLINE_S = 60.0  # a slow network is no defect; one that brings nothing is
ANSWERS = AnswerOptions(message_tokens=8)
# Answers of few events, for volume: the same machinery, at half the cost of a turn.
LEAN_ANSWERS = AnswerOptions(message_tokens=3, commentary_every=0, reasoning=False)
LEAN_TOOLS = (
    {
        "type": "function",
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"line": {"type": "integer", "minimum": 1, "maximum": 9999}},
            "required": ["line"],
        },
    },
)


class Outcome(enum.StrEnum):
    """How an attempt ended, as its client can tell."""

    ANSWERED = "answered"
    FAILED = "failed"  # a response that says so: failed, incomplete
    REFUSED = "refused"  # an HTTP status
    BROKEN = "broken"  # an error within the stream, or an end that nobody can take for one
    LEFT = "left"  # the client did not wait
    LOST = "lost"  # a clean end without an ending: a defect
    STUCK = "stuck"  # a defect


@dataclass
class Attempt:
    """One request and what came of it."""

    outcome: Outcome
    items: Sequence[Item] = ()
    mode: str | None = None
    reason: str | None = None


@dataclass
class _Progress:
    """How far an attempt has come. Its deadline is put off as long as there is progress."""

    deadline: asyncio.Timeout | None = None
    mode: str | None = None
    events: int = 0

    def __str__(self) -> str:
        return f"mode {self.mode}, {self.events} events"

    def note(self, events: int) -> None:
        """Take note that bytes have come, and so many events by now."""
        self.events = events
        if self.deadline is not None and not self.deadline.expired():
            now = asyncio.get_running_loop().time()
            self.deadline.reschedule(now + SILENCE_DEADLINE_S)


@dataclass(slots=True)
class Customer(Agent):
    """
    A client whose every reply is judged.

    `leaves` is the chance to walk away from an attempt in its middle; `on_begin` is called when a
    reply begins.
    """

    ledger: Ledger = None  # type: ignore[assignment]  always given
    rng: random.Random = field(default_factory=random.Random)
    leaves: float = 0.0
    on_begin: Callable[[], object] = lambda: None
    answers: AnswerOptions = ANSWERS

    async def insist(self, body: bytes) -> Attempt:
        """Try until there is an answer."""
        for number in range(ATTEMPTS_MAX):
            leave_after = None
            if number < 5 and self.rng.random() < self.leaves:
                leave_after = self.rng.choice((-1, 0, 1, 2, 3, self.rng.randrange(4, 40)))
            attempt = await self.attempt(body, leave_after)
            if attempt.outcome is Outcome.ANSWERED:
                self.ledger.turns += 1
                return attempt
            if attempt.outcome in (Outcome.REFUSED, Outcome.BROKEN):
                await asyncio.sleep(self.rng.uniform(0, 0.02))
        self.ledger.blame("lost", f"{ATTEMPTS_MAX} attempts without an answer")
        raise LostTurn

    async def attempt(self, body: bytes, leave_after: int | None = None) -> Attempt:
        """
        Send a body once, and judge what comes.

        `leave_after` so many events the client closes its connection; -1 is before there is a
        reply at all.
        """
        progress = _Progress()
        try:
            async with asyncio.timeout(SILENCE_DEADLINE_S) as progress.deadline:
                if leave_after == -1:
                    attempt = await self._leave_at_once(body, progress)
                else:
                    attempt = await self._request(body, leave_after, progress)
        except TimeoutError:
            self.ledger.blame("stuck", f"silence: {progress}, {body[:200]!r}")
            attempt = Attempt(Outcome.STUCK)
        except (aiohttp.ClientError, ConnectionError):
            attempt = Attempt(Outcome.BROKEN)
        if attempt.outcome is Outcome.LOST:
            self.ledger.blame("lost", "a clean end without an ending")
        self.ledger.outcomes[attempt.outcome] += 1
        if attempt.outcome is Outcome.LEFT:
            self.ledger.injected["client leaves"] += 1
        if attempt.outcome is Outcome.ANSWERED:
            self.ledger.modes[f"{attempt.mode}"] += 1
        return attempt

    async def _leave_at_once(self, body: bytes, progress: _Progress) -> Attempt:
        sending = asyncio.get_running_loop().create_task(self._request(body, None, progress))
        await asyncio.wait([sending], timeout=self.rng.uniform(0, 0.01))
        if sending.done():
            return sending.result()
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sending
        return Attempt(Outcome.LEFT)

    async def _request(self, body: bytes, leave_after: int | None, progress: _Progress) -> Attempt:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        headers = {
            "Authorization": f"Bearer {self.api_key}",
            "Content-Type": "application/json",
            **self.headers,
        }
        url = f"{self.base_url}/responses"
        async with self._session.post(url, data=body, headers=headers) as raw:
            self.on_begin()
            mode = progress.mode = raw.headers.get("turnwire-mode")
            if raw.content_type == "text/event-stream":
                attempt = await self._read_stream(raw, body, leave_after, progress)
            else:
                attempt = await self._read_json(raw, body)
            attempt.mode, attempt.reason = mode, raw.headers.get("turnwire-reason")
            return attempt

    async def _read_json(self, raw: aiohttp.ClientResponse, body: bytes) -> Attempt:
        text = await raw.read()
        try:
            value = json.loads(text)
        except ValueError:
            value = {}
        if raw.status >= 400:
            return Attempt(Outcome.REFUSED)
        if not isinstance(value, dict) or value.get("object") != "response":
            return Attempt(Outcome.LOST)
        return self._judge(body, value, value["output"])

    async def _read_stream(
        self,
        raw: aiohttp.ClientResponse,
        body: bytes,
        leave_after: int | None,
        progress: _Progress,
    ) -> Attempt:
        parser = SseParser()
        events: list[dict[str, Any]] = []
        try:
            if leave_after == 0:
                raw.close()
                return Attempt(Outcome.LEFT)
            async for block in raw.content.iter_any():
                events.extend(parser.feed(block))
                progress.note(len(events))
                if leave_after is not None and len(events) >= leave_after:
                    raw.close()
                    return Attempt(Outcome.LEFT)
            parser.finish()
            return self._judge_stream(body, events)
        except StreamError as error:
            self.ledger.blame("wrong", f"{error} in a reply from {raw.url}")
            return Attempt(Outcome.FAILED)

    def _judge_stream(self, body: bytes, events: list[dict[str, Any]]) -> Attempt:
        endings = [event for event in events if event["type"] in TERMINALS]
        errors = [event for event in events if event["type"] == "error"]
        if len(endings) + len(errors) > 1:
            self.ledger.blame("duplicated", "two endings of one reply")
        if errors:
            return Attempt(Outcome.BROKEN)
        if not endings:
            return Attempt(Outcome.LOST)
        response, items, _ = check_stream(events)
        assert response is not None
        return self._judge(body, response, items)

    def _judge(self, body: bytes, response: dict[str, Any], items: Sequence[Item]) -> Attempt:
        if response["status"] != "completed":
            return Attempt(Outcome.FAILED)
        self.ledger.judge_answer(body, response, items, self.answers)
        return Attempt(Outcome.ANSWERED, items)


class LostTurn(Exception):
    """A turn was given up; it is in the ledger."""


# --- Conversations --------------------------------------------------------------------------------

_families: Iterator[int] = itertools.count(1)


@dataclass
class Conversation:
    """
    A history and who has it.

    `family` tells its words from those of others; a fork has the family of what it came from.
    """

    customer: Customer
    twin: Customer
    rng: random.Random
    history: list[Item] = field(default_factory=list)
    last_body: bytes = b""
    family: int = field(default_factory=lambda: next(_families))

    async def close(self) -> None:
        """Leave for good."""
        await self.customer.close()
        await self.twin.close()

    @property
    def ledger(self) -> Ledger:
        """The judge of this conversation."""
        return self.customer.ledger

    def word(self, *others: str) -> str:
        """Return a new word of the family's."""
        keys = (self.customer.api_key, self.twin.api_key, *others)
        return self.ledger.nonce(self.family, *keys)

    def body(self, who: Customer | None = None) -> bytes:
        """Return the request for the history as it is."""
        return dumps((who or self.customer).build_body(self.history)).encode()

    async def ask(self, text: str) -> None:
        """Ask something, and answer the tool calls until there are none."""
        self.history.append(user(text))
        while True:
            body = self.body()
            attempt = await self.customer.insist(body)
            self.last_body = body
            outputs = self.customer.answer_calls(attempt.items)
            self.history.extend(self.customer.echo(attempt.items))
            self.history.extend(outputs)
            if not outputs:
                return

    async def prompt(self, calls: int | None = None) -> None:
        """Ask the next thing."""
        calls = self.rng.choice((0, 0, 1, 2)) if calls is None else calls
        await self.ask(f"[calls={calls}] {self.word()}")

    def fork(self, length: int | None = None) -> Conversation:
        """Return another conversation that has this beginning, for the same customer."""
        history = list(self.history[:length])
        return replace(self, history=history)

    def prompts(self) -> list[int]:
        """Return the places of the user's messages."""
        return [at for at, item in enumerate(self.history) if item.get("role") == "user"]


# What may happen between two prompts: each takes a conversation and returns the one that goes on.


async def repeat_at_once(talk: Conversation) -> Conversation:
    """Send the last request twice at the same time, as an impatient SDK does."""
    await asyncio.gather(*(talk.customer.insist(talk.last_body) for _ in range(2)))
    return talk


async def repeat(talk: Conversation) -> Conversation:
    """Send the last request once more."""
    await talk.customer.insist(talk.last_body)
    return talk


async def two_tails(talk: Conversation) -> Conversation:
    """Go on in two ways at the same time."""
    other = talk.fork()
    await asyncio.gather(talk.prompt(), other.prompt())
    return talk.rng.choice((talk, other))


async def rewind(talk: Conversation) -> Conversation:
    """Go back to an earlier place and stay there."""
    return talk.fork(talk.rng.choice(talk.prompts()))


async def edit(talk: Conversation) -> Conversation:
    """Change an old message of the user's."""
    other = talk.fork()
    place = talk.rng.choice(talk.prompts())
    other.history[place] = user(f"[calls=1] Rather {talk.word()}")
    return other


async def drop_answer(talk: Conversation) -> Conversation:
    """Leave out the last answer."""
    return talk.fork(-1)


async def compact(talk: Conversation) -> Conversation:
    """Replace the history by a summary of it."""
    other = talk.fork(0)
    other.history = [user(f"Summary so far: {talk.word()}")]
    return other


async def share(talk: Conversation) -> Conversation:
    """Let somebody with another key send the very same request at the same time."""
    bodies = talk.last_body
    await asyncio.gather(talk.customer.insist(bodies), talk.twin.insist(bodies))
    return talk


MOVES: dict[Callable[[Conversation], Awaitable[Conversation]], int] = {
    repeat_at_once: 3,
    repeat: 2,
    two_tails: 5,
    rewind: 3,
    edit: 3,
    drop_answer: 1,
    compact: 2,
    share: 5,
}
"""What may happen, and how often in relation to each other."""


async def hold(talk: Conversation, prompts: int, moves: float) -> None:
    """Hold a conversation of so many prompts; `moves` is the chance of one before each."""
    for number in range(prompts):
        if number and talk.rng.random() < moves:
            (move,) = talk.rng.choices(list(MOVES), list(MOVES.values()))
            talk.ledger.moves[move.__name__] += 1
            talk = await move(talk)
        await talk.prompt()


SETTINGS: tuple[dict[str, object], ...] = (
    {"store": False},
    {"store": False},
    {"store": False, "include": ["reasoning.encrypted_content"]},
    {"store": True},
    {},
)


def make_conversation(
    base_url: str,
    ledger: Ledger,
    rng: random.Random,
    keys: tuple[str, str],
    *,
    leaves: float = 0.0,
    lean: bool = False,
) -> Conversation:
    """Return a new conversation of some client; the second key is its twin's."""
    options: dict[str, Any] = {
        "style": rng.choice(list(EchoStyle)),
        "streaming": rng.choice((Streaming.ALWAYS, Streaming.ALWAYS, Streaming.ALTERNATING)),
        "settings": rng.choice(SETTINGS),
        "ledger": ledger,
        "rng": rng,
        "leaves": leaves,
    }
    if lean:
        options |= {"answers": LEAN_ANSWERS, "tools": LEAN_TOOLS}
    own, twin = (Customer(base_url, api_key=key, **options) for key in keys)
    return Conversation(own, twin, rng)
