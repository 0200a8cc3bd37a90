"""
Rows in which something goes wrong on the way: what a client then sends must be what is held.

The fault hits the second request of the agent's main loop, in both runs alike. What clients make of
it differs: they retry with the same body, or with one that has grown by the items that had arrived,
go on as if nothing had happened, or give up.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from clients import npm, pip
from proxy.core.reasons import Reason
from proxy.simulator.faults import Break, EndIncomplete, ErrorReply, FailResponse

if TYPE_CHECKING:
    from clients.rows import Row
    from proxy.simulator.faults import Fault
    from proxy.simulator.journal import Seen

# Reasoning is done by then, and the next item has begun.
_IN_THE_MIDDLE = 20


def _is_main(seen: Seen) -> bool:
    """Whether a request is one of the main loop: titles and the like have no tools."""
    return b'"tools":[{' in (seen.raw or b"")


_HIT = {"skip": 1, "when": _is_main}

LATE = Break(after_events=-1, **_HIT)
MIDDLE = Break(after_events=_IN_THE_MIDDLE, **_HIT)
ERROR = ErrorReply(after_events=_IN_THE_MIDDLE, **_HIT)
FAILED = FailResponse(after_events=_IN_THE_MIDDLE, **_HIT)
INCOMPLETE = EndIncomplete(reason="max_output_tokens", **_HIT)
LIMITED = ErrorReply(
    status=429,
    code="rate_limit_exceeded",
    message="Rate limit reached. Please try again in 1s.",
    headers={"retry-after": "1"},
    **_HIT,
)

_CUT = "the connection broke, and what it held is gone"
_FORGOTTEN = "upstream forgets a response when the turn after it fails"
_GOES_ON = "it goes on with items of the answer that did not come to its end"
_EXCUSES: dict[str, dict[Reason, str]] = {
    "late": {Reason.CONNECTION_LOST: _CUT, Reason.HISTORY_CHANGED: _GOES_ON},
    "middle": {Reason.CONNECTION_LOST: _CUT, Reason.HISTORY_CHANGED: _GOES_ON},
    "error": {Reason.CONNECTION_LOST: _CUT, Reason.HISTORY_CHANGED: _GOES_ON},
    "failed": {Reason.CHAIN_ADVANCED: _FORGOTTEN, Reason.HISTORY_CHANGED: _GOES_ON},
    "incomplete": {Reason.CHAIN_ADVANCED: _FORGOTTEN, Reason.HISTORY_CHANGED: _GOES_ON},
    "limited": {Reason.CHAIN_ADVANCED: _FORGOTTEN},
}

_WORDS: dict[str, tuple[Fault, str]] = {
    "late": (LATE, "dropped after all items, before the terminal event"),
    "middle": (MIDDLE, "dropped in the middle of an item"),
    "error": (ERROR, "an `error` event in the middle"),
    "failed": (FAILED, "`response.failed` in the middle"),
    "incomplete": (INCOMPLETE, "`response.incomplete`"),
    "limited": (LIMITED, "429 with Retry-After"),
}


def _hit(row: Row, fault: str) -> Row:
    found, words = _WORDS[fault]
    gives_up = (row.name, fault) in _GIVES_UP
    return replace(
        row,
        name=f"{row.name}-{fault}",
        variant=words,
        faults=(found,),
        statuses=row.statuses | {429} if fault == "limited" else row.statuses,
        excuses={**row.excuses, **_EXCUSES[fault], **_MORE_EXCUSES.get((row.name, fault), {})},
        excused_at_most=2 if (row.name, fault) in _MORE_EXCUSES else 1,
        gives_up=gives_up,
        difference=_DIFFERENCES.get((row.name, fault), ""),
        prompts=0 if gives_up else row.prompts,
    )


_BY_NAME = {row.name: row for row in (*npm.ROWS, *pip.ROWS)}
_TRIED = {
    "codex": ("late", "middle", "error", "failed", "incomplete", "limited"),
    "pi": ("late", "middle", "failed", "limited"),
    "copilot-acp": ("late", "middle", "error", "failed", "incomplete", "limited"),
    "cline": ("late", "middle", "limited"),
    "continue": ("late", "middle", "limited"),
    "opencode": ("middle", "error", "incomplete"),
    "ai-sdk-7-stream": ("limited",),
    "openai-node-stream": ("limited",),
    "openai-python-stream": ("limited",),
}
# Straight, it sees a dropped connection and asks again with the same body. Turnwire tells of it by
# an `error` event first, and that is what it acts upon.
_DIFFERENCES = {("cline", "middle"): "stops at the `error` event; a bare drop it would retry"}
# What opencode had taken of a reply that breaks it sends beside the next attempt, or not at all:
# now this and now that, for one and the same request, and straight as well.
_BOTH_ATTEMPTS = {Reason.ANSWER_CHANGED: "after an `error` event it may send both attempts"}
_MORE_EXCUSES = {("opencode", fault): _BOTH_ATTEMPTS for fault in ("middle", "error")}
_GIVES_UP = {("codex", "incomplete")}

ROWS: tuple[Row, ...] = tuple(
    _hit(_BY_NAME[name], fault) for name, faults in _TRIED.items() for fault in faults
)
