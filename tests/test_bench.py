"""The benchmark: pure parts by tables, load programs against each other, and short runs."""

import asyncio
import json
import operator
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from proxy.bench import agents, footprint, links, relays, report, tls, turns
from proxy.bench.bodies import (
    EVENT_BYTES,
    ITEM_MARK,
    NONCE_MARK,
    NUMBER_MARK,
    RESPONSE_MARK,
    STAMP_MARK,
    make_chat_parts,
    make_parts,
    make_templates,
)
from proxy.bench.children import BenchFailed, Child, Role, cores_for, python_environment
from proxy.bench.controls import nginx_configuration
from proxy.bench.fallback import ranked
from proxy.bench.goals import GATES, GOALS, Gate, Goal, Unit, Verdict
from proxy.bench.links import Bucket, Shape, pieces
from proxy.bench.load import (
    Bench,
    Client,
    Programs,
    Upstream,
    find_programs,
    make_certificates,
)
from proxy.bench.samples import Sample, Samples, Spread, spread, worst
from proxy.bench.ways import Way, running
from proxy.cli import main
from proxy.simulator.answers import MEANINGFUL_SETTINGS, Context
from proxy.simulator.chat import context_of as chat_context

ROOT = Path(__file__).resolve().parent.parent
HAS_COMPILER = shutil.which(os.environ.get("CC", "cc")) is not None
LOADS = ["c", "python"] if HAS_COMPILER else ["python"]


# --- statistics ------------------------------------------------------------------------------


def burst(way, round_, cpu_us):
    """A sample of a burst."""
    return Sample(relays.BURST, way, "1 stream", round_, {"cpu_us": cpu_us})


SPREADS = [
    ([], None),
    ([3.0], Spread(3.0, 3.0, 3.0)),
    ([9.0, 1.0, 2.0], Spread(2.0, 1.0, 9.0)),
    ([4.0, 1.0], Spread(2.5, 1.0, 4.0)),
]


@pytest.mark.parametrize(("values", "expected"), SPREADS)
def test_a_spread_is_the_median_and_the_extremes(values, expected):
    """No values make no spread."""
    assert spread(values) == expected


def test_a_ratio_is_taken_within_each_round():
    """A round that was slow for both ways leaves the ratio as it is; unpaired rounds are out."""
    pairs = ((0, 2.0, 1.0), (1, 20.0, 10.0))
    paired = [burst(way, r, cpu) for r, a, b in pairs for way, cpu in (("a", a), ("b", b))]
    samples = Samples([*paired, burst("a", 2, 500.0)])

    ratio = samples.combined(
        operator.truediv,
        (relays.BURST, "a", "1 stream", "cpu_us"),
        (relays.BURST, "b", "1 stream", "cpu_us"),
    )

    assert ratio == Spread(2.0, 2.0, 2.0)


def test_a_round_that_can_not_be_divided_does_not_count():
    """Dividing by zero leaves the other rounds; if there are none, nothing was measured."""
    series = [(relays.BURST, way, "1 stream", "cpu_us") for way in "ab"]
    only_zero = [burst("a", 0, 2.0), burst("b", 0, 0.0)]
    two_rounds = [*only_zero, burst("a", 1, 6.0), burst("b", 1, 2.0)]

    assert Samples(only_zero).combined(operator.truediv, *series) is None
    assert Samples(two_rounds).combined(operator.truediv, *series) == Spread(3.0, 3.0, 3.0)


def test_a_value_that_could_not_be_measured_is_left_out():
    """Where the system tells no CPU time, that value has no median, and the others have theirs."""
    samples = Samples()
    samples.add("turn", "turnwire", "10 KB", 0, turn_us=5.0, cpu_us=None)

    assert samples.median("turn", "turnwire", "10 KB", "turn_us") == 5.0
    assert samples.median("turn", "turnwire", "10 KB", "cpu_us") is None
    assert samples.cells("turn") == ["10 KB"]
    assert samples.ways("turn") == ["turnwire"]


def test_the_worst_of_several_is_that_with_the_highest_median():
    """What was not measured is no candidate."""
    low, high = Spread(1.0, 0.0, 9.0), Spread(2.0, 1.0, 3.0)

    assert worst([None, low, high]) == high
    assert worst([None]) is None


def test_ranks_are_those_of_the_ordered_values():
    """The median of two is the upper one; the highest rank is the last value."""
    assert ranked([3.0, 1.0]) == {"min": 1.0, "p50": 3.0, "p90": 3.0, "p99": 3.0, "max": 3.0}
    assert ranked(list(range(100, 0, -1)))["p90"] == 91


# --- goals -----------------------------------------------------------------------------------

AT_MOST = Goal("x", 2.0, 1.0, Unit.TIMES, lambda _: None)
AT_LEAST = Goal("x", 2.0, 4.0, Unit.TIMES, lambda _: None, at_least=True)
VERDICTS = [
    (AT_MOST, None, Verdict.UNKNOWN),
    (AT_MOST, 1.0, Verdict.BEYOND),
    (AT_MOST, 1.5, Verdict.REACHED),
    (AT_MOST, 2.0, Verdict.REACHED),
    (AT_MOST, 2.1, Verdict.MISSED),
    (AT_LEAST, 4.0, Verdict.BEYOND),
    (AT_LEAST, 2.0, Verdict.REACHED),
    (AT_LEAST, 1.9, Verdict.MISSED),
]


@pytest.mark.parametrize(("goal", "median", "verdict"), VERDICTS)
def test_a_goal_is_judged_by_the_median(goal, median, verdict):
    """The bound itself still counts as kept."""
    measured = None if median is None else Spread(median, 0.0, 99.0)
    assert goal.verdict(measured) is verdict


GATE_CASES = [(False, 2.0, True), (False, 2.1, False), (True, 2.0, True), (True, 1.9, False)]


@pytest.mark.parametrize(("at_least", "median", "holds"), GATE_CASES)
def test_a_gate_holds_up_to_its_limit(at_least, median, holds):
    """What could not be measured breaks no gate."""
    gate = Gate("x", 2.0, Unit.TIMES, lambda _: None, at_least=at_least)

    assert gate.holds(Spread(median, 0.0, 9.0)) is holds
    assert gate.holds(None)


def test_what_is_reached_is_no_harder_than_what_is_hoped_for():
    """Every goal leaves room above what it asks for, in the direction in which it points."""
    for goal in GOALS:
        assert goal.reach != goal.hope
        assert (goal.hope > goal.reach) is goal.at_least, goal.figure


def full_samples():
    """One round in which every figure that a goal needs was measured, with round numbers."""
    samples = Samples()
    for way, us in ((Way.STRAIGHT, 10.0), (Way.TURNWIRE, 30.0), (Way.PLAIN, 60.0)):
        for cell, factor in (("10 KB", 1), ("1 MB", 4), ("10 MB", 9)):
            values = {"turn_us": us * factor, "cpu_us": us * factor, "upstream_bytes": 1000.0}
            samples.add(turns.PART, way, cell, 0, **values)
    for api, us in ((turns.RESPONSES, 100.0), (turns.CHAT, 120.0)):
        for cell in ("10 KB", "1 MB"):
            samples.add(turns.CHAT_PART, api, cell, 0, cpu_us=us)
    for way, cpu_us in ((Way.TURNWIRE, 1.0), (Way.NGINX, 0.75), (Way.NAIVE, 25.0)):
        samples.add(relays.BURST, way, "1 stream", 0, cpu_us=cpu_us)
    for way, us in ((Way.STRAIGHT, 5.0), (Way.TURNWIRE, 60.0), (Way.NGINX, 60.0)):
        for pace in relays.PACES:
            beyond = 1000.0 if pace.total_rate > relays.GOAL_RATE else 1.0
            added = us * (beyond if way is Way.TURNWIRE else 1.0)
            samples.add(relays.PACED, way, pace.name, 0, p50_us=added, p99_us=added)
    samples.add(footprint.LOOKUP, Way.TURNWIRE, "1000 KB", 0, find_us=20.0, receive_cpu_us=500.0)
    samples.add(footprint.STATE, Way.TURNWIRE, "10 KB", 0, bytes_per_turn=900.0)
    samples.add(footprint.START, Way.TURNWIRE, "idle", 0, resident_bytes=7e7, ready_s=0.5)
    samples.add(agents.WARM, Way.TURNWIRE, "50 ms, 100 Mbit/s", 0, round_trips=1.1)
    return samples


def test_every_goal_finds_its_figure():
    """The figures are read from the cells that the measurements write."""
    measured = {goal.figure: goal.measure(full_samples()) for goal in GOALS}

    assert {name: round(found.median, 3) for name, found in measured.items()} == {
        "relay in bursts, events per CPU second / nginx": 0.75,
        "the same / the naive delta proxy": 25.0,
        "added p50 per event / nginx's": 1.0,
        "added p99 per event / nginx's": 1.0,
        "whole turn, 10 KB / plain HTTP proxy": 0.5,
        "whole turn, 1 MB / plain HTTP proxy": 0.5,
        "whole turn, history 10 KB to 1 MB": 4.0,
        "bytes sent upstream, history 10 KB to 10 MB": 1.0,
        "CPU of a turn, 10 KB: Chat Completions / Responses": 1.2,
        "the same, 1 MB": 1.2,
        "finding 1 of 10,000 conversations / receiving 1 MB": 0.04,
        "state kept per stored turn": 900.0,
        "warm turn, RTT 50 ms: first event / RTT": 1.1,
        "idle resident memory": 7e7,
        "ready after": 0.5,
    }


def test_goals_and_gates_name_cells_that_are_measured():
    """No goal waits for a length, a burst or a link that the full run does not have."""
    assert {"10 KB", "1 MB", "10 MB"} <= {size.name for size in turns.SIZES}
    assert {"10 KB", "1 MB"} <= {size.name for size in turns.GATE_SIZES}
    assert {"10 KB", "1 MB"} <= {size.name for size in turns.CHAT_SIZES}
    assert "50 ms, 100 Mbit/s" in {shape.name for shape in agents.SHAPES}
    assert all(gate.measure(full_samples()) is not None for gate in GATES)


def test_an_event_that_added_nothing_makes_no_ratio():
    """Where the control adds no latency that the clock can tell, the round does not count."""
    samples = Samples()
    for way, us in ((Way.STRAIGHT, 5.0), (Way.TURNWIRE, 60.0), (Way.NGINX, 5.5)):
        samples.add(relays.PACED, way, relays.PACES[0].name, 0, p50_us=us)

    (goal,) = (goal for goal in GOALS if goal.figure == "added p50 per event / nginx's")
    assert goal.measure(samples) is None


# --- the report ------------------------------------------------------------------------------


def test_a_table_has_ways_down_and_cells_across():
    """What was not measured is a dash."""
    samples = Samples()
    samples.add(turns.PART, "straight", "10 KB", 0, turn_us=10.4)
    samples.add(turns.PART, "turnwire", "10 KB", 0, turn_us=1234.0)
    samples.add(turns.PART, "turnwire", "1 MB", 0, turn_us=2000.0)

    whole, added = report.tables(samples)

    assert whole.columns == ("whole turn, us", "10 KB", "1 MB")
    assert whole.rows == (("straight", "10", "-"), ("turnwire", "1,234", "2,000"))
    assert added.rows == (("turnwire", "1,224", "-"),)


def test_the_table_of_goals_has_a_row_for_each():
    """Bound, measurement, extremes and verdict, with units."""
    rows = report.goals_table(full_samples()).rows

    assert len(rows) == len(GOALS)
    assert rows[0][1:] == (">= 50.0%", ">= 70.0%", "75.0%", "75.0% - 75.0%", "as hoped")
    assert rows[13][1:] == ("<= 80.0 MB", "<= 60.0 MB", "70.0 MB", "70.0 MB - 70.0 MB", "reached")


def test_the_document_is_plain_json():
    """Everything that was measured can be read back."""
    document = report.document(full_samples(), report.machine(), {"part": "all"})

    assert json.loads(json.dumps(document)) == document
    assert len(document["goals"]) == len(GOALS)


# --- bodies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2000, 10_000, 100_000, 1_000_000])
def test_a_body_is_json_with_about_the_history_asked_for(size):
    """The parts fit together for any number of follow-up turns, two items each."""
    parts = make_parts(size)
    first, third = json.loads(parts.body()), json.loads(parts.body(2))

    assert len(json.dumps(first["input"], separators=(",", ":"), ensure_ascii=False)) == (
        pytest.approx(size, rel=0.15, abs=800)
    )
    assert third["input"][: len(first["input"])] == first["input"]
    assert len(third["input"]) == len(first["input"]) + 4
    assert NONCE_MARK in first["input"][0]["content"][0]["text"]
    assert first["stream"] is True
    assert first["store"] is False


def test_chat_bodies_say_what_those_of_responses_say():
    """Both conversations are one and the same, whatever number of follow-ups they have."""
    plain, chat = (make(10_000) for make in (make_parts, make_chat_parts))
    one, other = json.loads(plain.body(2)), json.loads(chat.body(2))
    instructions = {"role": "system", "content": one["instructions"]}
    settings = {key: one[key] for key in MEANINGFUL_SETTINGS if key in one}
    del settings["instructions"]

    expected = Context.of(settings, [instructions, *one["input"]])
    assert chat_context(other).digest == expected.digest
    assert other["stream"] is True


def test_every_call_of_a_history_has_its_output():
    """The histories are valid for the API."""
    items = json.loads(make_parts(50_000).body())["input"]

    calls = [item["call_id"] for item in items if item["type"] == "function_call"]
    assert calls
    assert calls == [i["call_id"] for i in items if i["type"] == "function_call_output"]


def test_the_same_size_makes_the_same_bytes():
    """All ways of a run, and all runs, send the same."""
    assert make_parts(10_000) == make_parts(10_000)


def test_the_templates_are_the_events_of_an_answer():
    """Each is JSON on one line with its placeholders, and the delta has the size asked for."""
    lines = make_templates().splitlines()
    created, delta, item, completed = (json.loads(line) for line in lines)

    assert [e["type"].removeprefix("response.") for e in (created, delta, item, completed)] == [
        "created", "output_text.delta", "output_item.done", "completed",
    ]  # fmt: skip
    assert len(lines[1]) == EVENT_BYTES
    assert all(NUMBER_MARK.encode() in line and STAMP_MARK.encode() in line for line in lines)
    assert created["response"]["id"] == RESPONSE_MARK == completed["response"]["id"]
    assert item["item"]["id"] == ITEM_MARK
    assert completed["response"]["output"] == [item["item"]]
    assert json.loads(make_parts(10_000).echo) == item["item"]


def test_placeholders_are_the_same_in_c_and_in_python():
    """The programs in C patch what the templates have."""
    text = (ROOT / "proxy/bench/c/common.h").read_text()
    marks = dict(re.findall(r'#define (\w+_MARK) "([^"]+)"', text))

    assert marks == {
        "STAMP_MARK": STAMP_MARK,
        "NUMBER_MARK": NUMBER_MARK,
        "RESPONSE_MARK": RESPONSE_MARK,
        "ITEM_MARK": ITEM_MARK,
        "NONCE_MARK": NONCE_MARK,
    }


# --- the emulated link -----------------------------------------------------------------------


def test_a_bucket_lets_bytes_leave_at_its_rate():
    """8 Mbit/s are 1,000 bytes a millisecond; bytes that come while others wait queue up."""
    bucket = Bucket(Shape(0.05, 8e6))

    assert bucket.take(10.0, 1000) == pytest.approx(10.001)
    assert bucket.take(10.0, 2000) == pytest.approx(10.003)
    assert bucket.take(10.002, 1000) == pytest.approx(10.004)


def test_a_bucket_saves_nothing_while_idle():
    """After a pause the line is as fast as ever, and no faster."""
    bucket = Bucket(Shape(0.05, 8e6))
    bucket.take(10.0, 1000)

    assert bucket.take(99.0, 1000) == pytest.approx(99.001)


SHAPES = [
    (Shape(0.05, 100e6), 0.025, 12_500, "50 ms, 100 Mbit/s"),
    (Shape(0.15, 10e6), 0.075, 1448, "150 ms, 10 Mbit/s"),
]


@pytest.mark.parametrize(("shape", "one_way_s", "piece_bytes", "name"), SHAPES)
def test_a_link_sends_a_millisecond_at_a_time(shape, one_way_s, piece_bytes, name):
    """At least a segment, though."""
    assert (shape.one_way_s, shape.piece_bytes) == (one_way_s, piece_bytes)
    assert shape.name == name


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 35])
def test_pieces_make_the_whole(size):
    """Nothing is lost, and no piece is larger than asked for."""
    data = bytes(range(size))
    cut = pieces(data, 10)

    assert b"".join(cut) == data
    assert all(0 < len(piece) <= 10 for piece in cut)


async def close(writer):
    """Close a stream and wait until it is."""
    writer.close()
    await writer.wait_closed()


async def test_bytes_pass_a_link_unchanged():
    """More than its queue holds, both ways, in order; the end of the stream travels too."""

    relayed = asyncio.Event()

    async def echo(reader, writer):
        writer.write(await reader.read())
        await close(writer)

    async def relay(reader, writer):
        await link.accept(reader, writer)
        relayed.set()

    target = await asyncio.start_server(echo, "127.0.0.1", 0)
    link = links.Link(target.sockets[0].getsockname()[1], Shape(0.002, 1e9))
    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    data = bytes(range(251)) * 4000
    async with target, server, asyncio.timeout(30):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(data)
        writer.write_eof()
        assert await reader.read() == data
        await close(writer)
        await relayed.wait()


# --- processes -------------------------------------------------------------------------------

CORES = [
    (Role.PROXY, [3], {3}),
    (Role.CLIENT, [3], {3}),
    (Role.PROXY, [0, 1, 2], {0}),
    (Role.UPSTREAM, [0, 1, 2], {1, 2}),
]


@pytest.mark.parametrize(("role", "cores", "expected"), CORES)
def test_the_proxy_has_a_core_to_itself(role, cores, expected):
    """Where there are two at least."""
    assert cores_for(role, cores) == expected


def test_a_child_that_fails_says_why(tmp_path):
    """What it wrote to standard error is in the message."""
    program = "import sys; sys.exit('no such luck')"
    child = Child([sys.executable, "-c", program], Role.CLIENT, tmp_path / "log")

    with pytest.raises(BenchFailed, match=r"has ended \(status 1\): no such luck"):
        child.read_line(30)
    child.end()


def test_a_child_that_will_not_end_is_ended(tmp_path, monkeypatch):
    """It takes no notice of the end of its input, nor of SIGTERM."""
    monkeypatch.setattr("proxy.bench.children.END_TIMEOUT_S", 0.2)
    program = (
        "import signal, threading; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print('up', flush=True); threading.Event().wait()"
    )
    child = Child([sys.executable, "-c", program], Role.CLIENT, tmp_path / "log")
    assert child.read_line(30) == "up"

    child.end()

    assert child.has_ended


def test_the_environment_of_children_has_no_settings_of_the_persons_own(monkeypatch):
    """A benchmark measures the default configuration, on loopback."""
    monkeypatch.setenv("TURNWIRE_PORT", "1")
    monkeypatch.setenv("http_proxy", "http://example.com")
    monkeypatch.setenv("PYTHONPATH", "elsewhere")

    found = python_environment()

    assert not [name for name in found if name.startswith("TURNWIRE_")]
    assert "http_proxy" not in found
    assert found["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "elsewhere"]


def test_nginx_is_one_process_that_buffers_nothing(tmp_path):
    """So its CPU time is that of its process, and events pass as they come."""
    text = nginx_configuration(tmp_path, 1111, "http://127.0.0.1:2222")

    assert "master_process off" in text
    assert "proxy_buffering off; proxy_request_buffering off;" in text
    assert "listen 127.0.0.1:1111" in text
    assert "server 127.0.0.1:2222" in text
    assert "proxy_pass http://bench" in text
    assert text.count("{") == text.count("}")


def test_nginx_trusts_the_upstreams_authority_alone(tmp_path):
    """It verifies what it is told to speak TLS to, as the others do."""
    text = nginx_configuration(tmp_path, 1111, "https://127.0.0.1:2222", tmp_path / "ca.pem")

    assert "proxy_pass https://bench" in text
    assert f"proxy_ssl_verify on; proxy_ssl_trusted_certificate {tmp_path / 'ca.pem'};" in text


# --- the load programs -----------------------------------------------------------------------


def fetch(url, context):
    """Get a page past any proxy that the environment names."""
    handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    return urllib.request.build_opener(*handlers).open(url, timeout=30)


def programs(upstream, client):
    """The load programs, each in C or in Python."""
    in_c, in_python = find_programs(), find_programs(use_c=False)
    chosen = {"c": in_c, "python": in_python}
    return Programs(chosen[upstream].upstream, chosen[client].client, "")


@pytest.mark.parametrize("client", LOADS)
@pytest.mark.parametrize("upstream", LOADS)
def test_load_programs_understand_each_other(tmp_path, upstream, client):
    """Upstream and clients may be in either language; every event arrives, in order."""
    bench = Bench(programs(upstream, client), tmp_path)
    with Upstream(bench) as up, Client(bench, up.port, make_parts(10_000), streams=3) as clients:
        first = clients.begin()
        assert (first.turns, first.events, first.deltas) == (3, 9, 0)

        up.plan(events=500)
        burst = clients.follow_up(2)
        assert (burst.turns, burst.events) == (6, 3000)
        assert burst.body_bytes > first.body_bytes

        up.plan(events=20, rate=1000)
        paced = clients.follow_up(1, skip=10)
        assert (paced.turns, paced.events) == (3, 60)
        assert 0 < paced.event_us["min"] <= paced.event_us["p50"] <= paced.event_us["max"]

        stats = up.stats()
        assert stats["turns"] == 12
        assert (stats["strays"], stats["upgrades"]) == (0, 0)
        assert stats["bytes"] > 3 * (first.body_bytes + 2 * burst.body_bytes)


@pytest.mark.parametrize("upstream", LOADS)
def test_the_upstream_speaks_tls_on_its_second_port(tmp_path, upstream):
    """The same turns there, for those who trust the authority of the run, and no others."""
    found = find_programs(use_c=upstream == "c", tls=True)
    bench = Bench(found, tmp_path, certificates=make_certificates(tmp_path))
    with Upstream(bench) as up:
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            fetch(f"{up.tls_origin}/stats", ssl.create_default_context())
        trusting = ssl.create_default_context(cafile=bench.certificates.authority)
        with fetch(f"{up.tls_origin}/stats", trusting) as reply:
            assert json.load(reply)["turns"] == 0
        with running(Way.PLAIN_TLS, bench, up) as proxy:
            told = dict(turns.measured(bench, up, proxy, (turns.Size("tiny", 2000, 1, 3),)))
        assert told["tiny"]["turn_us"] > 0
        assert up.stats()["turns"] > 3


@pytest.mark.parametrize("client", LOADS)
def test_turns_of_either_api_are_measured_side_by_side(tmp_path, client):
    """Every follow-up turn is a delta, in Chat Completions as in Responses."""
    samples = Samples()
    bench = Bench(programs(LOADS[0], client), tmp_path)
    turns.measure_chat(bench, 0, samples, (turns.Size("tiny", 2000, 1, 2),))

    assert samples.ways(turns.CHAT_PART) == [turns.RESPONSES, turns.CHAT]
    for api in (turns.RESPONSES, turns.CHAT):
        assert samples.median(turns.CHAT_PART, api, "tiny", "delta_share") == 1.0
        assert samples.median(turns.CHAT_PART, api, "tiny", "turn_us") > 0


@pytest.mark.parametrize("load", LOADS)
async def test_a_client_takes_no_wrong_answer(tmp_path, load):
    """A refusal ends the measurement with what was said."""

    async def refuse(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")
        await close(writer)
        refused.set()

    refused = asyncio.Event()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    def measure():
        bench = Bench(programs(load, load), tmp_path)
        with Client(bench, port, make_parts(2000)) as client:
            client.begin()

    async with server:
        with pytest.raises(BenchFailed, match=r"refused: .*HTTP/1\.1 503 Busy"):
            await asyncio.to_thread(measure)
        await refused.wait()


# --- as a command ----------------------------------------------------------------------------

USAGE = [
    (["--rounds", "0"], "argument --rounds: must be a whole number above 0"),
    (["--rounds", "101"], "--rounds 101 is too many; 100 at most"),
    (["--plot", "plot.pdf"], "--plot plot.pdf must end in .png or .svg"),
    (["--json", "/none/x.json"], "/none/x.json can't be written: there is no folder /none"),
    (["everything"], "argument part: invalid choice"),
]


@pytest.mark.parametrize(("arguments", "sentence"), USAGE)
def test_what_can_not_work_is_said_at_once(capsys, arguments, sentence):
    """One sentence, status 64, and nothing is measured."""
    assert main(["bench", *arguments]) == 64
    assert sentence in capsys.readouterr().err


# Real-time priority is against noise; other tests, which may run beside this one, have none.
POLITE = ("--no-realtime",)


def run_bench(folder, *arguments):
    """Run the benchmark in a folder; return its output and its JSON."""
    result = subprocess.run(
        [sys.executable, "-m", "proxy", "bench", *arguments, *POLITE, "--json", "bench.json"],
        cwd=folder, env=python_environment(), capture_output=True, text=True, check=False,
        timeout=110,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return result.stdout, json.loads((folder / "bench.json").read_text())


def test_a_quick_run_measures_everything(tmp_path):
    """Every part has figures of every way; Turnwire's follow-up turns were all deltas."""
    output, document = run_bench(tmp_path, "all", "--quick", "--plot", "bench.svg")

    assert document["schema"] == report.SCHEMA
    assert document["options"]["rounds"] == 1
    found = {(s["part"], s["way"]) for s in document["samples"]}
    ways = {"straight", "turnwire", "plain", "naive"}
    secured = {"straight", "turnwire", "turnwire, TLS", "plain", "plain, TLS"}
    for part in (turns.PART, relays.BURST, relays.PACED):
        assert {way for where, way in found if where == part} >= ways
    for part in (tls.TURN, tls.BURST, tls.PACED):
        assert {way for where, way in found if where == part} >= secured
    for part in (footprint.START, footprint.MEMORY, footprint.STATE, footprint.LOOKUP):
        assert (part, "turnwire") in found
    for part in (agents.RUN, agents.WARM):
        assert {way for where, way in found if where == part} == {"straight", "turnwire"}
    shares = [
        sample["values"]["delta_share"]
        for sample in document["samples"]
        if sample["part"] in (turns.PART, tls.TURN) and sample["way"].startswith("turnwire")
    ]
    assert shares
    assert set(shares) == {1.0}
    assert [goal["figure"] for goal in document["goals"]] == [goal.figure for goal in GOALS]
    assert "whole turn, us" in output
    assert "idle resident memory" in output
    assert "<svg" in (tmp_path / "bench.svg").read_text()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are found in /proc")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_interrupted_run_ends_what_it_started(tmp_path, number, status):
    """All its children are gone when it is."""
    process = subprocess.Popen(
        [sys.executable, "-m", "proxy", "bench", "turn", *POLITE],
        cwd=tmp_path, env=python_environment(), stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        for line in process.stderr:
            if "turns, turnwire" in line:
                break
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (started := children.read_text().split()):
            pass
        process.send_signal(number)
        assert process.wait(60) == status
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]


def test_it_runs_without_a_compiler(tmp_path):
    """The load in Python takes the place of that in C, and the report says so."""
    output, document = run_bench(tmp_path, "turn", "--quick", "--python-load")

    assert document["options"]["load"].startswith("Python")
    assert "load programs: Python" in output
    assert {s["part"] for s in document["samples"]} == {turns.PART}
