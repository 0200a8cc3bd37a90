"""
Which body was this one, before it grew: an index over the beginnings of bodies.

An agent's next body is its last one with more after the last item, byte for byte. So a body that
was seen is remembered as its length L up to the end of its last item, and a keyed digest of those
L bytes; no bytes are kept. To find it again without knowing where to look, it is filed under the
digest of its first 2^k bytes, the largest power of two within L. A look-up takes the running
digest of the new body at each power of two, in one pass at memory speed, and then checks the few
lengths filed in the buckets it met. Ten thousand conversations that share their first 20 KB cost
no more than ten.

The digest is XXH3-128 with a secret seed of the process. It decides which bytes are taken for
known, so it must not be guessable from outside; the principal is part of the address, so that a
look-up sees nothing of anybody else's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import xxhash

if TYPE_CHECKING:
    from proxy.core.request import Prefix

SMALLEST_POWER = 4  # no item ends within the first 16 bytes of a body
BucketKey: TypeAlias = tuple[str, int, bytes]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a prefix is filed; needed to take it out again."""

    bucket: BucketKey
    length: int
    digest: bytes


class PrefixIndex:
    """
    Prefixes of bodies, by their bytes.

    `seed` (64 bits) must be random per process and secret.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._buckets: dict[BucketKey, dict[int, dict[bytes, Prefix]]] = {}

    def __len__(self) -> int:
        """How many prefixes are filed."""
        return sum(len(same) for bucket in self._buckets.values() for same in bucket.values())

    def find(self, principal: str, body: bytes) -> list[Prefix]:
        """Return all filed prefixes with which `body` begins, longest first."""
        found: list[Prefix] = []
        view = memoryview(body)
        running = xxhash.xxh3_128(seed=self._seed)
        done = 0
        for power in range(SMALLEST_POWER, len(body).bit_length()):
            running.update(view[done : 1 << power])
            done = 1 << power
            bucket = self._buckets.get((principal, power, running.digest()))
            if bucket:
                found += self._matches(bucket, view, running.copy(), done)
        found.reverse()
        return found

    @staticmethod
    def _matches(
        bucket: dict[int, dict[bytes, Prefix]],
        view: memoryview,
        running: xxhash.xxh3_128,
        done: int,
    ) -> list[Prefix]:
        matches = []
        for length in sorted(bucket):
            if length > len(view):
                break
            running.update(view[done:length])
            done = length
            if prefix := bucket[length].get(running.digest()):
                matches.append(prefix)
        return matches

    def put(self, principal: str, body: bytes, prefix: Prefix) -> Address | None:
        """
        File the prefix of a body and return its address, or None if it is too short to file.

        A prefix of the same bytes that is filed already is replaced.
        """
        power = prefix.length.bit_length() - 1
        if power < SMALLEST_POWER:
            return None
        view = memoryview(body)
        running = xxhash.xxh3_128(view[: 1 << power], seed=self._seed)
        bucket = (principal, power, running.digest())
        running.update(view[1 << power : prefix.length])
        address = Address(bucket, prefix.length, running.digest())
        same = self._buckets.setdefault(bucket, {}).setdefault(prefix.length, {})
        same[address.digest] = prefix
        return address

    def drop(self, address: Address, prefix: Prefix) -> None:
        """Take a prefix out, if it still is the one filed at `address`."""
        bucket = self._buckets.get(address.bucket, {})
        same = bucket.get(address.length, {})
        if same.get(address.digest) is not prefix:
            return
        del same[address.digest]
        if not same:
            del bucket[address.length]
        if not bucket:
            del self._buckets[address.bucket]
