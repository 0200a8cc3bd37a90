"""
How long the API takes: a small model with constants from published figures.

A turn's first event waits for what the API does before inference, its output for the model:

    uplink       sent bytes / uplink rate                    (none on loopback by default)
    per request  what every turn pays, warm or not
    stateless    what a turn pays again that does not continue on a warm connection: old input
                 is validated, classified and tokenised anew, model and route are resolved
    unseen input a cost per KB of input that this connection has not read before
    first token  prefill and queueing, then tokens at a steady rate

A delta on the connection that holds its chain pays neither "stateless" nor for old input; a full
send pays both, over either transport. That is the whole difference (protocol section 7: a
WebSocket with full sends saves next to nothing).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_KB = 1024


@dataclass(frozen=True, slots=True)
class TurnCost:
    """What the latency model needs to know of a turn. Sizes in bytes."""

    sent_bytes: int
    unseen_bytes: int
    is_warm: bool


@dataclass(frozen=True, slots=True)
class LatencyModel:
    """Constants of the model; `source` says where they come from. `scale` compresses time."""

    source: str = "none: every delay is zero"
    per_request_ms: float = 0.0
    stateless_ms: float = 0.0
    per_new_kb_ms: float = 0.0
    first_token_ms: float = 0.0
    tokens_per_second: float | None = None
    uplink_mbit: float | None = None
    scale: float = 1.0

    def scaled(self, scale: float) -> LatencyModel:
        """The same model in compressed time: 0.1 makes everything ten times faster."""
        return replace(self, scale=scale)

    def first_event_s(self, cost: TurnCost) -> float:
        """Seconds from a request's arrival to `response.created`."""
        delay_ms = self.per_request_ms + self.per_new_kb_ms * cost.unseen_bytes / _KB
        if not cost.is_warm:
            delay_ms += self.stateless_ms
        if self.uplink_mbit:
            delay_ms += cost.sent_bytes * 8 / self.uplink_mbit / 1000
        return delay_ms / 1000 * self.scale

    def output_s(self, tokens: int) -> float:
        """Seconds from `response.created` until so many tokens of output are there."""
        rate = self.tokens_per_second
        seconds = self.first_token_ms / 1000 + (tokens / rate if rate else 0.0)
        return seconds * self.scale

    def turn_s(self, cost: TurnCost, tokens: int) -> float:
        """Seconds from a request's arrival to its last event."""
        return self.first_event_s(cost) + self.output_s(tokens)

    def schedule(self, cost: TurnCost, tokens: Iterable[int | None]) -> list[float]:
        """
        When each event is due, in seconds after arrival.

        `tokens` has a number for each event: output tokens that it brings, or None for the
        events before any output (`created`, `in_progress`).
        """
        start = self.first_event_s(cost)
        due: list[float] = []
        total = 0
        for brought in tokens:
            if brought is None:
                due.append(start)
            else:
                total += brought
                due.append(start + self.output_s(total))
        return due


_ALPHA = """\
OpenAI's alpha document "Websockets & incremental inputs in the Responses API", 2026-02-06:
gpt-5.2, one task with 20 tool calls (so 21 requests), about 9.2k input and 405 output tokens in
all, nothing cached: mean 20.24 s over HTTP, 14.30 s over WebSocket. Generation at the 65 tokens/s
that OpenAI's engineering post of 2026-04-22 gives for GPT-5.2: 405 / 65 = 6.23 s.
  saved per continuing turn   (20.24 - 14.30) / 20          = 0.297 s  -> stateless_ms
  left of an HTTP request     (20.24 - 6.23) / 21           = 0.667 s
  left of a warm request      0.667 - 0.297                 = 0.370 s
Inferred: that 0.297 s is a fixed cost, since the inputs were small (0.44k tokens a request on
average), hence per_new_kb_ms = 0; and how 0.370 s divides into 70 ms before the first event and
300 ms before the first token, which no total depends on."""

_POST = """\
OpenAI's engineering post "Speeding up agentic workflows with WebSockets", 2026-04-22: models at
1,000 tokens/s and more (bursts to 4,000), where the API's overhead dominates; up to 40 % less
time end to end. The post gives no overhead in seconds, so the overheads are those of the alpha
document (see "openai-alpha-2026-02": 0.297 s saved per continuing turn, 0.370 s left), measured
after the post's first round of HTTP work (2025-11). Rate: 1,000 tokens/s, its lower figure.
With the alpha's 19.3 output tokens a turn, 24 tool calls one by one (25 requests):
  HTTP       25 * (0.667 + 0.019)                = 17.2 s
  WebSocket  17.2 - 24 * 0.297                   = 10.0 s   -> 41 % less
Inferred: that the alpha's overheads hold for the faster model, and that a KB of new input costs
0.25 ms (a JSON parser and a tokeniser at about 4 MB/s together)."""

PRESETS = {
    "instant": LatencyModel(),
    "openai-alpha-2026-02": LatencyModel(
        source=_ALPHA,
        per_request_ms=70,
        stateless_ms=297,
        first_token_ms=300,
        tokens_per_second=65,
    ),
    "openai-post-2026-04": LatencyModel(
        source=_POST,
        per_request_ms=70,
        stateless_ms=297,
        per_new_kb_ms=0.25,
        first_token_ms=300,
        tokens_per_second=1000,
    ),
}
"""Latency models by name. `source` holds figures, arithmetic, and what was inferred."""
