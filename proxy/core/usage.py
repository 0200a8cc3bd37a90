"""
What the end of an answer says of its cost: numbers and names, none of its content.

Read only where somebody asks for it (tracing), from the message that ended the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class Usage:
    """What upstream says of an answer that has ended; None where it does not."""

    model: str | None = None
    finish_reason: str | None = None
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None


class _InputDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _OutputDetails(msgspec.Struct):
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _InputDetails | None = None
    output_tokens_details: _OutputDetails | None = None


class _Incomplete(msgspec.Struct):
    reason: str | None = None


class _Response(msgspec.Struct):
    model: str | None = None
    status: str | None = None
    incomplete_details: _Incomplete | None = None
    usage: _Usage | None = None


class _Event(msgspec.Struct):
    response: _Response | None = None


_EVENT = msgspec.json.Decoder(_Event)


def read_usage(message: bytes) -> Usage:
    """Read a terminal event. What can't be read is None, and so may all of it be."""
    try:
        response = _EVENT.decode(message).response
    except (ValueError, RecursionError):
        response = None
    if response is None:
        return Usage()
    counted = response.usage or _Usage()
    read = counted.input_tokens_details or _InputDetails()
    said = counted.output_tokens_details or _OutputDetails()
    incomplete = response.incomplete_details or _Incomplete()
    return Usage(
        model=response.model,
        finish_reason=incomplete.reason or response.status,
        input_tokens=counted.input_tokens,
        cached_tokens=read.cached_tokens,
        output_tokens=counted.output_tokens,
        reasoning_tokens=said.reasoning_tokens,
    )
