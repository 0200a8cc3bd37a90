"""
Which body was this one, before it grew: an index over the beginnings of bodies.

An agent's next body is its last one with more after the last item, byte for byte. So a body that
was seen is remembered as its length L up to the end of its last item, and a keyed digest of those
L bytes; no bytes are kept. To find it again without knowing where to look, it is filed in a bucket:
under the digest of its first P bytes, where P is the largest power of two within L. A look-up takes
the running digest of the new body at each power of two, in one pass at memory speed, and then
checks the few lengths filed in the buckets it met.

Many conversations may share their first P bytes (the same instructions and tools), and then share
a bucket. One that holds `CROWD` lengths is refined: what comes later is filed under a P nearer to
its end, on a grid four times as fine or finer, and a look-up that meets a refined bucket visits
those places too. So ten thousand conversations that share their beginning cost little more than
ten.

The digest is XXH3-128 with a secret seed of the process. It decides which bytes are taken for
known, so it must not be guessable from outside; the principal is part of the address, so that a
look-up sees nothing of anybody else's.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

import xxhash

if TYPE_CHECKING:
    from proxy.core.request import Prefix

SMALLEST_POWER = 4  # no item ends within the first 16 bytes of a body
BucketKey: TypeAlias = tuple[str, int, bytes]


# How many lengths a bucket holds before it is refined, and how far that goes.
CROWD = 8
FINENESS = 4
SMALLEST_STEP = 64


@dataclass(frozen=True, slots=True)
class Address:
    """Where a prefix is filed, by way of which buckets; needed to take it out again."""

    path: tuple[BucketKey, ...]
    length: int
    digest: bytes


class _Bucket:
    """
    Prefixes that share their first bytes, by length and digest.

    `step` is the grid that it is on, `beneath` how many are filed in finer buckets instead.
    """

    __slots__ = ("beneath", "by_length", "step")

    def __init__(self, step: int) -> None:
        self.step = step
        self.beneath = 0
        self.by_length: dict[int, dict[bytes, Prefix]] = {}


class PrefixIndex:
    """
    Prefixes of bodies, by their bytes.

    `seed` (64 bits) must be random per process and secret.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._buckets: dict[BucketKey, _Bucket] = {}

    def __len__(self) -> int:
        """How many prefixes are filed."""
        return sum(
            len(same) for bucket in self._buckets.values() for same in bucket.by_length.values()
        )

    def find(self, principal: str, body: bytes) -> list[Prefix]:
        """Return all filed prefixes with which `body` begins, longest first."""
        found: list[Prefix] = []
        view = memoryview(body)
        running = xxhash.xxh3_128(seed=self._seed)
        places = [1 << power for power in range(SMALLEST_POWER, len(body).bit_length())]
        done = 0
        while places:
            place = heappop(places)
            if place == done:
                continue
            running.update(view[done:place])
            done = place
            if bucket := self._buckets.get((principal, place, running.digest())):
                found += self._matches(bucket, view, running.copy(), place)
                for finer in self._finer_places(bucket, place, len(body)):
                    heappush(places, finer)
        found.sort(key=attrgetter("length"), reverse=True)
        return found

    @staticmethod
    def _finer_places(bucket: _Bucket, place: int, end: int) -> list[int]:
        if not bucket.beneath:
            return []
        return [
            place + times * step
            for step in _finer_steps(bucket.step)
            for times in range(1, FINENESS)
            if place + times * step <= end
        ]

    @staticmethod
    def _matches(
        bucket: _Bucket, view: memoryview, running: xxhash.xxh3_128, done: int
    ) -> list[Prefix]:
        matches = []
        for length in sorted(bucket.by_length):
            if length > len(view):
                break
            running.update(view[done:length])
            done = length
            if prefix := bucket.by_length[length].get(running.digest()):
                matches.append(prefix)
        return matches

    def put(self, principal: str, body: bytes, prefix: Prefix) -> Address | None:
        """
        File the prefix of a body and return its address, or None if it is too short to file.

        A prefix of the same bytes that is filed already is replaced.
        """
        length = prefix.length
        power = length.bit_length() - 1
        if power < SMALLEST_POWER:
            return None
        view = memoryview(body)
        place = step = 1 << power
        running = xxhash.xxh3_128(view[:place], seed=self._seed)
        path = [(principal, place, running.digest())]
        while True:
            bucket = self._bucket(path[-1], step)
            steps = [finer for finer in _finer_steps(bucket.step) if finer <= length - place]
            if len(bucket.by_length) < CROWD or length in bucket.by_length or not steps:
                break
            step = steps[0]
            finer = place + (length - place) // step * step
            running.update(view[place:finer])
            place = finer
            path.append((principal, place, running.digest()))
        running.update(view[place:length])
        same = bucket.by_length.setdefault(length, {})
        address = Address(tuple(path), length, running.digest())
        if address.digest not in same:
            for key in path[:-1]:
                self._buckets[key].beneath += 1
        same[address.digest] = prefix
        return address

    def _bucket(self, key: BucketKey, step: int) -> _Bucket:
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(step)
        return bucket

    def drop(self, address: Address, prefix: Prefix) -> None:
        """Take a prefix out, if it still is the one filed at `address`."""
        bucket = self._buckets.get(address.path[-1])
        same = bucket.by_length.get(address.length, {}) if bucket else {}
        if bucket is None or same.get(address.digest) is not prefix:
            return
        del same[address.digest]
        if not same:
            del bucket.by_length[address.length]
        for key in address.path[:-1]:
            self._buckets[key].beneath -= 1
        for key in address.path:
            if not (self._buckets[key].by_length or self._buckets[key].beneath):
                del self._buckets[key]


def _finer_steps(step: int) -> list[int]:
    """Return the steps to which a bucket on this one is refined, the largest first."""
    finer = []
    while (step := step // FINENESS) >= SMALLEST_STEP:
        finer.append(step)
    return finer
