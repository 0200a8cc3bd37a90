"""Something long that comes in parts, whose size the sender chooses."""

from __future__ import annotations

from typing import Final

PIECE_BYTES: Final = 4096


def keep(pieces: list[bytes], data: bytes) -> None:
    """
    Add a part to those that are here; joined, they are the whole.

    Small ones are put together: an object for each, of one byte or two, would take twenty times the
    memory that the sender is charged with. Large ones, which is what comes, are not copied.
    """
    if pieces and len(pieces[-1]) < PIECE_BYTES:
        pieces[-1] += data
    else:
        pieces.append(data)
