"""
Row P1: the front reads HTTP in one way, or not at all.

Every case of `cases` goes over a real socket in one piece and in small ones, to the endpoint that
is ours and to one that is relayed. What reached upstream, for whom, and what came back are checked
to the last request.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from hostile.cases import CASES, SMUGGLED_TARGET, TEXT, Case, Outcome, Refused
from hostile.edge import IMPATIENT, Edge
from hostile.ledger import KEY, LAST, Seen, answer_to

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hostile.ledger import Reply

PIECES_UP_TO = 2000
FUZZ = bool(os.environ.get("TURNWIRE_FUZZ"))  # in sevens as well, which `test_two_fronts` does


@pytest.fixture(scope="module")
def patient() -> Iterator[Edge]:
    """One proxy for all cases in which nothing is waited for."""
    with Edge() as running:
        yield running


@pytest.fixture(scope="module")
def impatient() -> Iterator[Edge]:
    """One whose deadlines are short, for those that meet one."""
    with Edge(limits=IMPATIENT) as running:
        yield running


@pytest.fixture
def edge(case: Case, patient: Edge, impatient: Edge) -> Edge:
    """The proxy for a case."""
    return impatient if case.waits else patient


def difference(
    outcome: Outcome, target: str, replies: Sequence[Reply], seen: Sequence[Seen]
) -> str | None:
    """Say in what an outcome is not what was expected; None if it is."""
    statuses = [reply.status for reply in replies]
    if isinstance(outcome, Refused):
        served, last = outcome.first, [200] * outcome.stays
        fits = len(statuses) == served + 1 + len(last) and 400 <= statuses[served] < 500
        wanted = f"{served} served, a 4xx, {last}"
    else:
        served, last = outcome.count, [] if outcome.closes else [200]
        fits = statuses == [200] * served + last
        fits = fits and sum((reply.interim for reply in replies), ()) == outcome.interim
        wanted = f"{served} served, {last}"
    if not fits:
        return f"statuses {statuses}, wanted {wanted}"
    if list(seen) != [Seen("POST", target, TEXT, KEY)] * served:
        return f"upstream saw {seen}, wanted {served}"
    if [reply.answer for reply in replies[:served]] != [answer_to(KEY, TEXT)] * served:
        return "an answer is another's"
    return None


def check(edge: Edge, case: Case, target: str, *parts: bytes) -> None:
    """Send the parts and what follows them; compare with what the case must lead to."""
    replies, seen = edge.ask(*parts, LAST)

    assert SMUGGLED_TARGET not in [each.target for each in seen]
    problems = [
        difference(outcome, target, replies, seen)
        for outcome in (case.outcome, case.or_else)
        if outcome is not None
    ]
    assert None in problems, problems


@pytest.mark.parametrize("target", ["/v1/responses", "/v1/files"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_stream_is_read_in_one_way_or_refused(edge: Edge, case: Case, target: str) -> None:
    """What two parsers might take differently is refused; the rest is served, each once."""
    check(edge, case, target, case.stream(target))


@pytest.mark.parametrize("size", [1, 7] if FUZZ else [1])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_stream_is_read_alike_in_pieces(edge: Edge, case: Case, size: int) -> None:
    """No boundary between two reads changes what a stream means."""
    stream = case.stream("/v1/responses")
    step = size if len(stream) <= PIECES_UP_TO else 1000
    check(edge, case, "/v1/responses", *(stream[i : i + step] for i in range(0, len(stream), step)))
