"""
Three replicas of Turnwire behind a real load balancer, restarted one by one under load.

    python -m deploy.gateways.roll nginx haproxy envoy --report deploy/gateways/report.md

The load balancers run with the very files of this directory; only the addresses in them are
replaced. Conversations go on all the while, each with its own header and its own pace, as stateless
agents do: the full history every time. The simulated upstream checks, turn by turn, that the model
saw exactly what the client had sent, whichever replica it came through.

What is counted is what a restart costs. A replica that ends forgets its conversations: each of them
must pay one full send when it meets another replica, and, since consistent hashing sends it back
once the replica has returned, a second one then. Conversations of the other replicas must pay
nothing. So of three replicas, one restart may make a third of the conversations pay, give or take
what chance gives to one replica. A turn that fails is one that its client saw fail.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from proxy.simulator import AnswerOptions, Simulator, SimulatorOptions
from proxy.simulator.agent import Agent, user
from proxy.simulator.answers import Context

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from proxy.simulator.agent import Reply
    from proxy.simulator.wire import Item

HERE = Path(__file__).parent
REPLICAS = 3
BASE_PORT = 18700
CONVERSATIONS_PER_KEY = 10  # so that no key needs more connections than it may have
HEADER = "x-session-affinity"
PATIENCE_S = 60.0
ALLOWED_SHARE = 1 / 3 + 0.05
# The time in which HAProxy and Envoy see, asking once a second, that a replica is not ready.
NOTICE_S = 5.0
QUIET_S = 3.0  # until every load balancer has seen that a replica has come back


# --- The replicas ---------------------------------------------------------------------------------


@dataclass
class Replica:
    """One Turnwire process, which can be ended and started again on its ports."""

    number: int
    upstream: str
    notice_s: float
    log: Path
    process: asyncio.subprocess.Process | None = None

    @property
    def port(self) -> int:
        """The port for turns."""
        return BASE_PORT + 2 * self.number

    @property
    def admin_port(self) -> int:
        """The port for health."""
        return self.port + 1

    async def start(self) -> None:
        """Start it, and wait until it takes turns."""
        flags = {
            "--upstream": self.upstream,
            "--port": self.port,
            "--admin-port": self.admin_port,
            "--shutdown-notice-s": self.notice_s,
            "--shutdown-drain-timeout-s": 30,
            "--log-level": "warning",
            # The upstream shares its process with all clients, and may be slow where cores are few:
            # that is not what is measured.
            "--websocket-connect-timeout-s": PATIENCE_S,
            "--websocket-ping-timeout-s": PATIENCE_S,
            "--websocket-probe-timeout-s": PATIENCE_S,
        }
        words = [str(word) for pair in flags.items() for word in pair]
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "proxy", "serve", *words),
                cwd=HERE.parents[1],
                env={k: v for k, v in os.environ.items() if not k.startswith("TURNWIRE_")},
                stderr=log,
            )
        await _until(f"http://127.0.0.1:{self.admin_port}/readyz", lambda status: status == 200)

    async def end(self) -> None:
        """Tell it to end, as Kubernetes would, and wait until it has drained."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        status = await asyncio.wait_for(self.process.wait(), PATIENCE_S)
        if status != 0:
            raise RuntimeError(f"replica {self.number} ended with status {status}: see {self.log}")

    async def kill(self) -> None:
        """End it at once, if it has not ended."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


async def _until(url: str, is_good: Callable[[int], bool]) -> None:
    """Wait until a URL answers with a good status."""
    deadline = time.monotonic() + PATIENCE_S
    async with aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url) as reply:
                    if is_good(reply.status):
                        return
            if time.monotonic() > deadline:
                raise RuntimeError(f"no good answer from {url}")
            await asyncio.sleep(0.05)


# --- The load balancers ---------------------------------------------------------------------------


@dataclass
class Balancer:
    """
    A load balancer, run with its file of this directory.

    `watches_health` tells whether it asks /readyz; if not, it notices that a replica has gone by
    connections that are refused.
    """

    name: str
    program: str
    file: str
    arguments: Callable[[Path], Sequence[str]]
    watches_health: bool
    folder: Path = Path()
    process: asyncio.subprocess.Process | None = None
    version: str = ""

    @property
    def port(self) -> int:
        """Where turns are sent."""
        return BASE_PORT + 50

    @property
    def base_url(self) -> str:
        """The base URL for clients."""
        return f"http://127.0.0.1:{self.port}/v1"

    def configuration(self) -> str:
        """Return the file's text with the addresses of this machine."""
        text = (HERE / self.file).read_text()
        for number in range(REPLICAS):
            port, admin_port = BASE_PORT + 2 * number, BASE_PORT + 2 * number + 1
            text = self._placed(text, number, port, admin_port)
        return re.sub(r"(listen |bind :|port_value: )8080", rf"\g<1>{self.port}", text)

    def _placed(self, text: str, number: int, port: int, admin_port: int) -> str:
        name = f"turnwire-{number}"
        match self.name:
            case "nginx":
                return text.replace(f"server {name}:8787", f"server 127.0.0.1:{port}")
            case "haproxy":
                line = rf"(server {name} ){name}:8787"
                return re.sub(line, rf"\g<1>127.0.0.1:{port} check port {admin_port}", text)
            case _:
                text = text.replace(
                    f"address: {name}, port_value: 8787", f"address: 127.0.0.1, port_value: {port}"
                )
                return text.replace("port_value: 8788", f"port_value: {admin_port}", 1)

    async def start(self, folder: Path) -> None:
        """Start it, and wait until it relays."""
        self.folder = folder
        (folder / self.file).write_text(self.configuration())
        program = shutil.which(self.program, path=f"{os.environ['PATH']}:/usr/sbin")
        if program is None:
            raise RuntimeError(f"{self.program} is not installed")
        with (folder / "log").open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                program, *self.arguments(folder / self.file), cwd=folder, stdout=log, stderr=log
            )
        self.version = await _version(program)
        await _until(f"http://127.0.0.1:{self.port}/v1/models", lambda status: status < 500)

    async def stop(self) -> None:
        """End it."""
        if self.process is not None and self.process.returncode is None:
            self.process.terminate()
            await self.process.wait()


async def _version(program: str) -> str:
    flag = "--version" if program.endswith("envoy") else "-v"
    process = await asyncio.create_subprocess_exec(
        program, flag, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    found = re.search(r"\d+\.\d+\.\d+", output.decode())
    return found[0] if found else "?"


def balancers() -> dict[str, Balancer]:
    """Return the load balancers that there are, by name."""
    nginx = Balancer(
        "nginx",
        "nginx",
        "nginx.conf",
        lambda file: ["-p", f"{file.parent}/", "-c", str(file), "-g", "daemon off;"],
        watches_health=False,
    )
    haproxy = Balancer(
        "haproxy", "haproxy", "haproxy.cfg", lambda file: ["-f", str(file)], watches_health=True
    )
    envoy = Balancer(
        "envoy",
        "envoy",
        "envoy.yaml",
        lambda file: ["-c", str(file), "--concurrency", "2", "--log-level", "warning"],
        watches_health=True,
    )
    return {each.name: each for each in (nginx, haproxy, envoy)}


# --- The load -------------------------------------------------------------------------------------


@dataclass
class Talk:
    """One conversation. `paid` holds a (time, mode, reason) for each turn that was not a delta."""

    number: int
    agent: Agent
    history: list[Item] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)
    paid: list[tuple[float, str]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    turns: int = 0
    ended: int = 0

    async def turn(self) -> None:
        """Say something, and take the answer into the history."""
        self.turns += 1
        try:
            await self._say()
        finally:
            self.ended += 1

    async def _say(self) -> None:
        self.history.append(user(f"Conversation {self.number}, turn {self.turns}."))
        try:
            reply = await self.agent.send(self.history)
        except (aiohttp.ClientError, TimeoutError) as error:
            self.failed.append(f"{type(error).__name__}: {error}")
            self.history.pop()
            return
        if reply.response is None or reply.response["status"] != "completed":
            self.failed.append(f"status {reply.status}: {reply.error}")
            self.history.pop()
            return
        self.history.extend(self.agent.echo(reply.items))
        self.replies.append(reply)
        if reply.mode != "delta" and self.turns > 1:
            self.paid.append((time.monotonic(), f"{reply.mode}: {reply.reason}"))


async def _keep_talking(talk: Talk, every_s: float, offset_s: float, stop: asyncio.Event) -> None:
    """Take a turn every so often until told to stop."""
    pause_s = offset_s
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), pause_s)
        if stop.is_set():
            return
        await talk.turn()
        pause_s = every_s


async def _all_have_turned(talks: Sequence[Talk]) -> None:
    """Wait until each conversation has had a turn that began later than now."""
    before = [talk.turns for talk in talks]
    # Looked at now and then: three hundred events would be more than the run is worth.
    while any(  # noqa: ASYNC110
        talk.ended <= turns for talk, turns in zip(talks, before, strict=True)
    ):
        await asyncio.sleep(0.1)


def _talks(count: int, base_url: str, seed: str) -> list[Talk]:
    """Make conversations with a header of their own, ten to a key."""
    return [
        Talk(
            number,
            Agent(
                base_url,
                api_key=f"sk-{number // CONVERSATIONS_PER_KEY}",
                tools=(),
                settings={"store": False},
                headers={
                    "x-session-affinity": str(uuid.uuid5(uuid.NAMESPACE_OID, f"{seed}{number}"))
                },
            ),
        )
        for number in range(count)
    ]


# --- The run --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """When a replica was restarted, from the beginning to the time when all had settled again."""

    replica: int
    begin: float
    end: float
    away_s: float


@dataclass(frozen=True)
class Step:
    """One restart: when, and which share of the conversations paid a full send for it."""

    replica: int
    away_s: float
    paid_once: int
    paid_twice: int
    paid_more: int

    @property
    def paid(self) -> int:
        """Conversations that paid at all."""
        return self.paid_once + self.paid_twice + self.paid_more


@dataclass(frozen=True)
class Outcome:
    """What came of one load balancer's run."""

    name: str
    version: str
    conversations: int
    turns: int
    deltas: int
    failed: tuple[str, ...]
    wrong_contexts: int
    steps: tuple[Step, ...]
    unprovoked: int
    reasons: Counter[str]

    @property
    def ok(self) -> bool:
        """Whether no turn failed, none was wrong, and no restart cost more than it may."""
        limit = ALLOWED_SHARE * self.conversations
        return (
            not self.failed
            and not self.wrong_contexts
            and not self.unprovoked
            and all(0 < step.paid <= limit for step in self.steps)
        )


async def run(balancer: Balancer, conversations: int, every_s: float, seed: str) -> Outcome:
    """Run one load balancer through the restart of every replica."""
    folder = _folder(balancer.name)
    options = SimulatorOptions(answers=AnswerOptions(rounds=0))
    async with Simulator(options) as sim, contextlib.AsyncExitStack() as stack:
        replicas = await _started(sim.base_url, balancer, folder, stack)
        stack.push_async_callback(balancer.stop)
        await balancer.start(folder)
        await asyncio.sleep(QUIET_S)
        talks = _talks(conversations, balancer.base_url, seed)
        for talk in talks:
            stack.push_async_callback(talk.agent.close)
        windows = await _rolled(balancer, replicas, talks, every_s)
        return _outcome(balancer, talks, windows, sim)


def _folder(name: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=f"turnwire-{name}-"))
    folder.chmod(0o755)  # nginx's workers are another user
    return folder


async def _started(
    upstream: str, balancer: Balancer, folder: Path, stack: contextlib.AsyncExitStack
) -> list[Replica]:
    notice_s = NOTICE_S if balancer.watches_health else 0.0
    replicas = [
        Replica(number, upstream, notice_s, folder / f"replica-{number}.log")
        for number in range(REPLICAS)
    ]
    for replica in replicas:
        await replica.start()
        stack.push_async_callback(replica.kill)
    return replicas


async def _rolled(
    balancer: Balancer, replicas: Sequence[Replica], talks: Sequence[Talk], every_s: float
) -> list[Window]:
    """Restart each replica under load."""
    stop = asyncio.Event()
    windows = []
    async with asyncio.TaskGroup() as group:
        for talk in talks:
            offset_s = every_s * talk.number / len(talks)
            group.create_task(_keep_talking(talk, every_s, offset_s, stop))
        for _ in range(2):
            await _all_have_turned(talks)
        for replica in replicas:
            begin = time.monotonic()
            await replica.end()
            # Every conversation of the replica takes a turn elsewhere meanwhile: the worst case.
            await _all_have_turned(talks)
            await replica.start()
            away_s = time.monotonic() - begin
            await asyncio.sleep(QUIET_S)
            await _all_have_turned(talks)
            windows.append(Window(replica.number, begin, time.monotonic(), away_s))
        stop.set()
    return windows


def _outcome(
    balancer: Balancer,
    talks: Sequence[Talk],
    windows: Sequence[Window],
    sim: Simulator,
) -> Outcome:
    steps = []
    for window in windows:
        times = Counter(_paid_within(talks, window.begin, window.end))
        counts = Counter(min(count, 3) for count in times.values())
        steps.append(Step(window.replica, window.away_s, counts[1], counts[2], counts[3]))
    paid = [what for talk in talks for what in talk.paid]
    replies = [reply for talk in talks for reply in talk.replies]
    return Outcome(
        name=balancer.name,
        version=balancer.version,
        conversations=len(talks),
        turns=sum(talk.turns for talk in talks),
        deltas=sum(reply.mode == "delta" for reply in replies),
        failed=tuple(line for talk in talks for line in talk.failed),
        wrong_contexts=_wrong(replies, sim),
        steps=tuple(steps),
        unprovoked=sum(when < windows[0].begin for when, _ in paid),
        reasons=Counter(reason for _, reason in paid),
    )


def _paid_within(talks: Sequence[Talk], begin: float, end: float) -> Iterator[int]:
    for talk in talks:
        for when, _ in talk.paid:
            if begin <= when < end:
                yield talk.number


def _wrong(replies: Sequence[Reply], sim: Simulator) -> int:
    """Count the turns for which upstream held another context than the client had sent."""
    seen = {each.response_id: each.digest for each in sim.journal.turns}
    wrong = 0
    for reply in replies:
        body = json.loads(reply.body)
        assert reply.response is not None
        wrong += seen[reply.response["id"]] != Context.of(body, body["input"]).digest.hex()
    return wrong


# --- The report -----------------------------------------------------------------------------------


def told(outcomes: Sequence[Outcome], every_s: float) -> str:
    """Return the report in Markdown."""
    head = [
        "# A rolling restart behind real load balancers",
        "",
        f"{REPLICAS} replicas, {outcomes[0].conversations} conversations, each with a turn every "
        f"{every_s:g} s. Written by `python -m deploy.gateways.roll "
        f"{' '.join(outcome.name for outcome in outcomes)}` on {time.strftime('%Y-%m-%d')}, Python "
        f"{platform.python_version()}, {os.cpu_count()} cores.",
        "",
        "A conversation paid if one of its turns, its first not counted, was not a delta: it met "
        "another replica while its own was away, and its own, which had forgotten it, afterwards. "
        "A wrong context is a turn for which upstream held anything but what the client had sent.",
        "",
        "| Load balancer | Turns | Deltas | Failed turns | Wrong contexts |"
        " Conversations that paid, restart by restart | Limit |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows = [_row(outcome) for outcome in outcomes]
    return "\n".join([*head, *rows, "", *_details(outcomes)]) + "\n"


def _row(outcome: Outcome) -> str:
    shares = ", ".join(f"{step.paid / outcome.conversations:.1%}" for step in outcome.steps)
    cells = (
        f"{outcome.name} {outcome.version}",
        str(outcome.turns),
        f"{outcome.deltas / max(outcome.turns, 1):.1%}",
        str(len(outcome.failed)),
        str(outcome.wrong_contexts),
        shares,
        f"{ALLOWED_SHARE:.1%}",
    )
    return f"| {' | '.join(cells)} |"


def _details(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        yield f"## {outcome.name}"
        yield ""
        for step in outcome.steps:
            yield (
                f"* Replica {step.replica}, away for {step.away_s:.1f} s: {step.paid_once}"
                f" conversations paid one full send, {step.paid_twice} two, {step.paid_more} more."
            )
        yield f"* Before the first restart: {outcome.unprovoked} full sends but each first turn's."
        for reason, count in outcome.reasons.most_common():
            yield f"* {count} turns were `{reason}`."
        for line, count in Counter(outcome.failed).most_common(5):
            yield f"* {count} turns failed: {line}"
        yield ""


def main() -> int:
    """Run the load balancers that are named, and write the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("balancers", nargs="+", choices=balancers())
    parser.add_argument("--conversations", type=int, default=300)
    parser.add_argument("--every", type=float, default=8.0, metavar="S", help="a turn so often")
    parser.add_argument("--seed", default="turnwire", help="of the conversations' names")
    parser.add_argument("--report", type=Path, help="where to write the report, in Markdown")
    options = parser.parse_args()
    # A replica that ends while it opens a connection is no news here.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    chosen = [balancers()[name] for name in options.balancers]
    outcomes = [
        asyncio.run(run(each, options.conversations, options.every, options.seed))
        for each in chosen
    ]
    text = told(outcomes, options.every)
    print(text)  # noqa: T201  the output of the program
    if options.report:
        options.report.write_text(text)
    return 0 if all(outcome.ok for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
