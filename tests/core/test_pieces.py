"""Parts of something long are kept in pieces of some size, and are the same when joined."""

from __future__ import annotations

import random

import pytest

from proxy.core.pieces import PIECE_BYTES, keep


@pytest.mark.parametrize("most_bytes", [1, 2, 100, 5000, 300_000])
def test_parts_of_any_size_are_the_whole_when_joined(most_bytes: int) -> None:
    """However it was cut; and there are no more pieces than the bytes ask for."""
    rng = random.Random(most_bytes)
    pieces: list[bytes] = []
    parts = [
        rng.randbytes(rng.randint(0, most_bytes)) for _ in range(3000 if most_bytes < 9999 else 30)
    ]
    for part in parts:
        keep(pieces, part)
    whole = b"".join(parts)
    assert b"".join(pieces) == whole
    assert len(pieces) <= 1 + len(whole) // PIECE_BYTES


def test_a_large_part_is_not_copied() -> None:
    """Behind another large one it is kept as it came."""
    pieces = [b"x" * PIECE_BYTES]
    part = b"y" * 1_000_000
    keep(pieces, part)
    assert pieces[1] is part


def test_an_empty_part_is_one_too() -> None:
    """That something has begun can be told, whatever it has."""
    pieces: list[bytes] = []
    keep(pieces, b"")
    assert pieces == [b""]
