"""A bounded map that forgets what was not asked for lately."""

from __future__ import annotations

from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(Generic[K, V]):
    """
    Keeps at least half of `size` entries, those asked for last, and never more than `size`.

    Two dicts: when the young one has half of them it becomes the old one, and what the old one had
    is gone. So nothing is done for each entry that goes. A dict that loses its first entry for each
    new one looks cheaper and is not: to find its first, it walks past the places of all that were
    deleted, and every now and then it moves as a whole.
    """

    def __init__(self, size: int) -> None:
        if size < 2:
            raise ValueError("there must be room for two")
        self._half = size // 2
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def __len__(self) -> int:
        """Return how many places are taken; what was asked for again may have two."""
        return len(self._young) + len(self._old)

    def get(self, key: K) -> V | None:
        """Return what was put under a key, if it is still there."""
        value = self._young.get(key)
        if value is None:
            value = self._old.get(key)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: K, value: V) -> None:
        """Keep a value, which is not None."""
        if len(self._young) >= self._half:
            self._old, self._young = self._young, {}
        self._young[key] = value
