"""
The way of the prefix answers what the whole parse answers, or nothing.

The fuzz is differential: bodies full of what fools a scanner (`"input":[` inside strings, escapes,
white space, duplicate keys), grown and damaged at random, are read both ways and by `json`.
`TURNWIRE_FUZZ=1` makes it long.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from typing import Any

import pytest
import xxhash
from builders import body, message, user

from proxy.core.items import Fingerprinter
from proxy.core.prefix import CROWD, SMALLEST_STEP, PrefixIndex
from proxy.core.request import Prefix, TurnRequest, parse_body, parse_tail

FINGERPRINTS = Fingerprinter(b"0123456789abcdef")
ROOT = FINGERPRINTS.root("p")
SEED = 0x5EED
CASES = 200_000 if os.environ.get("TURNWIRE_FUZZ") else 2_000


def prefix_of(raw: bytes) -> Prefix:
    """Return what is remembered of a body."""
    request = parse_body(raw, ROOT, FINGERPRINTS)
    assert isinstance(request, TurnRequest)
    prefix = request.prefix()
    assert prefix is not None
    return prefix


LONG = user("x" * 400)
GROWN = [body(LONG), body(LONG, message("b")), body(LONG, message("b"), user("c" * 3000))]


def filed(*bodies: bytes, principal: str = "p") -> PrefixIndex:
    """Return an index that holds the prefixes of these bodies."""
    index = PrefixIndex(SEED)
    for raw in bodies:
        index.put(principal, raw, prefix_of(raw))
    return index


def test_all_beginnings_are_found_longest_first() -> None:
    """A body meets every shorter version of itself, and no longer one."""
    index = filed(*GROWN)

    assert index.find("p", GROWN[2]) == [prefix_of(raw) for raw in reversed(GROWN)]
    assert index.find("p", GROWN[1]) == [prefix_of(raw) for raw in reversed(GROWN[:2])]
    assert index.find("p", GROWN[0] + b"x") == [prefix_of(GROWN[0])]
    assert not index.find("p", GROWN[0].replace(b"xx", b"xy", 1))
    assert not index.find("p", b"")
    assert len(index) == 3


def test_an_index_shows_nothing_to_another_principal() -> None:
    """The same bytes of somebody else are unknown."""
    assert not filed(*GROWN).find("q", GROWN[2])


def test_an_index_is_keyed() -> None:
    """Where a prefix is filed can't be told without the secret."""
    raw = GROWN[0]
    addresses = {PrefixIndex(seed).put("p", raw, prefix_of(raw)) for seed in range(3)}

    assert len(addresses) == 3


def test_what_can_be_no_prefix_is_not_filed() -> None:
    """No item of a body ends within its first 16 bytes, but the shortest body is found."""
    index = PrefixIndex(SEED)
    raw = b'{"input":[{"role":"user","content":"a"}]}'

    assert index.put("p", raw, replace(prefix_of(raw), length=15)) is None
    assert len(index) == 0
    assert index.put("p", raw, prefix_of(raw)) is not None
    assert index.find("p", raw)


def test_lengths_around_a_power_of_two() -> None:
    """A prefix is found whatever its length, and with any number of bytes behind it."""
    for length in (15, 16, 17, 255, 256, 257, 511, 512, 513, 1024):
        raw = b"x" * length
        prefix = replace(prefix_of(GROWN[0]), length=length)
        index = PrefixIndex(SEED)
        filed = index.put("p", raw, prefix)
        for more in (0, 1, 255, 512):
            found = index.find("p", raw + b"x" * more)
            assert found == ([] if filed is None else [prefix]), (length, more)


def test_a_prefix_that_is_longer_than_the_body() -> None:
    """It may be filed beside a shorter one, which is found all the same."""
    index = PrefixIndex(SEED)
    prefixes = [replace(prefix_of(GROWN[0]), length=length) for length in (300, 400)]
    for prefix in prefixes:
        index.put("p", b"x" * 400, prefix)

    assert index.find("p", b"x" * 350) == prefixes[:1]


def test_a_prefix_of_the_same_bytes_takes_the_place() -> None:
    """The latest turn that had these bytes is the one that is found; the older goes unnoticed."""
    index = filed(GROWN[0])
    older = index.find("p", GROWN[0])[0]
    newer = replace(older)
    address = index.put("p", GROWN[0], newer)
    assert address is not None

    index.drop(address, older)
    assert index.find("p", GROWN[0])[0] is newer

    index.drop(address, newer)
    index.drop(address, newer)
    assert not index.find("p", GROWN[0])
    assert len(index) == 0


def test_a_crowd_with_one_beginning_is_found_and_leaves_nothing() -> None:
    """Thousands of conversations share their first bytes: each is found, all can be dropped."""
    rng = random.Random(3)
    shared = rng.randbytes(20_000)
    bodies = [
        shared[: rng.randrange(16, 20_000)] + rng.randbytes(rng.randrange(1, 12_000))
        for _ in range(1500)
    ]
    index = PrefixIndex(SEED)
    template = prefix_of(GROWN[0])
    rows = []
    for raw in bodies:
        prefix = replace(template, length=len(raw))
        rows.append((index.put("p", raw, prefix), prefix))
    assert len(index) == len(bodies)

    for raw, (_, prefix) in zip(bodies, rows, strict=True):
        assert any(found is prefix for found in index.find("p", raw + b"more"))
    assert index.find("p", bodies[0])[0] is rows[0][1]

    rng.shuffle(rows)
    for address, prefix in rows:
        assert address is not None
        index.drop(address, prefix)
    assert len(index) == 0
    assert not index._buckets


def grown_from(rng: random.Random, trunk: bytes, count: int) -> list[bytes]:
    """Return bodies that begin as each other do, for a while, and those that they grow into."""
    bodies: list[bytes] = []
    for _ in range(count):
        base = rng.choice([trunk, *bodies[-3:]])
        kept = base[: rng.randrange(16, len(base) + 1)] if rng.random() < 0.5 else base
        bodies.append(kept + rng.randbytes(rng.choice([1, 5, 60, 400, 3000])))
    return bodies


@pytest.mark.parametrize("seed", range(6))
def test_a_search_finds_what_trying_all_would_find(seed: int) -> None:
    """In whatever order, with how many in a bucket, filed and dropped: the longest comes first."""
    rng = random.Random(seed)
    trunk = rng.randbytes((40, 700, 3000, 5000, 9000, 20_000)[seed])
    bodies = grown_from(rng, trunk, 120 if seed < 3 else 600)
    template, index = prefix_of(GROWN[0]), PrefixIndex(SEED)
    filed_here: dict[bytes, tuple[Any, Prefix]] = {}
    for raw in bodies:
        prefix = replace(template, length=len(raw))
        filed_here[raw] = (index.put("p", raw, prefix), prefix)
    for raw in rng.sample(sorted(filed_here), len(filed_here) // 3):
        address, prefix = filed_here.pop(raw)
        index.drop(address, prefix)
    assert len(index) == len(filed_here)
    assert seed < 3 or any(bucket.beneath for bucket in index._buckets.values())

    asked = rng.sample(bodies, 60)
    for raw in (*asked, *(each + b"more" for each in asked), *(each[:-1] for each in asked)):
        longest_first = sorted(
            (prefix for known, (_, prefix) in filed_here.items() if raw.startswith(known)),
            key=lambda prefix: -prefix.length,
        )
        found = list(index.search("p", index.walk(raw)))
        assert list(map(id, found)) == list(map(id, longest_first))
        assert next(index.search("p", index.walk(raw)), None) is next(iter(longest_first), None)


def test_a_search_may_be_left_at_any_point() -> None:
    """What is filed while somebody looks is no trouble to the next one."""
    index = filed(*GROWN)
    search = index.search("p", index.walk(GROWN[2]))

    assert next(search) == prefix_of(GROWN[2])
    search.close()
    assert index.find("p", GROWN[2]) == [prefix_of(raw) for raw in reversed(GROWN)]


def test_a_look_up_does_not_go_through_a_crowd() -> None:
    """However many there are of one beginning, few lengths lie together."""
    shared = random.Random(4).randbytes(20_000)
    index = PrefixIndex(SEED)
    for number in range(3000):
        raw = shared + number.to_bytes(4, "big") * (1 + number)
        index.put("p", raw, replace(prefix_of(GROWN[0]), length=len(raw)))

    crowds = [len(bucket.lengths) for bucket in index._buckets.values()]
    assert max(crowds) <= CROWD + SMALLEST_STEP


def test_dropping_one_leaves_the_others() -> None:
    """Prefixes in one bucket, even of one length, do not depend on each other."""
    one, same_length, longer = (body(user("x" * 400 + end)) for end in ("a", "b", "cc"))
    index = filed(one, same_length, longer)
    address = index.put("p", one, kept := prefix_of(one))
    assert address is not None

    index.drop(address, kept)

    assert not index.find("p", one)
    assert index.find("p", same_length)
    assert index.find("p", longer)
    assert len(index) == 2


def test_a_walk_spares_work_and_changes_nothing() -> None:
    """Filing with the walk of the look-up gives the address that filing alone gives."""
    index, other = filed(*GROWN[:2]), filed(*GROWN[:2])
    walk = index.walk(GROWN[2])

    assert index.find("p", GROWN[2], walk) == other.find("p", GROWN[2])
    known = prefix_of(GROWN[2])
    assert index.put("p", GROWN[2], known, walk) == other.put("p", GROWN[2], known)
    assert index.find("p", GROWN[2]) == other.find("p", GROWN[2])


@pytest.mark.parametrize("lengths", [(5, 9, 3), (9, 5, 5), (0, 9), (9, 0)])
def test_a_walk_goes_in_any_order(lengths: tuple[int, ...]) -> None:
    """A digest does not depend on what was asked for before it."""
    walk = PrefixIndex(7).walk(b"x" * 9)

    for length in lengths:
        assert walk.digest(length) == xxhash.xxh3_128_digest(b"x" * length, seed=7)


# The fuzz.

STRINGS = [
    "a",
    '"input":[',
    "]}",
    "\\",
    '"',
    "[",
    ",",
    "\u00e9",
    "\n",
    '{"input":[1]}',
    '],"input":[',
    "\u2028",
    "\ud83d",
]
KEYS = ["a", "instructions", "model", "input ", "x]", '"', "novel", "stream"]
SPACES = ["", "", "", " ", "\n  ", "\t", "\r\n"]


class Writer:
    """Makes values and writes them as JSON, one in a certain hostile style."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def text(self) -> str:
        """Return text that looks like structure."""
        return "".join(self.random.choices(STRINGS, k=self.random.randrange(4)))

    def value(self, depth: int = 0) -> Any:
        """Return any JSON value."""
        kind = self.random.random()
        if kind < 0.4 or depth > 2:
            return self.text()
        if kind < 0.55:
            return self.random.choice([0, 1, 12, -1.5, 1e300, True, None])
        if kind < 0.7:
            return [self.value(depth + 1) for _ in range(self.random.randrange(3))]
        return self.item(depth)

    def item(self, depth: int = 0) -> dict[str, Any]:
        """Return an object."""
        names = ["input", "a", "content", "]", "role"]
        keys = self.random.sample(names, self.random.randrange(4))
        return {key: self.value(depth + 1) for key in keys}

    def members(self) -> dict[str, Any]:
        """Return settings."""
        return {key: self.value() for key in self.random.sample(KEYS, self.random.randrange(4))}

    def write(self, value: Any, style: int) -> str:
        """Spell a value; style 0 is compact, 1 spaced and escaped, 2 has white space anywhere."""
        space = (lambda: self.random.choice(SPACES)) if style == 2 else (lambda: " " * style)
        match value:
            case dict():
                return "{" + ",".join(self.pairs(value, style)) + space() + "}"
            case list():
                written = [space() + self.write(element, style) for element in value]
                return "[" + ",".join(written) + space() + "]"
        return json.dumps(
            value, ensure_ascii=style != 0 or (isinstance(value, str) and "\ud83d" in value)
        )

    def pairs(self, members: dict[str, Any], style: int) -> list[str]:
        """Spell the members of an object, without what stands between them."""
        return [
            f"{self.write(key, style)}{' ' * style}:{self.write(value, style)}"
            for key, value in members.items()
        ]


def grown(writer: Writer) -> tuple[bytes, bytes]:
    """Return a body, and one that an agent, or an adversary, may send after it."""
    rng = writer.random
    style = rng.randrange(3)
    items = [writer.item() for _ in range(rng.randrange(1, 4))]
    head, tail = writer.members(), writer.members()
    tail = {key: value for key, value in tail.items() if key not in head}
    listed = '"input":[' + ",".join(writer.write(item, style) for item in items)
    spelled = "{" + ",".join([*writer.pairs(head, style), listed])
    behind = "".join("," + pair for pair in writer.pairs(tail, style))
    space = rng.choice(SPACES)
    first = f"{spelled}{space}]{behind}}}"
    more = [
        writer.item() if rng.random() < 0.9 else writer.value() for _ in range(rng.randrange(4))
    ]
    appended = "".join(f"{rng.choice(SPACES)},{writer.write(item, style)}" for item in more)
    kind = rng.random()
    if kind < 0.3:
        behind = "".join("," + pair for pair in writer.pairs(writer.members(), style))
    elif kind < 0.4:
        behind += rng.choice(
            [',"input":[]', ',"\\u0069nput":[1]', ',"a":1,"a":2', ",", "]", ',"x":[1]']
        )
    elif kind < 0.45:
        appended += rng.choice([",", "]", ' ,"a"', ",1", "],[", '],"x":[', "\\", '"'])
    second = f"{spelled}{appended}{space}]{behind}}}".encode()
    return first.encode(), damaged(
        second, len(spelled.encode()), rng
    ) if rng.random() < 0.3 else second


def damaged(raw: bytes, boundary: int, rng: random.Random) -> bytes:
    """Return `raw` with one small accident, most often near the boundary."""
    place = rng.choice([rng.randrange(len(raw)), boundary + rng.randrange(-3, 6)])
    place = max(0, min(place, len(raw) - 1))
    return rng.choice(
        [
            raw[:place] + bytes([rng.randrange(256)]) + raw[place + 1 :],
            raw[:place] + raw[place + 1 :],
            raw[:place],
            raw[:place]
            + rng.choice([b" ", b",", b"]", b'"', b"[]", b"{}", b"\xef\xbb\xbf", b"\xc0"])
            + raw[place:],
            b"\xef\xbb\xbf" + raw,
        ]
    )


def by_the_standard_library(raw: bytes) -> Any:
    """Return what json reads, keeping duplicates in sight, or None where it reads nothing."""

    def refuse(text: str) -> None:
        raise ValueError(text)

    def pairs(members: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(members)) != len(members):
            raise ValueError("duplicate")
        return dict(members)

    try:
        return json.loads(raw.decode(), object_pairs_hook=pairs, parse_constant=refuse)
    except ValueError:
        return None


def check(raw: bytes, prefix: Prefix) -> bool:
    """Compare the two ways to read `raw`, and a third; tell whether the prefix gave an answer."""
    whole = parse_body(raw, ROOT, FINGERPRINTS)
    third = by_the_standard_library(raw)
    if isinstance(whole, TurnRequest):
        assert third is not None, raw
        assert json.loads(whole.full_message())["input"] == third["input"], raw
        settings = {setting.key: json.loads(setting.raw) for setting in whole.envelope.settings}
        assert {**settings, "input": third["input"]} == third, raw
    quick = parse_tail(raw, prefix, FINGERPRINTS)
    if quick is None:
        return False
    assert isinstance(whole, TurnRequest), (raw, whole)
    assert quick.histories == whole.histories[prefix.item_count :], raw
    assert quick.full_message() == whole.full_message(), raw
    assert quick.envelope == whole.envelope, raw
    one, other = quick.prefix(), whole.prefix()
    assert one is not None
    assert other is not None
    assert replace(one, frame=other.frame) == other, raw
    suffixes = [frame.suffix for frame in (one.frame, other.frame) if frame.suffix is not None]
    assert len({suffix.strip() for suffix in suffixes}) == 1, raw
    assert quick.compacts == whole.compacts, raw
    return True


@pytest.mark.timeout(600)
def test_the_prefix_way_answers_what_the_whole_parse_answers() -> None:
    """Whatever is read behind a known prefix is what a full parse of the body reads."""
    answers = refusals = 0
    for seed in range(CASES):
        first, second = grown(Writer(seed))
        request = parse_body(first, ROOT, FINGERPRINTS)
        if not isinstance(request, TurnRequest):
            continue  # two settings of one name, by chance
        prefix = request.prefix()
        assert prefix is not None
        assert check(first, prefix), first
        if second.startswith(first[: prefix.length]):
            answered = check(second, prefix)
            answers += answered
            refusals += not answered

    assert answers > CASES * 0.4
    assert refusals > CASES * 0.05
