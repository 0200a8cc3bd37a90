"""Two JSON texts have one canonical form if, and only if, they mean the same value."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core import canonical as canonical_module
from proxy.core.canonical import JSON, parse, write

# Each row is one value in several spellings; no two rows mean the same.
ROWS: list[list[str]] = [
    ["1"],
    ["1.0", "1e0", "10e-1", "1.000", "0.1E+1", "100E-2"],
    ["-1"],
    ["-1.0", "-1E0"],
    ["0"],
    ["-0"],
    ["0.0", "0e5", "0.000", "0E-7"],
    ["-0.0", "-0e0"],
    ["true"],
    ["false"],
    ["null"],
    ["9007199254740991"],
    ["9007199254740992"],
    ["9007199254740993"],
    ["18446744073709551615"],
    ["18446744073709551616"],
    ["18446744073709551617"],
    ["1" + "0" * 399],
    ["1" + "0" * 398 + "1"],
    ["1e399", "10e398", "1" + "0" * 399 + ".0"],
    ["1e400"],
    ["1e401"],
    ["1e-400", "0.1e-399"],
    ["0.1", "1e-1", "0.10"],
    ["0.1000000000000000055511151231257827", "1000000000000000055511151231257827e-34"],
    ["1e99999999999999999999999999"],
    ["1e-99999999999999999999999999"],
    ['"1"'],
    ['"1.0"'],
    ['"true"'],
    ['""'],
    ['"a"', '"\\u0061"'],
    ['"\\u00e9"', '"\u00e9"'],
    ['"e\\u0301"'],
    ['"/"', '"\\/"'],
    ['"\\n"', '"\\u000a"'],
    ['"\\\\n"'],
    ['"\\ud83d\\ude00"', '"\U0001f600"'],
    ['"\\ud83d"'],
    ['"\\ude00\\ud83d"'],
    ['"\\u0000"'],
    ["[]", " [ ] "],
    ["{}", "{\n}"],
    ["[[]]"],
    ["[1,2]", "[ 1 , 2 ]"],
    ["[2,1]"],
    ["[12]"],
    ["[null]"],
    ['{"a":1,"b":2}', '{"b":2,"a":1}', '{ "\\u0061" : 1 , "b":2}'],
    ['{"a":2,"b":1}'],
    ['{"a":1,"b":2.0}'],
    ['{"a":1}'],
    ['{"a":null}'],
    ['{"a":{"b":1}}'],
    ['{"a":1,"b":null}'],
    ['{"1":1}'],
    ['["a,","b"]'],
    ['["a","b"]'],
    ['["a\\",\\"b"]'],
]

REFUSED: list[bytes] = [
    b"",
    b" ",
    b"nul",
    b"[1,]",
    b'{"a":1,}',
    b"[1] 2",
    b"[1",
    b"01",
    b"1.",
    b".5",
    b"+1",
    b"0x1",
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"[NaN]",
    b"'a'",
    b'"a\nb"',
    b'"\\x"',
    b'"\\u12"',
    b'{"a":1,"a":1}',
    b'{"a":1,"\\u0061":1}',
    b'[{"b":{"a":1,"a":2}}]',
    b'\xef\xbb\xbf{"a":1}',
    b'"\xff"',
    b'"\xed\xa0\xbd"',
    b"\xff\xfe1\x00",
    b"\xc2\xa01",
    b"1" * 5000,
    b"[" * 100_000 + b"]" * 100_000,
    b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
]


def canonical(text: str | bytes) -> str:
    """Return the canonical form of a text."""
    return write(parse(text))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:24])
def test_spellings_of_one_value_have_one_form(row: list[str]) -> None:
    """White space, key order, escapes and the spelling of a fraction do not matter."""
    assert len({canonical(text) for text in row}) == 1
    assert {canonical(text.encode()) for text in row} == {canonical(row[0])}


def test_different_values_have_different_forms() -> None:
    """No two values of the table meet, however close they are."""
    forms = [canonical(row[0]) for row in ROWS]

    assert len(set(forms)) == len(ROWS)


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: repr(text[:24]))
def test_what_readers_may_take_differently_is_refused(text: bytes) -> None:
    """Not JSON, or JSON that two readers might take differently: ValueError, nothing else."""
    with pytest.raises(ValueError):  # noqa: PT011  the contract is the type
        parse(text)


@pytest.mark.parametrize("depth", range(900, 1010))
def test_deep_nesting_is_read_and_written_or_refused(depth: int) -> None:
    """Near the limit of Python's stack nothing but ValueError comes out."""
    text = "[" * depth + "]" * depth
    try:
        form = canonical(text)
    except ValueError:
        return
    assert form.count("[") == depth


def test_what_is_too_deep_to_write_is_refused() -> None:
    """A parser may reach deeper than whoever writes: how deep differs by version of Python."""
    value: JSON = []
    for _ in range(100_000):
        value = [value]

    with pytest.raises(ValueError, match="too deeply"):
        write(value)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(2**53 - 2, 2**53 + 2)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec=None), max_size=6)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


def exact(value: Any) -> Any:
    """Return a value that Python compares as JSON means it: no two kinds of number are equal."""
    match value:
        case dict():
            return ("object", frozenset((key, exact(field)) for key, field in value.items()))
        case list():
            return ("array", tuple(exact(element) for element in value))
        case float():
            return ("fraction", Fraction(value), str(value).startswith("-"))
        case _:
            return (type(value).__name__, value)


@given(VALUES, VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_forms_are_equal_just_when_values_are(
    one: Any, other: Any, ascii_only: bool, indent: int | None
) -> None:
    """Equal values meet in every spelling, different ones never."""
    text = json.dumps(one, ensure_ascii=ascii_only, indent=indent)

    assert canonical(text) == canonical(json.dumps(one, sort_keys=True))
    assert (canonical(text) == canonical(json.dumps(other))) == (exact(one) == exact(other))


# --- The short way and the long one ---------------------------------------------------------------

# Spellings that the short way must leave to the long one, or read as that does.
ODD: list[bytes] = [
    *(text.encode() for row in ROWS for text in row),
    *REFUSED[:-3],
    b'{"a":1,"b":{"c":2,"c":3}}',
    b'{"a":{"a":1}}',
    b'{"":0,"":0}',
    b'["\\u007f","\x7f","\\b\\f\\n\\r\\t"]',
    b'["\\u00e9"]',
    b'["\xc3\xa9","\xe2\x80\xa8","\xf0\x9f\x98\x80"]',
    b'["\xed\xa0\xbd"]',
    b'["\xf8\x88\x80\x80\x80"]',
    b'{"\\ud83d":1}',
    b"[-0]",
    b"[0,-1,18446744073709551615,-9223372036854775809]",
    b"[1" + b"0" * 4300 + b"]",
    b"[1.5]",
    b"[1E3]",
    b"[true,false,null]",
    b'{"b":1,"a":2}',
    b'{"a" :1}',
    b"[1]\n",
    b'"\\/"',
]


def outcome(read: Any, raw: Any) -> Any:
    """Return what a reader makes of a text: a value, exactly, or its refusal."""
    try:
        return exact(read(raw))
    except ValueError:
        return "refused"


def the_long_way(raw: bytes) -> JSON:
    """Read as `parse` does where the short way leads nowhere."""
    return parse(raw.decode())  # of text, not bytes, it reads all this way


def write_the_long_way(value: JSON) -> str:
    """Write as `write` does where the short way leads nowhere."""
    parts: list[str] = []
    canonical_module._write(value, parts.append)
    return "".join(parts)


@pytest.mark.parametrize("raw", ODD, ids=lambda raw: repr(raw[:24]))
def test_both_ways_read_the_same(raw: bytes) -> None:
    """By whichever way a text is read, it is the same value, or refused."""
    assert outcome(parse, raw) == outcome(the_long_way, raw)


@given(VALUES, st.booleans(), st.sampled_from([None, (",", ":")]), st.randoms())
def test_both_ways_read_damaged_texts_the_same(
    value: Any, ascii_only: bool, separators: Any, rng: Any
) -> None:
    """So it is with texts of every spelling, and with a byte of them changed."""
    text = json.dumps(value, ensure_ascii=ascii_only, separators=separators)
    raw = text.encode("utf-8", "surrogatepass")
    at = rng.randrange(len(raw))
    damaged = raw[:at] + rng.choice([b"", b"0", b'"', b"\\", b",", b"-", b".", b"\xff"]) + raw[at:]

    for each in (raw, damaged, raw[:at] + raw[at + 1 :]):
        assert outcome(parse, each) == outcome(the_long_way, each)


@given(VALUES, VALUES)
def test_both_ways_of_writing_tell_the_same_values_apart(one: Any, other: Any) -> None:
    """Their texts differ in looks; which values have one text does not."""
    pair = [parse(json.dumps(value)) for value in (one, other)]
    mixed = [{"a": [value], "b": parse("1.5")} for value in pair]  # never the short way

    same = exact(one) == exact(other)
    assert (write(pair[0]) == write(pair[1])) is same
    assert (write_the_long_way(pair[0]) == write_the_long_way(pair[1])) is same
    assert (write(mixed[0]) == write(mixed[1])) is same


def test_a_text_by_one_way_is_no_text_by_the_other() -> None:
    """No two values of the table meet within others, whichever way these are written."""
    values = [parse(row[0]) for row in ROWS]
    texts = [write(each) for value in values for each in ([value], {"a": value}, [value, 1])]

    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("depth", [100, 900, 950, 1000, 2000, 100_000])
def test_deep_nesting_in_bytes_is_read_or_refused(depth: int) -> None:
    """The short way meets its own limit, and nothing but ValueError comes out."""
    for raw in (b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth):
        try:
            form = canonical(raw)
        except ValueError:
            assert depth > 400
        else:
            assert len(form) >= len(raw)


def test_keys_are_sorted_alike_by_both_ways() -> None:
    """The order of keys is that of their characters, beyond the first plane too."""
    keys = ["\U0001f600", "\uffff", "\ue000", "a", "B", "", "\u00e9", "aa"]
    plain = dict.fromkeys(keys, 1)
    shuffled = dict.fromkeys(reversed(keys), 1)

    assert write(plain) == write(shuffled)
    assert write({**plain, "n": parse("1.5")}) == write({"n": parse("1.5"), **shuffled})
