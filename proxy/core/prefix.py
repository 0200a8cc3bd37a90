"""
Which body was this one, before it grew: an index over the beginnings of bodies.

An agent's next body is its last one with more after the last item, byte for byte. So a body that
was seen is remembered as its length L up to the end of its last item, and a keyed digest of those
L bytes; no bytes are kept. To find it again without knowing where to look, it is filed in a bucket:
under the digest of its first P bytes, where P is the largest power of two within L. A look-up takes
the digest of the new body at the largest power of two at which anything is filed, checks the few
lengths filed in that bucket, the longest first, and goes on to smaller powers only if it must.

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

from bisect import bisect_right
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
    digest: bytes


class Walk:
    """
    The digests of a body's beginnings, each computed once and from the nearest one before it.

    A turn looks its body up and later files it under nearly the same places: with one walk for
    both, filing reads only what is new.
    """

    __slots__ = ("_digests", "_places", "_states", "_view")

    def __init__(self, body: bytes, seed: int) -> None:
        self._view = memoryview(body)
        self._digests: dict[int, bytes] = {}
        self._places = [0]
        self._states = [xxhash.xxh3_128(seed=seed)]

    def __len__(self) -> int:
        """How long the body is."""
        return len(self._view)

    def prepare(self, length: int) -> None:
        """Compute what filing a prefix of this length takes, most likely."""
        self.digest(1 << length.bit_length() - 1)
        self.digest(length)

    def digest(self, length: int) -> bytes:
        """Return the digest of the first `length` bytes."""
        digest = self._digests.get(length)
        if digest is None:
            index = bisect_right(self._places, length)
            state = self._states[index - 1].copy()
            state.update(self._view[self._places[index - 1] : length])
            self._places.insert(index, length)
            self._states.insert(index, state)
            digest = self._digests[length] = state.digest()
        return digest


class _Bucket:
    """
    Prefixes that share their first bytes, by digest, and how many there are of each length.

    `step` is the grid that it is on, `beneath` how many are filed in finer buckets instead.
    """

    __slots__ = ("beneath", "key", "lengths", "prefixes", "step")

    def __init__(self, key: BucketKey, step: int) -> None:
        self.key = key
        self.step = step
        self.beneath = 0
        self.lengths: dict[int, int] = {}
        self.prefixes: dict[bytes, Prefix] = {}


class PrefixIndex:
    """
    Prefixes of bodies, by their bytes.

    `seed` (64 bits) must be random per process and secret.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._buckets: dict[BucketKey, _Bucket] = {}
        # How many buckets there are at each place, so that a look-up visits no other.
        self._places: dict[str, dict[int, int]] = {}

    def __len__(self) -> int:
        """How many prefixes are filed."""
        return sum(len(bucket.prefixes) for bucket in self._buckets.values())

    def walk(self, body: bytes, endpoint: str = "") -> Walk:
        """
        Return what `find` and `put` of this body should share.

        Bodies that are read otherwise at another endpoint are digested with another seed there, so
        that none is found by the bytes of the other.
        """
        seed = self._seed
        if endpoint:
            seed ^= xxhash.xxh3_64_intdigest(endpoint.encode(), self._seed)
        return Walk(body, seed)

    def find(self, principal: str, body: bytes, walk: Walk | None = None) -> list[Prefix]:
        """Return all filed prefixes with which `body` begins, longest first."""
        return list(self.search(principal, walk or self.walk(body)))

    def search(self, principal: str, walk: Walk) -> Iterator[Prefix]:
        """
        Yield the filed prefixes with which the body of `walk` begins, longest first.

        The first one costs a single digest of as many bytes, and nobody asks for many more.
        """
        filed = self._places.get(principal)
        if filed is None:
            return
        for power in range(len(walk).bit_length() - 1, SMALLEST_POWER - 1, -1):
            place = 1 << power
            if place not in filed:
                continue
            bucket = self._buckets.get((principal, place, walk.digest(place)))
            if bucket is None:
                continue
            if bucket.beneath:
                found = self._matches_beneath(bucket, place, walk, filed)
                yield from sorted(found, key=attrgetter("length"), reverse=True)
            else:
                yield from _matches(bucket, walk)

    def _matches_beneath(
        self, bucket: _Bucket, place: int, walk: Walk, filed: Mapping[int, int]
    ) -> Iterator[Prefix]:
        """Yield, in no order, what matches in a refined bucket and in the finer ones."""
        yield from _matches(bucket, walk)
        principal, end, done = bucket.key[0], len(walk), place
        places = [finer for finer in _finer_places(bucket, place, end) if finer in filed]
        heapify(places)
        while places:
            place = heappop(places)
            if place == done:
                continue
            done = place
            if finer_bucket := self._buckets.get((principal, place, walk.digest(place))):
                yield from _matches(finer_bucket, walk)
                if finer_bucket.beneath:
                    for finer in _finer_places(finer_bucket, place, end):
                        if finer in filed:
                            heappush(places, finer)

    def put(
        self, principal: str, body: bytes, prefix: Prefix, walk: Walk | None = None
    ) -> Address | None:
        """
        File the prefix of a body and return its address, or None if it is too short to file.

        A prefix of the same bytes that is filed already is replaced. `walk` is of this body.
        """
        length = prefix.length
        power = length.bit_length() - 1
        if power < SMALLEST_POWER:
            return None
        walk = walk or self.walk(body)
        place = step = 1 << power
        bucket = self._bucket(principal, place, walk, step)
        path = [bucket.key]
        while len(bucket.lengths) >= CROWD and length not in bucket.lengths:
            steps = [finer for finer in _finer_steps(bucket.step) if finer <= length - place]
            if not steps:
                break
            step = steps[0]
            place += (length - place) // step * step
            bucket = self._bucket(principal, place, walk, step)
            path.append(bucket.key)
        digest = walk.digest(length)
        if digest not in bucket.prefixes:
            bucket.lengths[length] = bucket.lengths.get(length, 0) + 1
            for key in path[:-1]:
                self._buckets[key].beneath += 1
        bucket.prefixes[digest] = prefix
        return Address(tuple(path), digest)

    def _bucket(self, principal: str, place: int, walk: Walk, step: int) -> _Bucket:
        key = (principal, place, walk.digest(place))
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(key, step)
            places = self._places.setdefault(principal, {})
            places[place] = places.get(place, 0) + 1
        return bucket

    def drop(self, address: Address, prefix: Prefix) -> None:
        """Take a prefix out, if it still is the one filed at `address`."""
        bucket = self._buckets.get(address.path[-1])
        if bucket is None or bucket.prefixes.get(address.digest) is not prefix:
            return
        del bucket.prefixes[address.digest]
        _count_down(bucket.lengths, prefix.length)
        for key in address.path[:-1]:
            self._buckets[key].beneath -= 1
        for key in address.path:
            emptied = self._buckets[key]
            if not (emptied.prefixes or emptied.beneath):
                del self._buckets[key]
                principal, place, _ = key
                _count_down(self._places[principal], place)
                if not self._places[principal]:
                    del self._places[principal]


def _matches(bucket: _Bucket, walk: Walk) -> Iterator[Prefix]:
    """Yield the prefixes of one bucket with which the body begins, longest first."""
    end = len(walk)
    for length in sorted(bucket.lengths, reverse=True):
        if length <= end and (prefix := bucket.prefixes.get(walk.digest(length))):
            yield prefix


def _count_down(counts: dict[int, int], key: int) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def _finer_places(bucket: _Bucket, place: int, end: int) -> list[int]:
    return [
        place + times * step
        for step in _finer_steps(bucket.step)
        for times in range(1, FINENESS)
        if place + times * step <= end
    ]


def _finer_steps(step: int) -> list[int]:
    """Return the steps to which a bucket on this one is refined, the largest first."""
    finer = []
    while (step := step // FINENESS) >= SMALLEST_STEP:
        finer.append(step)
    return finer
