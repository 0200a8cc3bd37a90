"""The bounded map: what is asked for stays, what is not goes, and there is never too much."""

from __future__ import annotations

import random

import pytest

from proxy.core.recent import Recent


def test_what_is_put_is_there() -> None:
    """And what is not, is not."""
    recent: Recent[str, int] = Recent(4)
    recent.put("a", 1)
    assert (recent.get("a"), recent.get("b")) == (1, None)
    recent.put("a", 2)
    assert recent.get("a") == 2


@pytest.mark.parametrize("size", [2, 3, 10, 1000])
def test_it_is_never_too_large_and_keeps_the_latest(size: int) -> None:
    """Of whatever was put, the latest half is there, and no more than the size."""
    recent: Recent[int, int] = Recent(size)
    for number in range(5 * size):
        recent.put(number, -number)
        assert len(recent) <= size
        latest = range(max(0, number - size // 2 + 1), number + 1)
        assert all(recent._young.get(each, recent._old.get(each)) == -each for each in latest)
    assert recent.get(0) is None


def test_what_is_asked_for_stays() -> None:
    """One entry that is asked for now and then outlives thousands that are not."""
    recent: Recent[int, str] = Recent(100)
    recent.put(-1, "kept")
    for number in range(10_000):
        recent.put(number, "passing")
        if number % 40 == 0:
            assert recent.get(-1) == "kept"


def test_as_a_model_would() -> None:
    """Whatever is asked and put, an answer is the latest value or none at all."""
    rng, recent, model = random.Random(7), Recent[int, int](50), dict[int, int]()
    for number in range(20_000):
        key = rng.randrange(200)
        if rng.random() < 0.5:
            model[key] = number
            recent.put(key, number)
        else:
            assert recent.get(key) in (None, model.get(key))
        assert len(recent) <= 50


def test_there_must_be_room() -> None:
    """Half of one is none."""
    with pytest.raises(ValueError, match="two"):
        Recent(1)
