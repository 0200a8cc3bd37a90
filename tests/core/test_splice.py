"""The byte offsets of JSON members: the same members as a parser's, and nothing else touched."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.core.splice import Edit, Member, edited, elements, find, members, put, replace

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
SCALARS = SCALARS.filter(lambda value: value not in (float("inf"), float("-inf")))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
WHITESPACE = st.text(" \t\n\r", max_size=3)


@st.composite
def texts(draw: st.DrawFn) -> tuple[str, list[tuple[str, Any]]]:
    """Write an object by hand, with whitespace and escapes anywhere; return it with its pairs."""
    pairs = draw(st.lists(st.tuples(st.text(max_size=5), VALUES), max_size=6))
    parts = []
    for key, value in pairs:
        spelled = draw(st.sampled_from([json.dumps(key), json.dumps(key, ensure_ascii=False)]))
        if draw(st.booleans()):
            spelled = '"' + "".join(_escape(c) for c in key) + '"'
        indent = draw(st.sampled_from([None, 1]))
        written = json.dumps(value, ensure_ascii=draw(st.booleans()), indent=indent)
        space = [draw(WHITESPACE) for _ in range(4)]
        parts.append(f"{space[0]}{spelled}{space[1]}:{space[2]}{written}{space[3]}")
    around = [draw(WHITESPACE) for _ in range(3)]
    body = ",".join(parts) or around[2]
    return f"{around[0]}{{{body}}}{around[1]}", pairs


def _escape(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def by_the_standard_library(text: bytes) -> dict[str, Any] | None:
    """Return what json.loads reads, or None where it reads no object without doubt."""
    unique = False

    def pairs_hook(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # The outermost object is finished last, so what stays is about its keys alone.
        nonlocal unique
        unique = len({key for key, _ in pairs}) == len(pairs)
        return dict(pairs)

    try:
        value = json.loads(
            text.decode("utf-8"), object_pairs_hook=pairs_hook, parse_constant=_refuse
        )
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and unique else None


@given(texts())
def test_members_are_those_of_a_parser(case: tuple[str, list[tuple[str, Any]]]) -> None:
    """Each member's bytes, parsed alone, are the value that a parser finds under that key."""
    written, pairs = case
    text = written.encode("utf-8", "surrogatepass")
    if len({key for key, _ in pairs}) != len(pairs):
        with pytest.raises(ValueError, match="duplicate"):
            members(text)
        return

    found = members(text)

    assert [key for key, _ in pairs] == [member.key for member in found]
    values = [json.loads(text[member.start : member.end]) for member in found]
    assert [value for _, value in pairs] == values


PIECES = b"""
{ } [ ] , : " \\ "a" "b": "a": 1 -1.5e3 null true NaN {"a":1} {"a": "x"
\\u0061 \\ud83d \\ude00 \\"
""".split()
JSON_BYTES = st.lists(
    st.sampled_from([*PIECES, b" ", b"\n", b"\xff", b"\xc3\xa9", b"\x00"]),
    max_size=14,
).map(b"".join)


@given(JSON_BYTES | st.binary(max_size=30) | JSON_BYTES.map(lambda inner: b"{" + inner + b"}"))
@example(b'{"a":1,"a":2}')
@example(b'{"a":1,"\\u0061":2}')
@example(b'{"a":{"b":1,"a":2},"b":22,"a":{"b":2}}')
@example(b'{"\\ud83d":1,"\\ud83e":2}')
@example(b'{"\\ud83d":1,"\\uD83D":2}')
def test_any_bytes_are_read_as_a_parser_reads_them_or_refused(text: bytes) -> None:
    """Hostile text is refused with ValueError, or read exactly as the standard library does."""
    expected = by_the_standard_library(text)
    try:
        found = members(text)
    except ValueError:
        assert expected is None
        return
    got = {m.key: text[m.start : m.end] for m in found}
    try:
        text.decode()
    except UnicodeDecodeError:
        return
    assert expected is not None
    assert expected == {key: json.loads(value) for key, value in got.items()}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b" ",
        b"[]",
        b"1",
        b"null",
        b'"{}"',
        b"{",
        b"{}{}",
        b"{} x",
        b"{}\x00",
        b'{"a":1,}',
        b'{"a":NaN}',
        b'{"a":01}',
        b'{"a":"\x01"}',
        b'{"\xff":1}',
        b"\xef\xbb\xbf{}",
        b'{"a":"\\ud83d" "b"}',
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"s":"\\ud83d","a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_what_is_not_one_plain_object_is_refused(text: bytes) -> None:
    """Only a JSON object by the letter of the grammar has members."""
    with pytest.raises(ValueError, match=r"."):
        members(text)


def test_offsets_leave_whitespace_out() -> None:
    """A value begins at its first byte and ends after its last."""
    text = b' { "a" : [1 , 2] , "b":"x" } '

    assert members(text) == [Member("a", 9, 16), Member("b", 23, 26)]


def test_lone_surrogates_are_read_and_kept() -> None:
    """Half an emoji in a value or a key neither stops the reader nor changes."""
    text = b'{"\\ud83d":"\\uDE00","t":["\\\\ud83d","\\ud83d\\ude00"],"x":"\\ud83d"}'

    found = members(text)

    assert [member.key for member in found] == ["\ud83d", "t", "x"]
    assert [text[member.start : member.end] for member in found] == [
        b'"\\uDE00"',
        b'["\\\\ud83d","\\ud83d\\ude00"]',
        b'"\\ud83d"',
    ]


@given(st.lists(VALUES, max_size=6), st.sampled_from([None, 2]))
def test_elements_are_those_of_a_parser(values: list[Any], indent: int | None) -> None:
    """Each element's bytes, parsed alone, are the element."""
    text = json.dumps(values, indent=indent).encode()

    assert values == [json.loads(element) for element in elements(text)]


_SPACE = " \t\n\r"
_SCAN = json.JSONDecoder(parse_constant=_refuse).raw_decode


def walked(text: bytes) -> list[bytes] | None:
    """Find the elements of an array by stepping from one to the next, or None if it is none."""

    def skip(position: int) -> int:
        while position < len(scanned) and scanned[position] in _SPACE:
            position += 1
        return position

    scanned = text.decode("latin-1")  # where a string ends does not depend on its characters
    found: list[bytes] = []
    try:
        position = skip(0)
        if scanned[position] != "[":
            return None
        position = skip(position + 1)
        while scanned[position] != "]" or found:
            _, end = _SCAN(scanned, position)
            found.append(text[position:end])
            position = skip(end)
            if scanned[position] == "]":
                break
            if scanned[position] != ",":
                return None
            position = skip(position + 1)
        return found if skip(position + 1) == len(scanned) else None
    except (ValueError, IndexError, RecursionError):
        return None


@given(
    st.lists(VALUES | st.sampled_from(["\ud83d", {"\ude00": ["\ud83d\ude00"]}]), max_size=5),
    WHITESPACE,
    st.booleans(),
    st.randoms(),
)
@example([], " ", False, random.Random(1))
@example(["\ud83d", 1, "\\ud83d"], "", True, random.Random(2))
def test_elements_stand_where_a_walk_finds_them(
    values: list[Any], space: str, ascii_only: bool, rng: random.Random
) -> None:
    """Byte for byte, in order, whatever is between them; and a damaged array is none to both."""
    spelled = [json.dumps(value, ensure_ascii=ascii_only) for value in values]
    text = f"{space}[{space}{f'{space},{space}'.join(spelled)}{space}]{space}"
    raw = text.encode("utf-8", "replace")
    at = rng.randrange(len(raw))
    damaged = raw[:at] + rng.choice([b"", b",", b"]", b"[", b'"', b"\\", b"0"]) + raw[at + 1 :]

    assert elements(raw) == walked(raw)
    try:
        found: list[bytes] | None = elements(damaged)
    except ValueError:
        found = None
    assert found == walked(damaged)


@pytest.mark.parametrize("text", [b"{}", b"[1,]", b"", b"[1] 2", b"[" * 100_000])
def test_what_is_not_one_plain_array_is_refused(text: bytes) -> None:
    """Only a JSON array has elements."""
    with pytest.raises(ValueError, match=r"."):
        elements(text)


def test_find_returns_the_member_or_none() -> None:
    """A member is looked up by its unescaped key."""
    found = members(b'{"\\u0061":1}')

    assert Member("a", 10, 11) == find(found, "a")
    assert find(found, "b") is None


def test_replace_changes_one_value_only() -> None:
    """The same bytes elsewhere, in strings or deeper, stay as they are."""
    text = b'{"t":"\\"id\\":\\"x\\"", "in":{"id":"x"},\n "i\\u0064" : "x" , "n":1.0}'

    assert replace(text, "id", b"null") == (
        b'{"t":"\\"id\\":\\"x\\"", "in":{"id":"x"},\n "i\\u0064" : null , "n":1.0}'
    )


def test_replace_of_a_missing_member_is_an_error() -> None:
    """Nothing is added by replacing."""
    with pytest.raises(KeyError):
        replace(b'{"a":{"id":1}}', "id", b"null")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"{}", b'{"k":[]}'),
        (b" { } ", b' {"k":[] } '),
        (b'{"a":1 }', b'{"a":1,"k":[] }'),
        (b'{"k":1,"a":2}', b'{"k":[],"a":2}'),
    ],
)
def test_put_replaces_or_appends(text: bytes, expected: bytes) -> None:
    """A missing member is appended after the last one."""
    assert expected == put(text, "k", b"[]")


def test_edits_are_made_in_the_order_of_the_text() -> None:
    """Edits may come in any order, and insert, replace or delete."""
    assert edited(b"abcdef", [Edit(4, 5, b""), Edit(0, 1, b"AA"), Edit(2, 2, b"-")]) == b"AAb-cdf"


def test_a_flood_of_members_is_refused() -> None:
    """An object of a hundred thousand members costs one skim, not a walk."""
    text = b"{" + b",".join(b'"%d":1' % i for i in range(100_000)) + b"}"

    with pytest.raises(ValueError, match="too many"):
        members(text)
