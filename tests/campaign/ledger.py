"""
The judge of all trials: what must not happen, and how often it did.

A reply is judged where it arrives, from its request alone: the simulator puts the digest of the
context that it saw into the id of the response, and its answer is a pure function of that context.
Whether anybody else's words were near is judged where they arrive: every prompt has a nonce, and
`inspect` looks for the nonces in what upstream received.

    lost                a request that got neither an answer nor an error, or was never answered
    duplicated          two endings of one reply, or an item twice in a context
    wrong               an answer to another context than the one asked about, or a damaged one
    cross_conversation  a nonce in the context of another conversation
    cross_credential    a nonce, a response or a connection with somebody else's key
    stuck               a request past its deadline; what is still held when all have left
    alarms              a line of the proxy's log at level error, or that is no line of its log

Errors that a client can see are no defects, and are counted as outcomes.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from proxy.simulator.answers import AnswerOptions, Context, answer
from proxy.simulator.journal import principal_of
from proxy.simulator.meaning import normal_form
from proxy.simulator.validate import Transport

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from proxy.simulator.journal import Journal, Seen
    from proxy.simulator.wire import Item

DEFECTS = (
    "lost",
    "duplicated",
    "wrong",
    "cross_conversation",
    "cross_credential",
    "stuck",
    "alarms",
)
_NONCE = re.compile(rb"nonce-\d+-\d+")
_EXAMPLES_KEPT = 20


def key_principal(api_key: str) -> str:
    """Return the simulator's name for the owner of a key."""
    return principal_of({"Authorization": f"Bearer {api_key}"})


@dataclass
class Ledger:
    """
    Counts everything.

    `outcomes` are of attempts, `modes` of answers; `turns` are requests that were answered in the
    end. `injected` counts faults by kind. `examples` keeps a few defects for people to look at.
    """

    turns: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    injected: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)
    defects: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    _families: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _nonces: int = 0
    _owners: dict[int, str] = field(default_factory=dict)
    _words: dict[str, frozenset[bytes]] = field(default_factory=dict)

    def nonce(self, family: int, *api_keys: str) -> str:
        """Return a new word for a prompt of this family of conversations, for these keys."""
        self._nonces += 1
        word = f"nonce-{family}-{self._nonces}"
        self._families[f"nonce-{family}-"] |= {key_principal(key) for key in api_keys}
        return word

    def blame(self, defect: str, what: object) -> None:
        """Count a defect."""
        assert defect in DEFECTS
        self.defects[defect] += 1
        if len(self.examples) < _EXAMPLES_KEPT:
            self.examples.append(f"{defect}: {str(what)[:500]}")

    def judge_answer(
        self,
        body: bytes,
        response: Mapping[str, Any],
        items: Sequence[Item],
        options: AnswerOptions,
    ) -> None:
        """A completed response must be the one answer to what was asked."""
        asked = json.loads(body)
        given = asked["input"]
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        context = Context.of(asked, given)
        seen_digest = response["id"].removeprefix("resp_")[8:]
        if seen_digest != context.digest.hex():
            self.blame("wrong", f"upstream saw another context: {response['id']}")
        expected = [normal_form(item) for item in answer(context, options).items]
        if expected != [normal_form(item) for item in items]:
            self.blame("wrong", f"a damaged answer: {response['id']}")
        if response.get("previous_response_id") is not None:
            self.blame("wrong", "previous_response_id shows")

    # What upstream received.

    def inspect(self, journal: Journal) -> int:
        """Judge what upstream received since the last time; return how many it answered."""
        taken = journal.take()
        for seen in taken:
            self._inspect_owner(seen)
            if seen.is_turn:
                self._inspect_words(seen)
        return sum(seen.finished for seen in taken)

    def _inspect_owner(self, seen: Seen) -> None:
        if seen.foreign:
            self.blame("cross_credential", f"{seen.path} names another's response")
        if seen.transport is not Transport.WS or not seen.connection:
            return
        if self._owners.setdefault(seen.connection, seen.principal) != seen.principal:
            self.blame("cross_credential", f"connection {seen.connection} has two principals")

    def _inspect_words(self, seen: Seen) -> None:
        found = _NONCE.findall(seen.raw or b"")
        before = frozenset[bytes]()
        if seen.held is not None:
            before = self._words.get(seen.held.response_id, before)
        new = frozenset(found)
        if len(new) != len(found) or new & before:
            self.blame("duplicated", f"a prompt twice in one context: {found}")
        families = {word.decode().rpartition("-")[0] + "-" for word in new | before}
        if len(families) > 1:
            self.blame("cross_conversation", f"one context holds {sorted(families)}")
        for family in families:
            if seen.principal not in self._families.get(family, ()):
                self.blame("cross_credential", f"{family} came with another's key")
        if seen.response_id is not None:
            self._words[seen.response_id] = new | before

    # Many ledgers.

    def as_json(self) -> dict[str, Any]:
        """Return all counts."""
        return {
            "turns": self.turns,
            "outcomes": dict(self.outcomes),
            "modes": dict(self.modes),
            "injected": dict(self.injected),
            "moves": dict(self.moves),
            "defects": {name: self.defects[name] for name in DEFECTS},
            "examples": self.examples,
        }


def total(ledgers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up what `as_json` gave."""
    summed: dict[str, Any] = {"turns": 0, "examples": []}
    for name in ("outcomes", "modes", "injected", "moves", "defects"):
        summed[name] = Counter[str]()
    for each in ledgers:
        summed["turns"] += each["turns"]
        summed["examples"] += each["examples"]
        for name in ("outcomes", "modes", "injected", "moves", "defects"):
            summed[name].update({str(key): count for key, count in each[name].items()})
    for name in ("outcomes", "modes", "injected", "moves", "defects"):
        summed[name] = dict(sorted(summed[name].items()))
    return summed
