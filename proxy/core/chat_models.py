"""
Which models' Chat Completions requests are translated.

Some models exist for Chat Completions only, and some keys may use one endpoint and not the other.
Nobody tells beforehand, so upstream is asked by the first request, and what it refuses is left to
plain HTTP for a while: a model's refusal costs one round trip, not one at every turn.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from cachetools import TTLCache

from proxy.core.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REMEMBERED = 4096  # refused models of all principals; the oldest go first


class TranslatedModels:
    """
    The models that `patterns` allow, but for those that were refused lately.

    A pattern is a model's name in which `*` stands for any characters. `timer` returns monotonic
    seconds.
    """

    def __init__(
        self, patterns: Sequence[str], *, retry_after_s: float, timer: Callable[[], float]
    ) -> None:
        written = ("".join(".*" if c == "*" else re.escape(c) for c in each) for each in patterns)
        self._allowed = re.compile(
            "|".join(f"(?:{each})" for each in written) or r"(?!)", re.DOTALL
        )
        self._refused: TTLCache[tuple[str, str], None] = TTLCache(
            REMEMBERED, retry_after_s, timer=timer
        )

    def refuse(self, principal: str, model: str) -> None:
        """Note that upstream refused this model to this principal."""
        self._refused[principal, model] = None

    def objection(self, principal: str, model: str | None) -> Reason | None:
        """Return why a request for this model is not to be translated, None if it may be."""
        if model is None or self._allowed.fullmatch(model) is None:
            return Reason.MODEL_NOT_TRANSLATED
        return Reason.MODEL_REFUSED if (principal, model) in self._refused else None
