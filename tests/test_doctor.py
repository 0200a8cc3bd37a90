"""
`turnwire doctor` against real things on loopback: what it tells apart, and what it says of each.

Each case is a world in which one thing is wrong; the test asks for the code and the verdict of the
check that is to find it, and that what comes before it is in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from typing import TYPE_CHECKING

import pytest
import trustme
from harness import serving
from wsserver import raw_server

from proxy import cli
from proxy.config import load
from proxy.doctor import examine
from proxy.doctor.findings import Check, Code, Finding, Verdict
from proxy.doctor.http import judge_clock, read
from proxy.simulator import Simulator, SimulatorOptions
from proxy.simulator.faults import RefuseUpgrade

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

GOOD, BAD = "sk-good-key", "bad-key"
PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ws_proxy", "wss_proxy")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """Take this machine's proxies out of the tests."""
    for name in PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


async def findings(upstream: str, key: str | None = GOOD, **flags: str) -> dict[Check, Finding]:
    """Examine a configuration; ports are free ones unless told otherwise."""
    given = {"--upstream": upstream, "--port": "0", "--admin-port": "0"}
    given |= {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
    environment = {} if key is None else {"OPENAI_API_KEY": key}
    made: dict[Check, Finding] = {}
    async for finding in examine(
        lambda: load(given, {}, None), "OPENAI_API_KEY", None, environment
    ):
        assert finding.check not in made or finding.check is Check.PROXIES
        assert bool(finding.remedy) == (finding.verdict in (Verdict.WARN, Verdict.FAIL))
        made.setdefault(finding.check, finding)
    return made


def failures(found: dict[Check, Finding]) -> dict[Check, Code]:
    """Return what failed."""
    return {f.check: f.code for f in found.values() if f.verdict is Verdict.FAIL}


def port_of(url: str) -> int:
    """Return the port that a URL names."""
    return int(url.split(":")[2].split("/", maxsplit=1)[0])


async def test_all_is_well_with_an_upstream_as_it_should_be():
    """Against the simulator, with a good key, every check is made and none complains."""
    async with Simulator() as sim:
        found = await findings(sim.base_url)

    assert failures(found) == {}
    assert list(found) == list(Check)
    wrong = {f.check for f in found.values() if f.verdict is Verdict.WARN}
    assert wrong <= {Check.DESCRIPTORS}
    assert found[Check.CHAINING].code is Code.OK
    assert found[Check.LANES].code is Code.NO_LANES


async def test_asks_for_nothing_that_is_generated():
    """No response is created by an examination: whatever it asks is refused, or is no turn."""
    async with Simulator() as sim:
        await findings(sim.base_url)
        turns = [seen for seen in sim.journal.turns if seen.response_id is not None]

    assert turns == []


async def test_tells_a_wrong_key():
    """A key that upstream refuses is named as the cause, and not shown."""
    async with Simulator() as sim:
        found = await findings(sim.base_url, BAD)

    assert failures(found) == {Check.KEY: Code.WRONG_KEY}
    assert "OPENAI_API_KEY" in found[Check.KEY].fact
    assert BAD not in repr(found)


async def test_tells_a_key_that_is_none():
    """What no header can carry is not sent."""
    async with Simulator() as sim:
        found = await findings(sim.base_url, "sk-\nkey")

    assert failures(found) == {Check.KEY: Code.WRONG_KEY}
    assert "sk-" not in repr(found)


async def test_says_that_there_is_no_key():
    """Without a key the upstream's 401 is as it should be, and nothing fails."""
    async with Simulator() as sim:
        found = await findings(sim.base_url, None)

    assert failures(found) == {}
    assert found[Check.HTTP].code is Code.OK
    assert found[Check.KEY].code is Code.NO_KEY
    assert found[Check.WEBSOCKET].verdict is Verdict.SKIPPED


async def test_tells_that_there_is_no_websocket_mode():
    """An upstream that answers HTTP and refuses the upgrade lacks WebSocket mode."""
    async with Simulator(SimulatorOptions(websocket=False)) as sim:
        found = await findings(sim.base_url)

    assert failures(found) == {Check.WEBSOCKET: Code.NO_WEBSOCKET}
    assert "websocket.enabled = false" in found[Check.WEBSOCKET].remedy
    assert "proxy" not in found[Check.WEBSOCKET].fact


@pytest.mark.parametrize(
    ("status", "verdict", "code"),
    [
        (403, Verdict.FAIL, Code.WRONG_KEY),
        (404, Verdict.FAIL, Code.NO_WEBSOCKET),
        (426, Verdict.FAIL, Code.NO_WEBSOCKET),
        (429, Verdict.WARN, Code.RATE_LIMITED),
        (501, Verdict.FAIL, Code.NO_WEBSOCKET),
        (503, Verdict.FAIL, Code.UPSTREAM_FAILING),
    ],
)
async def test_reads_the_status_of_a_refused_upgrade(status, verdict, code):
    """What a refusal means depends on its status, and on what HTTP has said."""
    async with Simulator() as sim:
        sim.faults.arm(RefuseUpgrade(status=status))
        found = await findings(sim.base_url)

    assert (found[Check.WEBSOCKET].verdict, found[Check.WEBSOCKET].code) == (verdict, code)
    assert Check.CHAINING not in found


async def test_tells_a_name_that_does_not_resolve():
    """A host that DNS does not know ends the examination there."""
    found = await findings("https://api.nowhere.invalid/v1")

    assert failures(found) == {Check.DNS: Code.DNS_FAILED}
    assert Check.HTTP not in found


@contextlib.asynccontextmanager
async def tls_server(authority: trustme.CA) -> AsyncIterator[str]:
    """Serve TLS with a certificate of this authority; every request is refused with a 401."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(
                b"HTTP/1.1 401 Unauthorized\r\nContent-Type: application/json\r\n"
                b"Content-Length: 2\r\nConnection: close\r\n\r\n{}"
            )
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    try:
        yield f"https://localhost:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()
        await server.wait_closed()


async def test_tells_a_certificate_that_is_not_trusted(monkeypatch, tmp_path):
    """A certificate of an unknown authority fails TLS; the remedy that is named helps."""
    authority = trustme.CA()
    async with tls_server(authority) as upstream:
        before = await findings(upstream)
        authority.cert_pem.write_to_path(tmp_path / "ca.pem")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        after = await findings(upstream)

    assert failures(before) == {Check.TLS: Code.TLS_FAILED}
    assert "SSL_CERT_FILE" in before[Check.TLS].remedy
    assert after[Check.TLS].verdict is Verdict.OK
    assert failures(after) == {Check.KEY: Code.WRONG_KEY}


async def test_tells_that_no_tls_is_spoken():
    """An https:// upstream that speaks plain HTTP is told as that."""
    async with Simulator() as sim:
        found = await findings(sim.base_url.replace("http://", "https://"))

    assert failures(found) == {Check.TLS: Code.TLS_FAILED}
    assert "http://" in found[Check.TLS].remedy


async def test_tells_that_nobody_listens(closed_port):
    """A refused connection is neither DNS nor TLS."""
    found = await findings(f"http://127.0.0.1:{closed_port}/v1")

    assert failures(found) == {Check.HTTP: Code.UNREACHABLE}


async def test_tells_a_self_loop_of_the_configuration():
    """An upstream that is written as our own address is refused before anything is asked."""
    found = await findings("http://localhost:8787/v1", port="8787")

    assert failures(found) == {Check.LOOP: Code.SELF_LOOP}


async def test_tells_a_self_loop_under_another_name(served_port):
    """An upstream that leads to our own listener by another address is found by asking for it."""
    upstream = f"http://127.0.0.2:{served_port}/v1"
    found = await findings(upstream, port=str(served_port), host="0.0.0.0")

    assert failures(found) == {Check.LOOP: Code.SELF_LOOP}


async def test_tells_a_running_turnwire_that_is_its_own_upstream(served_port):
    """A Turnwire that goes round in a loop says so itself."""
    upstream = f"http://127.0.0.2:{served_port}/v1"
    async with serving(upstream, port=served_port, host="0.0.0.0"):
        found = await findings(upstream)

    assert failures(found) == {Check.HTTP: Code.SELF_LOOP}


async def test_tells_an_upstream_that_is_a_turnwire():
    """One Turnwire before another is found by its answer to the upgrade."""
    async with Simulator() as sim, serving(sim.base_url) as (proxy, _):
        found = await findings(proxy.base_url)

    assert failures(found) == {Check.WEBSOCKET: Code.SELF_LOOP}


@contextlib.asynccontextmanager
async def forward_proxy(connect_status: int = 403, status: int = 200) -> AsyncIterator[str]:
    """Serve as an HTTP proxy that answers requests, and CONNECT with a status of its own."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                wanted = connect_status if head.startswith(b"CONNECT ") else status
                writer.write(
                    b"HTTP/1.1 %d As Told\r\nContent-Type: application/json\r\n"
                    b'Content-Length: 11\r\n\r\n{"data":[]}' % wanted
                )
                await writer.drain()

    async with raw_server(answer) as url:
        yield f"http://127.0.0.1:{port_of(url)}"


async def test_tells_a_proxy_that_lets_no_websocket_through(monkeypatch):
    """A proxy that serves HTTP and refuses CONNECT is named, and not taken for the upstream."""
    async with Simulator() as sim, forward_proxy() as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        found = await findings(sim.base_url)

    assert failures(found) == {Check.WEBSOCKET: Code.PROXY_IN_THE_WAY}
    assert found[Check.HTTP].code is Code.OK
    assert "NO_PROXY" in found[Check.WEBSOCKET].remedy
    assert found[Check.DNS].verdict is Verdict.SKIPPED


async def test_tells_a_proxy_that_can_not_be_reached(monkeypatch, closed_port):
    """A proxy that is not there is told as such, without its credentials."""
    monkeypatch.setenv("https_proxy", f"http://user:secret@127.0.0.1:{closed_port}")
    found = await findings("https://api.nowhere.invalid/v1")

    assert failures(found) == {Check.HTTP: Code.PROXY_IN_THE_WAY}
    assert "secret" not in repr(found)


async def test_tells_a_proxy_whose_name_does_not_resolve(monkeypatch):
    """It is the proxy's name that is wrong then, and not the upstream's."""
    monkeypatch.setenv("http_proxy", "http://proxy.nowhere.invalid:3128")
    async with Simulator() as sim:
        found = await findings(sim.base_url)

    assert failures(found) == {Check.HTTP: Code.PROXY_IN_THE_WAY}


async def test_tells_a_proxy_that_wants_credentials(monkeypatch):
    """A 407 is the proxy's, not the upstream's."""
    async with forward_proxy(status=407) as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        found = await findings("http://api.nowhere.invalid/v1")

    assert failures(found) == {Check.HTTP: Code.PROXY_IN_THE_WAY}


async def test_warns_of_a_proxy_between_the_agent_and_us(monkeypatch):
    """An environment whose proxy takes loopback addresses too leads agents astray."""
    async with Simulator() as sim, forward_proxy() as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        without = await findings(sim.base_url)
        monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
        exempt = await findings(sim.base_url)

    assert without[Check.PROXIES].code is Code.PROXY_IN_THE_WAY
    assert without[Check.PROXIES].verdict is Verdict.WARN
    assert exempt[Check.PROXIES].code is Code.OK
    assert failures(exempt) == {}


async def test_a_turnwire_that_runs_is_no_trouble():
    """The ports that a running Turnwire holds are in order, and it is said to run."""
    async with Simulator() as sim, serving(sim.base_url) as (proxy, _):
        ports = (str(port_of(proxy.base_url)), str(port_of(f"{proxy.admin_url}/")))
        found = await findings(sim.base_url, port=ports[0], admin_port=ports[1])

    assert found[Check.PORTS].verdict is Verdict.OK
    assert "running" in found[Check.PORTS].fact


async def test_tells_a_port_in_use(taken_port):
    """The flag that chooses another one is named."""
    async with Simulator() as sim:
        found = await findings(sim.base_url, admin_port=str(taken_port))

    assert failures(found) == {Check.PORTS: Code.PORT_IN_USE}
    assert "--admin-port" in found[Check.PORTS].remedy


DATE = "Tue, 01 Dec 2026 06:00:00 GMT"
AT_THAT_DATE = 1_796_104_800.0


@pytest.mark.parametrize(
    ("now", "code", "words"),
    [
        (AT_THAT_DATE + 59, Code.OK, "within 60 s"),
        (AT_THAT_DATE + 61, Code.CLOCK_OFF, "61 s ahead of"),
        (AT_THAT_DATE - 3600, Code.CLOCK_OFF, "3600 s behind"),
    ],
)
def test_tells_a_clock_that_is_off(now, code, words):
    """A reply whose date is another than ours means that one of the two clocks is wrong."""
    finding = judge_clock(read(200, DATE, b"{}"), now)

    assert finding.code is code
    assert words in finding.fact


async def test_warns_of_few_descriptors(monkeypatch):
    """The limit that is compared is the hard one, to which serving raises the other."""
    resource = pytest.importorskip("resource")
    async with Simulator() as sim:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 512))
        found = await findings(sim.base_url)

    assert found[Check.DESCRIPTORS].code is Code.FEW_DESCRIPTORS
    assert "about 224 agents" in found[Check.DESCRIPTORS].fact


def test_the_command_prints_json_and_fails(capsys, monkeypatch):
    """`--json` is one object with every check; the exit status is 1 if one failed."""
    monkeypatch.setenv("OPENAI_API_KEY", GOOD)
    status = cli.main(["doctor", "--upstream", "https://api.nowhere.invalid/v1", "--json",
                       "--port", "0", "--admin-port", "0"])  # fmt: skip

    told = json.loads(capsys.readouterr().out)
    assert status == 1
    assert told["ok"] is False
    assert told["checks"][-1]["code"] == "dns_failed"
    assert set(told["checks"][-1]) == {"check", "verdict", "code", "fact", "remedy"}


def test_the_command_prints_a_line_a_check(capsys):
    """For people each check is a line, with what to do below the one that failed."""
    status = cli.main(["doctor", "--upstream", "http://127.0.0.1:8787"])

    lines = capsys.readouterr().out.splitlines()
    assert status == 1
    assert lines[0].startswith("fail    self-loop ")
    assert any(line.strip().startswith("-> ") for line in lines)
    assert lines[-1] == "Not in order: self-loop."
