"""Which models are translated: by their names, and by what upstream said of them lately."""

from __future__ import annotations

import pytest

from proxy.core.chat_models import TranslatedModels
from proxy.core.reasons import Reason


@pytest.mark.parametrize(
    ("patterns", "model", "allowed"),
    [
        (["*"], "gpt-5.2", True),
        (["*"], "a\nb", True),
        (["gpt-5*", "o3"], "gpt-5.2-mini", True),
        (["gpt-5*", "o3"], "o3", True),
        (["gpt-5*", "o3"], "o3-mini", False),
        (["gpt-5.2"], "gpt-5x2", False),
        (["gpt-?"], "gpt-5", False),
        (["*/gpt-*"], "openai/gpt-5", True),
        ([], "gpt-5", False),
        (["*"], None, False),
    ],
)
def test_a_pattern_is_a_name_with_stars(
    patterns: list[str], model: str | None, *, allowed: bool
) -> None:
    """Only a star is special, and the whole name must fit one of the patterns."""
    models = TranslatedModels(patterns, retry_after_s=60, timer=lambda: 0.0)

    assert models.objection("p", model, b"") is (None if allowed else Reason.MODEL_NOT_TRANSLATED)


def test_a_refused_model_is_left_alone_for_a_while() -> None:
    """A refusal holds for its principal and its model, until the time is over."""
    now = [0.0]
    models = TranslatedModels(["*"], retry_after_s=60, timer=lambda: now[0])
    models.refuse_model("p", "old")

    assert models.objection("p", "old", b"") is Reason.MODEL_REFUSED
    assert models.objection("p", "new", b"") is None
    assert models.objection("q", "old", b"") is None
    now[0] = 61.0
    assert models.objection("p", "old", b"") is None


def test_refused_settings_are_left_alone_for_a_while() -> None:
    """Other settings of the same model are translated, and those of another principal."""
    now = [0.0]
    models = TranslatedModels(["*"], retry_after_s=60, timer=lambda: now[0])
    models.refuse_settings("p", b"hot")

    assert models.objection("p", "m", b"hot") is Reason.TRANSLATION_REFUSED
    assert models.objection("p", "m", b"mild") is None
    assert models.objection("q", "m", b"hot") is None
    now[0] = 61.0
    assert models.objection("p", "m", b"hot") is None
