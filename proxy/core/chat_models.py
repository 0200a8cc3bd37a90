"""
Which Chat Completions requests are translated: by their model, and by what upstream said lately.

Some models exist for Chat Completions only, some keys may use one endpoint and not the other, and
some settings are taken here and refused there. Nobody tells beforehand, so upstream is asked by the
first request, and what it refuses is left to plain HTTP for a while: a refusal costs one round
trip, not one at every turn.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from cachetools import TTLCache

from proxy.core.reasons import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

REMEMBERED = 4096  # refusals of all principals; the oldest go first


class TranslatedModels:
    """
    The models that `patterns` allow, but for those that were refused lately, or their settings.

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
        self._refused: TTLCache[tuple[str, str | int], Reason] = TTLCache(
            REMEMBERED, retry_after_s, timer=timer
        )

    def refuse_model(self, principal: str, model: str) -> None:
        """Note that upstream has no such model for this principal."""
        self._refused[principal, model] = Reason.MODEL_REFUSED

    def refuse_settings(self, principal: str, settings: bytes) -> None:
        """Note that upstream refused these settings, which Chat Completions took."""
        self._refused[principal, hash(settings)] = Reason.TRANSLATION_REFUSED

    def objection(self, principal: str, model: str | None, settings: bytes) -> Reason | None:
        """Return why a request with this model is not to be translated, None if it may be."""
        if model is None or self._allowed.fullmatch(model) is None:
            return Reason.MODEL_NOT_TRANSLATED
        if not self._refused:
            return None
        about_model = self._refused.get((principal, model))
        return about_model or self._refused.get((principal, hash(settings)))
