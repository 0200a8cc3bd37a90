"""Two callers whose identity differs in anything never share anything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.core.principals import Identities, Principal, identify

SECRET = b"0123456789abcdef"
NAMES = frozenset({"authorization", "openai-organization", "x-api-key"})


def principal(*headers: tuple[str, str]) -> Principal:
    """Identify the holder of these headers."""
    return identify(headers, NAMES, SECRET)


def test_only_identity_headers_count() -> None:
    """A user agent or a trace id makes nobody another caller, and is not sent upstream."""
    plain = principal(("Authorization", "Bearer a"))
    traced = principal(("User-Agent", "x"), ("Authorization", "Bearer a"), ("traceparent", "y"))

    assert plain == traced
    assert traced.headers == (("Authorization", "Bearer a"),)


def test_order_and_case_of_names_do_not_matter() -> None:
    """Header names are case-insensitive, and their order means nothing."""
    one = principal(("Authorization", "Bearer a"), ("OpenAI-Organization", "org"))
    other = principal(("openai-organization", "org"), ("authorization", "Bearer a"))

    assert one.key == other.key


def test_any_difference_makes_another_principal() -> None:
    """Another key, organisation, spelling of a value, or an empty instead of an absent header."""
    principals = [
        principal(),
        principal(("authorization", "")),
        principal(("authorization", "Bearer a")),
        principal(("authorization", "bearer a")),
        principal(("authorization", "Bearer a ")),
        principal(("x-api-key", "Bearer a")),
        principal(("authorization", "Bearer a"), ("authorization", "Bearer b")),
        principal(("authorization", "Bearer b"), ("authorization", "Bearer a")),
        principal(("authorization", "Bearer a"), ("openai-organization", "")),
        principal(("authorization", "Bearer a"), ("openai-organization", "org")),
        principal(("authorization", "Bearer \udcff")),
    ]

    assert len(principals) == len({principal.key for principal in principals})


def test_who_was_met_is_met_again() -> None:
    """Callers are remembered by their very headers, and by nothing less."""
    identities = Identities(NAMES, SECRET)
    lists = [
        [("authorization", "Bearer a")],
        [("authorization", "bearer a")],
        [("Authorization", "Bearer a"), ("x-trace", "1")],
        [("authorization", "Bearer a"), ("x-api-key", "")],
        [("x-api-key", ""), ("authorization", "Bearer a")],
        [],
    ]

    for headers in lists * 2:
        assert identities.of(headers) == identify(headers, NAMES, SECRET)
        assert identities.of(headers).headers == identify(headers, NAMES, SECRET).headers
    assert identities.of(lists[0]) is identities.of(lists[0])


def test_credentials_are_in_no_repr() -> None:
    """What may end up in a log is the label alone."""
    shown = repr(principal(("authorization", "Bearer hunter2")))

    assert "hunter2" not in shown
    assert principal(("authorization", "Bearer hunter2")).key not in shown


def test_keys_mean_nothing_outside_of_the_process() -> None:
    """Another secret gives other keys: a label in an old log can't be checked against a key."""
    headers = [("authorization", "Bearer a")]

    one, other = identify(headers, NAMES, SECRET), identify(headers, NAMES, b"f" * 16)

    assert one.key != other.key
    assert one.label == one.key[:8]


_headers = st.lists(
    st.tuples(st.sampled_from(["authorization", "x-api-key", "openai-organization"]), st.text())
)


@given(_headers, _headers)
def test_keys_are_equal_only_for_equal_identities(
    one: list[tuple[str, str]], other: list[tuple[str, str]]
) -> None:
    """No way of splitting text over headers makes two identities look the same."""

    def is_same(a: list[tuple[str, str]], b: list[tuple[str, str]]) -> bool:
        return all(
            [v for n, v in a if n == name] == [v for n, v in b if n == name] for name in NAMES
        )

    def sendable(headers: list[tuple[str, str]]) -> list[tuple[str, str]]:
        return [(n, v.encode("utf-8", "replace").decode()) for n, v in headers]

    one, other = sendable(one), sendable(other)
    keys_equal = principal(*one).key == principal(*other).key

    assert keys_equal == is_same(one, other)
