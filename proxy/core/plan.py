"""
How a turn is to be sent: continue a chain, start one, or leave it to plain HTTP.

The longest history that is known and usable wins, among all of the principal's chains. Nothing but
content decides: no session header, cache key, call id or "last response here" has a say, so forks,
retries, rewinds, parallel runs and side requests fall out by themselves. What can't be continued
is sent in full; the reason named is that of the longest chain that almost fitted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, TypeAlias

from proxy.core.chat_fields import Untranslatable
from proxy.core.history import Gap, Match, Mismatch, match
from proxy.core.reasons import Reason
from proxy.core.request import RESPONSES, TurnRequest, parse_body, parse_tail

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.core.chains import ChainStore
    from proxy.core.history import Head, MatchingPolicy
    from proxy.core.items import Fingerprinter, Item
    from proxy.core.request import Endpoint

# A retry begins with its own former body, and with the one before it. Whatever these two do not
# settle is looked for item by item.
PREFIXES_TRIED = 2

# Of the heads that can't be used, so many are looked at for a reason to name. A thousand runs of
# one agent leave thousands of them behind, all with one history.
REASONS_SOUGHT = 8


@dataclass(slots=True)
class Continue:
    """Send `delta` after `head`."""

    request: TurnRequest
    head: Head
    delta: Sequence[Item]
    reason: Reason = Reason.CONTINUED
    gaps: tuple[Gap, ...] = ()

    @property
    def previous(self) -> str | None:
        """The response that is continued."""
        return self.head.response_id


@dataclass(frozen=True, slots=True)
class Start:
    """
    Send the whole history; `reason` is that of `near`, the chain that almost fitted, if any.

    An opening that was answered before is near to none: it may be a twin's as well as a retry.
    """

    request: TurnRequest
    reason: Reason
    gaps: tuple[Gap, ...] = ()
    near: Head | None = None

    @property
    def previous(self) -> str | None:
        """The response of the chain that almost fitted."""
        return self.near.response_id if self.near else None


@dataclass(frozen=True, slots=True)
class FollowClient:
    """The client names the previous response itself: send its request as it is, where `head` is."""

    request: TurnRequest
    head: Head
    reason: Reason = Reason.CLIENT_CHAINED
    gaps: tuple[Gap, ...] = ()

    @property
    def previous(self) -> str | None:
        """The response that is continued."""
        return self.head.response_id


@dataclass(frozen=True, slots=True)
class PassThrough:
    """Leave the request to plain HTTP, untouched. `field` is what could not be translated."""

    reason: Reason
    request: TurnRequest | None = None
    gaps: tuple[Gap, ...] = ()
    field: str | None = None

    @property
    def previous(self) -> str | None:
        """None: nobody looked."""
        return None


Plan: TypeAlias = Continue | Start | FollowClient | PassThrough


def may_repeat(plan: Plan) -> bool:
    """Whether the request may be sent twice over HTTP; False where that might do harm."""
    return plan.request is None or plan.request.envelope.replay_safe


@dataclass(frozen=True, slots=True)
class Planner:
    """
    Makes the plan of a turn from its body and what is known of its principal's chains.

    `held(head)` tells why the head's connection can't continue it at this moment, or None if it
    can. `max_message_bytes` is upstream's limit for one message.
    """

    store: ChainStore
    fingerprints: Fingerprinter
    policy: MatchingPolicy
    held: Callable[[Head], Reason | None]
    max_message_bytes: int = field(default=16_000_000)

    def plan(self, principal: str, body: bytes, endpoint: Endpoint = RESPONSES) -> Plan:
        """
        Return the plan for a body that was posted to `endpoint`.

        `principal` is the key of whose credentials it carries.
        """
        try:
            return self._plan(principal, body, endpoint)
        except Untranslatable as found:
            return PassThrough(Reason.UNTRANSLATABLE, field=found.field)
        except ValueError:
            return PassThrough(Reason.UNPARSABLE)

    def _plan(self, principal: str, body: bytes, endpoint: Endpoint) -> Plan:
        refusals: dict[Head, Mismatch] = {}
        walk = self.store.walk(body, endpoint.name)
        for known in islice(self.store.prefixes(principal, walk), PREFIXES_TRIED):
            request = parse_tail(body, known, self.fingerprints)
            if request is None:
                continue
            request.walk = walk
            if (plan := self._attempt(principal, request, refusals)) is not None:
                return plan
        root = self.fingerprints.root(principal + endpoint.name)
        parsed = parse_body(body, root, self.fingerprints, endpoint)
        if not isinstance(parsed, TurnRequest):
            return PassThrough(parsed)
        parsed.walk = walk
        if (plan := self._attempt(principal, parsed, refusals)) is not None:
            return plan
        longest_first = sorted(refusals, key=lambda head: -head.item_count)
        return self._start(parsed, [(head, refusals[head]) for head in longest_first])

    def _attempt(
        self, principal: str, request: TurnRequest, refusals: dict[Head, Mismatch]
    ) -> Plan | None:
        """
        Return the plan if this reading of the body settles it, else note why it does not.

        The longest history wins, but the shortest, which `request` begins after, is looked at
        first: its key is known, the others cost a fingerprint an item. If its head matches, and
        what is new holds nothing that a model says, no answer to a longer history is in the
        request. (An answer that said nothing could be; to continue before it is as right.) Then
        the others are left for after the delta was sent.
        """
        envelope = request.envelope
        if envelope.ineligible is not None:
            return PassThrough(envelope.ineligible, request)
        if envelope.previous_response_id is not None:
            return self._follow_client(principal, request)
        search = _Search(self, request, refusals)
        nearest = search.at(0, request.base_history)
        if nearest is None or any(item.is_produced for item in nearest[1].delta):
            for place in reversed(range(1, len(request.items) + 1)):
                if (longer := search.at(place, request.histories[place])) is not None:
                    nearest = longer
                    break
        if nearest is not None:
            return self._continue(request, nearest[0], nearest[1].delta)
        search.name_reasons()
        return None

    def _continue(self, request: TurnRequest, head: Head, delta: Sequence[Item]) -> Plan:
        if request.delta_message_bytes(head.response_id, delta) > self.max_message_bytes:
            return PassThrough(Reason.TOO_LARGE, request)
        return Continue(request, head, delta)

    def may_hydrate(self, head: Head) -> bool:
        """Whether upstream can load this head on any connection, from its storage."""
        return head.stored and self.store.ids_are_unique

    def _follow_client(self, principal: str, request: TurnRequest) -> Plan:
        # Its own chain: nothing may be added to the request or taken from it.
        head = self.store.head_of(principal, request.envelope.previous_response_id or "")
        if head is None or self.held(head) is not None:
            return PassThrough(Reason.UNKNOWN_CHAIN, request)
        return FollowClient(request, head)

    def _start(self, request: TurnRequest, refusals: Sequence[tuple[Head, Mismatch]]) -> Plan:
        if request.full_message_bytes > self.max_message_bytes:
            return PassThrough(Reason.TOO_LARGE, request)
        if not refusals:
            return Start(request, _unknown(request))
        others = (each for each in refusals if each[1].reason is not Reason.REPEATED)
        near, telling = next(others, refusals[0])
        gaps = tuple(gap for _, refusal in refusals for gap in refusal.gaps)
        is_opening = telling.reason is Reason.REPEATED and not _holds_answers(request)
        return Start(request, telling.reason, gaps, None if is_opening else near)


class _Search:
    """
    Looks for a head that a request continues, and notes of all others why it does not.

    Whether a head can be used is known at once, and of how many is bounded by the number of
    connections; only then is its answer compared.
    """

    def __init__(
        self, planner: Planner, request: TurnRequest, refusals: dict[Head, Mismatch]
    ) -> None:
        self._planner = planner
        self._request = request
        self._refusals = refusals
        self._unusable: list[tuple[int, Head, Reason]] = []

    def at(self, place: int, history: bytes) -> tuple[Head, Match] | None:
        """Return the newest usable head that answered `history`, if what follows matches it."""
        for head in self._planner.store.heads_at(history):
            if head in self._refusals:
                continue  # refused already, where fewer of the items had been looked at
            held = self._planner.held(head)
            if held is not None and not self._planner.may_hydrate(head):
                self._unusable.append((place, head, held))
                continue
            outcome = self._match(place, head)
            if isinstance(outcome, Match):
                return head, outcome
            self._refusals[head] = _refusal(outcome, held)
        return None

    def name_reasons(self) -> None:
        """Note why heads that can't be used would not do either, those of long histories first."""
        self._unusable.sort(key=lambda noted: -noted[0])
        for place, head, held in self._unusable[:REASONS_SOUGHT]:
            self._refusals[head] = _refusal(self._match(place, head), held)

    def _match(self, place: int, head: Head) -> Match | Mismatch:
        following = self._request.items[place:] if place else self._request.items
        return match(head, self._request.envelope, following, self._planner.policy)


def _refusal(outcome: Match | Mismatch, held: Reason | None) -> Mismatch:
    """
    Say why a head is not continued, as a person would.

    Where its connection went on to a later response, so did the client, and what differs from what
    upstream holds lies further back: an old answer changed, or other answers that follow it now.
    """
    went_on = held is Reason.CHAIN_ADVANCED
    if isinstance(outcome, Mismatch):
        is_old = went_on and outcome.reason is Reason.ANSWER_CHANGED
        return Mismatch(Reason.HISTORY_CHANGED, outcome.gaps) if is_old else outcome
    if went_on and any(item.is_produced for item in outcome.delta):
        return Mismatch(Reason.HISTORY_CHANGED)
    return Mismatch(held or Reason.HISTORY_CHANGED)


def _unknown(request: TurnRequest) -> Reason:
    # A request that holds answers of the model continues something, though nothing known here.
    return Reason.UNKNOWN_HISTORY if _holds_answers(request) else Reason.NEW_CONVERSATION


def _holds_answers(request: TurnRequest) -> bool:
    return any(item.is_produced for item in request.items)
