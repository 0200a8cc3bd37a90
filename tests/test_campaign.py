"""
The campaign: its judge sees what it must, its short forms pass, its report is complete.

The long forms are `tests/campaign/run.py`; each short one here runs the same code for a second or
two.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from campaign import catalogue, crowd, report, rounds, soak
from campaign.ledger import DEFECTS, Ledger, key_principal, total
from campaign.menu import KINDS

from proxy.simulator import Simulator
from proxy.simulator.agent import Agent, user
from proxy.simulator.journal import Journal, Seen
from proxy.simulator.state import Held
from proxy.simulator.validate import Transport

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="what a process has is in /proc")

ROOT = Path(__file__).parents[1]
CATALOGUE = {"L": 7, "S": 6, "F": 27, "C": 8, "R": 8, "P": 11, "X": 10, "D": 12}


# --- The judge ------------------------------------------------------------------------------------


async def answered() -> tuple[bytes, dict[str, Any], list[Any]]:
    """Return a request with its right answer."""
    async with Simulator() as sim, Agent(sim.base_url) as agent:
        reply = await agent.send([user("[calls=1] One?")])
        assert reply.response is not None
        return reply.body, dict(reply.response), list(reply.items)


async def test_the_right_answer_is_right():
    """Nothing is found where nothing is wrong."""
    body, response, items = await answered()
    ledger = Ledger()
    ledger.judge_answer(body, response, items, _simulators_own())
    assert not ledger.defects


@pytest.mark.parametrize("damage", ["context", "item", "lost item", "delta shows"])
async def test_a_wrong_answer_is_found(damage: str):
    """Another context, a changed or lost item, and our own id in the answer are all seen."""
    body, response, items = await answered()
    match damage:
        case "context":
            body = body.replace(b"One?", b"Two?")
        case "item":
            items[-1] = {**items[-1], "call_id": "call_x"}
        case "lost item":
            items.pop()
        case "delta shows":
            response["previous_response_id"] = "resp_x"
    ledger = Ledger()
    ledger.judge_answer(body, response, items, _simulators_own())
    assert ledger.defects["wrong"]


def _simulators_own() -> Any:
    from proxy.simulator import AnswerOptions

    return AnswerOptions()


def seen(key: str, raw: str, **fields: Any) -> Seen:
    """A turn that upstream saw."""
    return Seen(
        Transport.WS, 1, key_principal(key), "/v1/responses", {}, len(raw), raw.encode(), **fields
    )


def held(response_id: str) -> Held:
    """A response that upstream remembers."""
    return Held(response_id, "", None, (), (), None, None, {}, 0)  # type: ignore[arg-type]


def test_foreign_words_and_keys_are_found():
    """A word in another's context, with another's key, twice, or on another's connection."""
    ledger = Ledger()
    mine, again, theirs = (
        ledger.nonce(family, key) for family, key in ((1, "a"), (1, "a"), (2, "b"))
    )

    def defects(*records: Seen) -> dict[str, int]:
        journal = Journal()
        for record in records:
            journal.add(record)
        ledger.defects.clear()
        ledger._owners.clear()
        ledger.inspect(journal)
        return dict(ledger.defects)

    first = seen("a", mine, response_id="resp_1")
    assert defects(first, seen("a", again, held=held("resp_1"))) == {}
    assert defects(seen("a", f"{mine} {mine}")) == {"duplicated": 1}
    assert defects(first, seen("a", mine, held=held("resp_1"))) == {"duplicated": 1}
    assert defects(seen("b", f"{theirs} {mine}"))["cross_conversation"] == 1
    assert defects(seen("b", mine)) == {"cross_credential": 1}
    assert defects(first, seen("b", theirs)) == {"cross_credential": 1}
    assert defects(seen("a", mine, foreign=True)) == {"cross_credential": 1}


def test_ledgers_add_up():
    """The sum of rounds has all that they have."""
    ledger = Ledger(turns=2)
    ledger.injected["reset"] = 3
    ledger.blame("lost", "one")
    summed = total([ledger.as_json(), ledger.as_json()])
    assert (summed["turns"], summed["injected"], summed["defects"]["lost"]) == (4, {"reset": 6}, 2)
    assert len(summed["examples"]) == 2


def test_growth_is_the_line_through_the_samples():
    """Noise is no growth; a line is."""
    assert soak.slope([(0, 5), (1, 7), (2, 9)]) == 2
    assert soak.slope([(0, 5), (1, 6), (2, 5)]) == 0
    assert soak.slope([(3, 5)]) == 0


# --- Short forms of the trials --------------------------------------------------------------------


@linux_only
@pytest.mark.parametrize("number", [0, 1])
async def test_faults_of_all_kinds_at_once_do_no_harm(number: int):
    """A short round of the campaign: nothing lost, doubled, wrong, anybody else's, or left."""
    result = await rounds.play_round(number, turns=120)
    assert result["defects"] == dict.fromkeys(DEFECTS, 0), result["examples"]
    assert result["turns"] >= 120
    assert len(result["injected"]) > 15


@linux_only
async def test_a_crowd_is_served():
    """Many conversations at once have no errors, and the proxy says that it lives meanwhile."""
    result = await crowd.crowd(12, 3)
    assert result["errors"] == 0, result
    assert result["turns"] == 240
    assert result["exit_status"] == 0


@linux_only
async def test_a_drain_cuts_nothing():
    """Streams that run when SIGTERM comes end well, and so does the process."""
    result = await crowd.drain(12)
    assert (result["not_running"], result["cut"], result["exit_status"]) == (0, 0, 0)
    assert result["alarms"] == 0


@linux_only
async def test_cancels_touch_nobody_else():
    """With one connection for two clients, one's cancels are not the other's trouble."""
    result = await crowd.cancels(2, at_once=30)
    assert result["others_touched"] == 0, result
    assert result["others_turns"] > 0
    assert (result["busy_after"], result["exit_status"], result["alarms"]) == (0, 0, 0)


# --- The report -----------------------------------------------------------------------------------


def test_every_row_of_the_catalogue_is_accounted_for():
    """Each row is there once, in order, with a proof or with a reason."""
    wanted = [
        f"{letter}{number + 1}" for letter, count in CATALOGUE.items() for number in range(count)
    ]
    assert [row.id for row in catalogue.ROWS] == wanted
    assert not [row.id for row in catalogue.ROWS if not (row.proofs or row.why)]
    faults = {kind.row for kind in KINDS.values()}
    assert faults <= set(wanted)


@pytest.mark.parametrize("row", catalogue.ROWS, ids=lambda row: row.id)
def test_every_proof_exists(row: catalogue.Row):
    """The tests that a row names are there; so are the trials."""
    trials = {goal.trial for goal in report.GOALS}
    for proof in row.proofs:
        if proof.startswith("run.py "):
            assert proof.removeprefix("run.py ") in trials
            continue
        path, _, name = proof.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^\s*(async def|def|class) {name}\b", text, re.MULTILINE), proof


def test_the_report_is_that_of_the_results():
    """REPORT.md says what results.json and the catalogue say; what is missed is said to be."""
    results = report.load()
    assert report.REPORT.read_text(encoding="utf-8") == report.rendered(results)
    assert report.missed(results).keys() == report.OPEN.keys()
    assert len({goal.words for goal in report.GOALS}) == len(report.GOALS)
