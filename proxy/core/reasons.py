"""
Why a turn went the way it did: closed sets that are log values, reply headers and metric labels.

`Mode` says how a turn was sent, `Reason` why. A reason is named once, here, with the sentence
that a person may read about it; nothing else in the program makes one up.
"""

from __future__ import annotations

import enum
from typing import Self


class Mode(enum.StrEnum):
    """How the turn that was answered had been sent upstream."""

    DELTA = "delta"
    FULL = "full"
    HTTP = "http"


class Reason(enum.StrEnum):
    """Why that mode. The value is the label; `text` is the sentence for people."""

    text: str

    def __new__(cls, value: str, text: str) -> Self:
        """Make a member of a label and its sentence."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.text = text
        return member

    # A delta was sent.
    CONTINUED = "continued", "the request continues a chain; only its new items were sent"
    CLIENT_CHAINED = "client_chained", "the client named the previous response itself"

    # The history was sent in full: no chain to continue.
    NEW_CONVERSATION = "new_conversation", "no known history is a beginning of this one"
    UNKNOWN_HISTORY = (
        "unknown_history",
        "holds a model's answers, but no known history is a beginning of it: another replica's, a"
        " forgotten one, or one that was changed from its first item on",
    )
    REPEATED = "repeated", "this very request was answered before: a retry, or a twin's opening"
    HISTORY_CHANGED = (
        "history_changed",
        "an item that upstream holds was edited, moved or dropped, or an answer broke off",
    )
    ANSWER_CHANGED = "answer_changed", "the model's last answer was edited, dropped or not echoed"
    TEXT_DROPPED = "text_dropped", "the client dropped visible text beside tool calls"
    REASONING_DROPPED = "reasoning_dropped", "reasoning items are missing and the policy is resend"
    CALL_UNANSWERED = "call_unanswered", "a tool call of the last answer has no output yet"
    NOTHING_NEW = "nothing_new", "the request adds no item to what upstream holds"
    UNSAFE_ITEM = "unsafe_item", "the new items hold a compaction, a reference or tools"
    COMPACTED = "compacted", "the chain's history was compacted"
    CHANGED_MODEL = "changed_model", "`model` differs from the chain's"
    CHANGED_INSTRUCTIONS = "changed_instructions", "`instructions` differ from the chain's"
    CHANGED_TOOLS = "changed_tools", "`tools` differ from the chain's"
    CHANGED_SETTINGS = "changed_settings", "another setting differs from the chain's"

    # The history was sent in full: the chain is known but can't be used.
    CHAIN_BUSY = "chain_busy", "the chain's connection is answering another turn"
    CHAIN_ADVANCED = (
        "chain_advanced",
        "the connection no longer holds this response: later ones took its place",
    )
    CONNECTION_LOST = "connection_lost", "the chain's connection is gone"
    CONNECTION_EXPIRING = "connection_expiring", "the chain's connection nears its age limit"

    # The history was resent in full before the client saw a byte.
    PREVIOUS_RESPONSE_NOT_FOUND = (
        "previous_response_not_found",
        "upstream had forgotten the chain's last response",
    )
    CONNECTION_LIMIT_REACHED = "connection_limit_reached", "the connection met upstream's age limit"
    DELTA_REJECTED = "delta_rejected", "upstream refused the delta as inconsistent"
    UPSTREAM_FAILED = "upstream_failed", "upstream failed before its first event"
    UPSTREAM_CLOSED = "upstream_closed", "the connection closed before the first event"
    UPSTREAM_SILENT = "upstream_silent", "no event arrived in time"
    SEND_FAILED = "send_failed", "the connection was closed before the message left"

    # Plain HTTP: the request is not one for WebSocket mode.
    NOT_A_TURN = "not_a_turn", "not a POST of a turn; passed through"
    UNPARSABLE = "unparsable", "the body is not a JSON object that can be read without doubt"
    NO_INPUT = "no_input", "the body has no `input` list or text"
    BACKGROUND = "background", "`background` responses exist on HTTP only"
    CONVERSATION = "conversation", "`conversation` keeps its state upstream"
    UNKNOWN_CHAIN = "unknown_chain", "the client names a response no connection here holds"
    HTTP_ONLY_FIELD = "http_only_field", "a field that WebSocket mode does not take, or reads apart"
    TOO_LARGE = "too_large", "larger than the upstream's message limit"
    UNTRANSLATABLE = (
        "untranslatable",
        "a Chat Completions request with a field or message that has no equal in Responses",
    )
    MODEL_NOT_TRANSLATED = (
        "model_not_translated",
        "a Chat Completions request for a model that `chat.models` leaves out",
    )
    MODEL_REFUSED = (
        "model_refused",
        "upstream has, or lately had, no such model for Responses, but may for Chat Completions",
    )
    TRANSLATION_REFUSED = (
        "translation_refused",
        "upstream refuses, or lately refused, what was translated; Chat Completions may take it",
    )

    SHADOW = "shadow", "shadow mode: all goes in full over plain HTTP, and deltas are only counted"

    # Plain HTTP: no connection.
    WEBSOCKET_OFF = "websocket_off", "WebSocket mode is switched off"
    COOLING_DOWN = "cooling_down", "WebSocket mode failed recently and is being left alone"
    UPGRADE_REFUSED = "upgrade_refused", "upstream refused the WebSocket upgrade"
    CONNECT_FAILED = "connect_failed", "no connection to upstream's WebSocket endpoint"
    CONNECTION_CAP = "connection_cap", "all connections that the limits allow are in use"
    HANDSHAKE_BUDGET = "handshake_budget", "too many new connections in a short time"
    RESEND_FAILED = "resend_failed", "a resend met the same trouble again"
    RESEND_BUDGET = "resend_budget", "too many resends in a short time"


def reference_table() -> str:
    """Return the Markdown table of all reasons, for people."""
    rows = (f"| `{reason.value}` | {reason.text} |" for reason in Reason)
    return "\n".join(("| Reason | What it means |", "| --- | --- |", *rows))
