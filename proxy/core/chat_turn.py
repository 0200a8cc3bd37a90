"""
Chat Completions bodies as turns: the two dialects that are spoken at `/v1/chat/completions`.

A body is matched, remembered and found again by its own bytes, as any other is (`core.request`).
What is translated is what is looked at: all of a conversation's first body, and of every later one
only what follows the known prefix. The items that come of it are the client's own in all respects:
fingerprinted, compared with the model's, and sent as the delta. Only where the whole history must
go upstream although a part of it was not looked at, it is translated for that.

* `ChatDialect`: `messages`, as the API documents them.
* `CursorDialect`: a body of the Responses API (`input`, flat tools) from a client that reads
  chunks. Its items are sent as they are.

Raises Untranslatable wherever a request has no exact equal.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from proxy.core.chat_fields import Untranslatable
from proxy.core.chat_messages import NO_CALLS, translate
from proxy.core.chat_request import chat_settings, cursor_settings
from proxy.core.items import Item
from proxy.core.request import Dialect, Endpoint, Envelope, read_envelope
from proxy.core.splice import elements

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from proxy.core.chat_request import ChatSettings
    from proxy.core.items import Fingerprinter
    from proxy.core.request import Setting, TurnRequest


@dataclass(frozen=True)
class ChatEnvelope(Envelope):
    """The settings as the Responses API takes them, and what the reply must know besides."""

    include_usage: bool = False


def _read(made: ChatSettings, fingerprints: Fingerprinter) -> ChatEnvelope:
    plain = read_envelope(made.settings, fingerprints)
    known = {each.name: getattr(plain, each.name) for each in fields(Envelope)}
    return ChatEnvelope(**known, include_usage=made.include_usage)


class ChatDialect(Dialect):
    """Chat Completions: messages."""

    array = "messages"
    is_translated = True

    def envelope(self, settings: Sequence[Setting], fingerprints: Fingerprinter) -> Envelope:
        """Translate the settings. Raises Untranslatable, and ValueError as `read_envelope` does."""
        return _read(chat_settings(settings), fingerprints)

    def items(
        self,
        elements_: Sequence[bytes],
        calls: frozenset[str],
        make: Callable[[bytes], Item] = Item,
    ) -> tuple[list[Item], frozenset[str]]:
        """Translate messages. Raises Untranslatable, and ValueError as `translate` does."""
        made = translate(elements_, calls)
        return [make(raw) for raw in made.items], made.custom_calls

    def whole(self, raw: bytes) -> tuple[list[Item], frozenset[str]] | None:
        """Translate the value under `messages`. Raises as `items` does."""
        if not raw.startswith(b"["):
            raise Untranslatable("messages")
        return self.items(elements(raw), NO_CALLS)

    def full_input(self, request: TurnRequest) -> bytes:
        """Return all messages as items, translated again where only a part of them was at hand."""
        items = request.items
        if request.base_count:
            array = request.body[request.input_start : request.input_end]
            items, _ = self.items(elements(array), NO_CALLS)
        return b"[%b]" % b",".join(item.raw for item in items)

    def full_input_bytes(self, request: TurnRequest) -> int:
        """How long that is, at most: what stands around a text grows by less than a third."""
        if not request.base_count:
            return sum(len(item.raw) + 1 for item in request.items) + 1
        return (request.input_end - request.input_start) * 4 // 3


class CursorDialect(Dialect):
    """A Responses body that came to the Chat path: only its settings are translated."""

    is_translated = True

    def envelope(self, settings: Sequence[Setting], fingerprints: Fingerprinter) -> Envelope:
        """Translate the settings. Raises as that of `ChatDialect` does."""
        if any(setting.key == ChatDialect.array for setting in settings):
            raise Untranslatable("input")  # a known beginning, and behind it what it lacked before
        return _read(cursor_settings(settings), fingerprints)


CHAT = Endpoint("/chat", (ChatDialect(), CursorDialect()))
