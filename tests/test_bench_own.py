"""`turnwire bench agent --upstream`: it asks first, and measures both ways alike."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from proxy import cli
from proxy.bench.own import account
from proxy.bench.own.account import Task
from proxy.demo.results import Way
from proxy.simulator import Simulator, SimulatorOptions
from proxy.simulator.validate import Transport

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = "sk-of-the-user"


@contextmanager
def simulator(**options: object) -> Iterator[Simulator]:
    """Run a simulator on a loop of its own, since the command brings its own, too."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    sim = Simulator(SimulatorOptions(**options))
    try:
        asyncio.run_coroutine_threadsafe(sim.start(), loop).result()
        yield sim
        asyncio.run_coroutine_threadsafe(sim.stop(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(autouse=True)
def key(monkeypatch):
    """Give the user a key."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def bench(upstream: str, *more: str) -> int:
    """Run the command with few calls."""
    return cli.main(
        ["bench", "agent", "--upstream", upstream, "--model", "gpt-5.2", "--calls", "3", *more]
    )


def test_runs_the_same_agent_both_ways(capsys, tmp_path):
    """As many turns each way, deltas through Turnwire, a table, a plot, and all of it as JSON."""
    out, picture = tmp_path / "own.json", tmp_path / "own.png"
    with simulator() as sim:
        status = bench(
            sim.base_url, "--yes", "--rounds", "2", "--json", str(out), "--plot", str(picture)
        )
        turns = list(sim.journal.turns)

    told, document = capsys.readouterr().out, json.loads(out.read_text())
    assert status == 0
    assert [seen.transport for seen in turns] == (
        [Transport.HTTP] * 4 + [Transport.WS] * 8 + [Transport.HTTP] * 4
    )
    modes = [run["modes"] for run in document["runs"]["via"]]
    assert modes == [["full", "delta", "delta", "delta"]] * 2
    assert [len(run["turns_s"]) for run in document["runs"]["straight"]] == [4, 4]
    assert document["uploaded_bytes"]["via"] < document["uploaded_bytes"]["straight"]
    assert "6 of 6" in told
    assert "medians of 2 rounds" in told.lower()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert KEY not in told


def test_no_two_runs_begin_alike():
    """What one run leaves in the upstream's cache helps no other."""
    with simulator() as sim:
        assert bench(sim.base_url, "--yes") == 0
        openings = {
            json.loads(seen.raw)["input"][0]["content"]
            for seen in sim.journal.turns
            if b"previous_response_id" not in (seen.raw or b"")
        }

    assert len(openings) == 2


class Terminal(io.StringIO):
    """A terminal at which somebody types."""

    def isatty(self) -> bool:
        """Say so."""
        return True


@pytest.mark.parametrize(
    ("typed", "goes_on"),
    [("y\n", True), ("YES\n", True), ("\n", False), ("n\n", False), ("", False)],
)
def test_asks_before_it_spends_anything(capsys, monkeypatch, typed, goes_on):
    """It says how many tokens, and goes on only if told so."""
    monkeypatch.setattr("sys.stdin", Terminal(typed))
    with simulator() as sim:
        status = bench(sim.base_url)
        turns = list(sim.journal)

    said = capsys.readouterr()
    assert "input tokens" in " ".join(said.out.split("Go on? [y/N]")[0].split())
    assert (status == 0, bool(turns)) == (goes_on, goes_on)
    assert ("nothing was sent" in said.err) is not goes_on


def test_asks_nobody_who_is_not_there(capsys, monkeypatch):
    """Without a terminal, and without --yes, nothing is sent."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with simulator() as sim:
        assert bench(sim.base_url) == 1
        assert list(sim.journal) == []
    assert "--yes" in capsys.readouterr().err


def test_says_what_the_upstream_refused(capsys, monkeypatch):
    """A wrong key ends it with one sentence."""
    monkeypatch.setenv("OPENAI_API_KEY", "bad key")
    with simulator() as sim:
        assert bench(sim.base_url, "--yes") == 1
    assert "turn 1 was answered 401 (invalid_api_key)" in capsys.readouterr().err


USAGE = [
    (["bench", "agent", "--upstream", "http://u/v1"], "which model?"),
    (["bench", "turn", "--upstream", "http://u/v1", "--model", "m"], "`turnwire bench agent`"),
    (
        ["bench", "agent", "--upstream", "http://u/v1", "--model", "m", "--plot", "x.gif"],
        "must end in .png or .svg",
    ),
    (
        ["bench", "agent", "--upstream", "http://u/v1", "--model", "m", "--key-from", "NO_KEY"],
        "NO_KEY is not set",
    ),
    (
        ["bench", "agent", "--upstream", "http://u/v1", "--model", "m", "--json", "/none/x.json"],
        "can't be written",
    ),
    (["bench", "agent", "--upstream", "u", "--model", "m"], "must be a URL"),
]


@pytest.mark.parametrize(("arguments", "sentence"), USAGE)
def test_wrong_usage_is_one_sentence(capsys, arguments, sentence):
    """What can be known beforehand is said before anybody is asked."""
    assert cli.main(arguments) == 64
    assert sentence in capsys.readouterr().err


def test_the_estimate_grows_with_the_square_of_the_calls():
    """Each turn sends all that was before; the sum over both ways and all rounds is told."""
    small, large = Task("m", 10, 2000, 1), Task("m", 20, 2000, 1)

    assert 3 < large.input_tokens / small.input_tokens < 4
    assert Task("m", 10, 2000, 3).input_tokens == 3 * small.input_tokens
    assert small.most_output_tokens == 11 * account.MAX_OUTPUT_TOKENS * 2
    assert f"{small.input_tokens:,}" in small.announcement("http://u/v1")


def test_the_estimate_is_near_what_is_billed(tmp_path):
    """The simulator counts tokens as the API does: about as many as were announced."""
    out = tmp_path / "own.json"
    with simulator() as sim:
        assert bench(sim.base_url, "--yes", "--json", str(out)) == 0
    document = json.loads(out.read_text())
    billed = sum(run["input_tokens"] for runs in document["runs"].values() for run in runs)

    assert billed == pytest.approx(Task("gpt-5.2", 3, 2000, 1).input_tokens, rel=0.35)


def test_each_way_is_first_equally_often():
    """The order turns round with every round."""
    order = [way for _, way in Task("m", 1, 1, 2).order()]

    assert order == [Way.STRAIGHT, Way.VIA, Way.VIA, Way.STRAIGHT]
