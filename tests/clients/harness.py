"""
One row: the client straight at the simulator, then through Turnwire, and what must be the same.

    client ── wire tap ── simulator                      the straight run
    client ── wire tap ── Turnwire ── simulator          the run that is judged

The tap knows what the client sent and was told, the simulator what context it held for each answer.
Both are joined by the id of the response, which the client was told and the simulator gave.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import Stack, stack

from clients import install
from clients.rows import MARKER, Ecosystem, Row, Same
from clients.wiretap import Exchange, Wiretap
from proxy.core.reasons import Mode
from proxy.simulator import Simulator, SimulatorOptions, chat
from proxy.simulator.answers import Context
from proxy.simulator.errands import FILE_NAME
from proxy.simulator.meaning import is_model_item, item_type
from proxy.simulator.wire import ApiError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from proxy.simulator.journal import Seen
    from proxy.simulator.wire import Item

DRIVERS = Path(__file__).parent / "drivers"
CLIENT_TIMEOUT_S = 180
API_KEY = "sk-test-0123456789abcdef"
CHAT_PATH = "/v1/chat/completions"
TURN_PATHS = ("/v1/responses", "/responses", CHAT_PATH)

_FOUND_MARKER = re.compile(rf"{MARKER}-\d+-\d+")
_RESPONSE_ID = re.compile(rb'"id"\s*:\s*"((?:resp_|chatcmpl-)[^"]+)"')
_KEPT_OUTPUT_CHARS = 4000

# What any client may see of the system it runs on; nothing else is passed on.
_PASSED_ON = ("PATH", "LANG", "SSL_CERT_FILE")
_QUIET = {
    "DO_NOT_TRACK": "1",
    "CI": "1",
    "NO_COLOR": "1",
    "TERM": "dumb",
    "LC_ALL": "C.UTF-8",
    "NO_UPDATE_NOTIFIER": "1",
    "OTEL_SDK_DISABLED": "true",
    "PYTHONWARNINGS": "ignore",
    "PYTHONUTF8": "1",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_DISABLE_TRACKING": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENHANDS_SUPPRESS_BANNER": "1",
}


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a client: its exit status, the final outputs its driver told, and the rest."""

    exit_status: int
    finals: tuple[str, ...]
    output: str
    exchanges: Sequence[Exchange]

    @property
    def turns(self) -> list[Exchange]:
        """The requests for a response."""
        return [each for each in self.exchanges if each.method == "POST" and _is_turn_path(each)]


@dataclass(slots=True)
class Result:
    """What a row showed. `problems` is empty if it passed."""

    row: Row
    problems: list[str] = field(default_factory=list)
    turns: int = 0
    follow_ups: int = 0
    deltas: int = 0
    others: Counter[str] = field(default_factory=Counter)
    contexts: int = 0
    gaps: Counter[str] = field(default_factory=Counter)
    duration_s: float = 0.0
    output: str = ""
    bodies: list[bytes] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether everything was as it must be."""
        return not self.problems


async def run_row(row: Row) -> Result:
    """Run a row both ways and judge it. Whatever goes wrong is a problem of the result."""
    result = Result(row)
    started = time.monotonic()
    try:
        async with Simulator(SimulatorOptions(answers=row.answers)) as simulator:
            simulator.faults.arm(*row.faults)
            straight = await drive(row, simulator.port)
        async with stack(
            sim=SimulatorOptions(answers=row.answers),
            shutdown={"drain_timeout_s": 5},
            chat_completions="translate",
        ) as running:
            running.sim.faults.arm(*row.faults)
            through = await drive(row, running.port)
            await running.idle()
            judge_turns(result, through, running)
            log = "\n".join(f"{call.args} {call.kwargs}" for call in running.log.calls)
        compare(result, straight, through)
        result.output = f"{_tail(straight, through)}\n--- log\n{log}"
    except (AssertionError, OSError, TimeoutError) as error:
        result.problems.append(f"{type(error).__name__}: {error}")
    result.duration_s = time.monotonic() - started
    return result


async def drive(row: Row, port: int) -> Run:
    """Run the client of a row once, against this port of ours, in a home of its own."""
    with tempfile.TemporaryDirectory(prefix="turnwire-client-", ignore_cleanup_errors=True) as home:
        async with Wiretap(port) as tap:
            status, output = await _execute(row, Path(home), f"http://127.0.0.1:{tap.port}/v1")
            exchanges = tap.exchanges()
    lines = [line for line in output.splitlines() if line.startswith("FINAL ")]
    finals = tuple(str(json.loads(line.removeprefix("FINAL "))) for line in lines)
    return Run(status, finals, output, exchanges)


async def _execute(row: Row, home: Path, base_url: str) -> tuple[int, str]:
    work = home / "work"
    work.mkdir()
    (work / FILE_NAME).write_text("hello from a file\n", encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        *_command(row),
        cwd=work,
        env=_environment(row, home, base_url),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(CLIENT_TIMEOUT_S):
            told = await process.stdout.read()
            status = await process.wait()
    except TimeoutError:
        status, told = -1, b"(timed out)"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return status, told.decode("utf-8", "replace")


def _command(row: Row) -> list[str]:
    driver = DRIVERS / row.driver
    if driver.suffix == ".mjs":
        return [str(install.node_bin() / "node"), str(driver)]
    if row.client.ecosystem is Ecosystem.PIP:
        return [str(install.directory(row.client) / "venv" / "bin" / "python"), str(driver)]
    return [sys.executable, str(driver)]


def _environment(row: Row, home: Path, base_url: str) -> dict[str, str]:
    passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    path = f"{install.node_bin()}:{passed_on.get('PATH', '')}"
    if row.client.ecosystem is Ecosystem.PIP:
        path = passed_on.get("PATH", "")
    places = {
        "XDG_CONFIG_HOME": ".config",
        "XDG_DATA_HOME": ".local/share",
        "XDG_CACHE_HOME": ".cache",
        "XDG_STATE_HOME": ".local/state",
        "TMPDIR": "tmp",
    }
    (home / "tmp").mkdir()
    return {
        **passed_on,
        **_QUIET,
        **{name: str(home / place) for name, place in places.items()},
        "PATH": path,
        "HOME": str(home),
        "BASE_URL": base_url,
        "OPENAI_API_KEY": API_KEY,
        "CLIENT_DIR": str(install.directory(row.client)),
        "MARKER": MARKER,
        **row.environment,
    }


def compare(result: Result, straight: Run, through: Run) -> None:
    """The client must end the same way and tell its user the same, unless it is known not to."""
    found = list(_differences(result.row, straight, through))
    if not result.row.difference:
        result.problems.extend(found)
    elif not found:
        result.problems.append(f"no longer so: {result.row.difference}")


def _differences(row: Row, straight: Run, through: Run) -> Iterator[str]:
    for name, run in (("straight", straight), ("through Turnwire", through)):
        if (run.exit_status != 0) is not row.gives_up:
            yield f"{name}: exit status {run.exit_status}"
        if len(run.finals) != row.prompts:
            yield f"{name}: {len(run.finals)} of {row.prompts} final outputs"
    ours, theirs = (_comparable(row, run.finals) for run in (through, straight))
    if ours != theirs:
        yield f"another final output: {ours!r}, straight {theirs!r}"
    upgraded = any(each.status == 101 for each in straight.exchanges)
    varies = upgraded or row.same is Same.ENDING
    if not varies and len(straight.turns) != len(through.turns):
        yield f"{len(through.turns)} turns, straight {len(straight.turns)}"


def _comparable(row: Row, finals: Iterable[str]) -> list[object]:
    match row.same:
        case Same.ALL:
            return list(finals)
        case Same.COUNTS:
            return [_FOUND_MARKER.findall(final) for final in finals]
        case Same.ENDING:
            return [MARKER in final for final in finals]


def judge_turns(result: Result, run: Run, running: Stack) -> None:
    """Every turn's status, mode, reason and context; and the gaps that were counted."""
    records = {seen.response_id: seen for seen in running.sim.journal}
    result.turns = len(run.turns)
    result.bodies = [turn.body() for turn in run.turns]
    for turn in run.turns:
        if turn.status not in result.row.statuses:
            result.problems.append(f"status {turn.status} of a turn")
        _judge_mode(result, turn)
        _judge_context(result, turn, records, running)
    if result.turns - result.follow_ups < result.row.openings:
        result.problems.append(f"fewer than {result.row.openings} conversations began")
    if result.follow_ups - result.deltas > result.row.excused_at_most:
        result.problems.append(f"more than {result.row.excused_at_most} turns were no deltas")
    gaps = running.proxy.metrics.registry.collect()
    for sample in (s for metric in gaps for s in metric.samples):
        if sample.name == "turnwire_normalisation_gaps_total" and sample.value:
            result.gaps[sample.labels["field"]] += int(sample.value)
    if result.gaps.keys() - result.row.gaps.keys():
        result.problems.append(f"normalisation gaps: {dict(result.gaps)}")


def _judge_mode(result: Result, turn: Exchange) -> None:
    """A turn that goes on with a conversation is a delta, or has a reason that is excused."""
    body = json.loads(turn.body())
    if not _goes_on(body):
        return
    result.follow_ups += 1
    mode, reason = turn.reply_header("turnwire-mode"), turn.reply_header("turnwire-reason")
    if mode == Mode.DELTA:
        result.deltas += 1
        return
    result.others[reason] += 1
    if reason not in result.row.excuses:
        result.problems.append(f"not a delta: {mode or 'no mode'} {reason}")


def _goes_on(body: dict[str, Any]) -> bool:
    items = body.get("input", body.get("messages"))
    if body.get("previous_response_id"):
        return True
    return isinstance(items, list) and any(
        is_model_item(item) or item_type(item) == "item_reference" for item in items
    )


def _judge_context(
    result: Result, turn: Exchange, records: dict[str | None, Seen], running: Stack
) -> None:
    """The simulator answered exactly what the client had sent."""
    if turn.reply is None or not (found := _RESPONSE_ID.search(turn.reply.body)):
        return
    result.contexts += 1
    identity = found[1].decode()
    # A translated answer has the id of the response that it was made of, with Chat's prefix.
    seen = records.get(identity) or records.get(identity.replace("chatcmpl-", "resp_", 1))
    if seen is None:
        result.problems.append("a reply with a response that the simulator never gave")
        return
    body = json.loads(turn.body())
    if "messages" in body:
        asked = chat.context_of(body)
        if asked.digest.hex() != seen.digest:
            difference = _difference(asked.items, seen.context)
            result.problems.append(f"another context upstream: {difference}")
        return
    items = _resolved(body, seen, running)
    if body.get("previous_response_id"):
        same = seen.previous_response_id == body["previous_response_id"]
        if not same or list(seen.given) != items:
            result.problems.append("a client's own chain was changed")
    elif Context.of(body, items).digest.hex() != seen.digest:
        result.problems.append(f"another context upstream: {_difference(items, seen.context)}")


def _resolved(body: dict[str, Any], seen: Seen, running: Stack) -> list[Item]:
    """The items of a request, with what its references stand for."""
    given = body["input"]
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    storage = running.sim.storage
    items = []
    for item in given:
        if item_type(item) == "item_reference":
            with contextlib.suppress(ApiError):
                item = storage.resolved(item, seen.principal)
        items.append(item)
    return items


def _difference(sent: Sequence[Item], held: Sequence[Item]) -> str:
    """Where the two part, in words that show no content."""
    kinds = [[item_type(i) for i in items if item_type(i) != "reasoning"] for items in (sent, held)]
    pairs = enumerate(zip(*kinds, strict=False))
    place = next((i for i, (one, other) in pairs if one != other), min(map(len, kinds)))
    return f"{len(kinds[0])} items sent, {len(kinds[1])} held, kinds part at {place}"


def _is_turn_path(exchange: Exchange) -> bool:
    return exchange.path.split("?")[0] in TURN_PATHS


def _tail(*runs: Run) -> str:
    names = ("straight", "through Turnwire")
    parts = [
        f"--- {name}, exit status {run.exit_status}\n{run.output[-_KEPT_OUTPUT_CHARS:]}"
        for name, run in zip(names, runs, strict=True)
    ]
    return "\n".join(parts)


def missing_tool(row: Row) -> str | None:
    """Why a row can't run on this machine, or None."""
    if row.client.ecosystem is Ecosystem.NPM and shutil.which("npm") is None:
        return "npm is not installed"
    return None
