"""
The campaign: a thousand turns at a time, with faults of all kinds at once.

A round is a proxy with one configuration of `PROFILES`, a simulator, two fault proxies, and dozens
of conversations at a time. Its number is its seed. It ends when all conversations have ended; then
everybody leaves, and the proxy must hold what it held at first, and end on SIGTERM with 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import harness
from toxics import FaultProxy

from campaign.clients import ANSWERS, LEAN_ANSWERS, LostTurn, hold, make_conversation
from campaign.ledger import Ledger
from campaign.menu import Chaos
from campaign.process import started
from campaign.saboteur import Saboteur
from proxy.simulator import Simulator, SimulatorOptions

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from campaign.clients import Conversation
    from campaign.process import Proxy

AT_A_TIME = 32
SETTLE_DEADLINE_S = 20.0
KEYS = tuple(f"sk-secret-{number:02}" for number in range(12))
SECRETS = ("sk-secret-", "nonce-")

# Deadlines short enough to be met in a test, long enough not to be by accident on a busy machine.
BASE: dict[str, Any] = {
    "websocket": {
        "connect_timeout_s": 5,
        "first_event_timeout_s": 5,
        "silence_timeout_s": 5,
        "ping_interval_s": 1,
        "ping_timeout_s": 3,
        "probe_after_idle_s": 0.5,
        "probe_timeout_s": 1,
    },
    "cooldown": {"first_s": 0.05, "max_s": 0.2},
    "connections": harness.NO_HANDSHAKE_LIMIT,
    "shutdown": {"drain_timeout_s": 10},
    "resends": {"budget_ratio": 1},
}
PROFILES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "narrow": {
        "connections": {"max_per_principal": 3, "nursery_size": 2, "spare_per_principal": 0}
    },
    "rotating": {"websocket": {"max_age_s": 3, "retire_margin_s": 1}},
    "forgetful": {"chains": {"max_bytes": 65536, "ttl_s": 2}},
    "asyncio": {"tuning": {"uvloop": False}},
    "few handshakes": {"connections": {"handshakes_per_s": 2, "handshake_burst": 4}},
    "just breaks off": {"reply": {"lost_upstream": "break"}},
    "no resends": {"resends": {"budget_ratio": 0, "budget_per_s": 0}},
    "talkative log": {"log": {"level": "debug"}},
    "careful": {"matching": {"missing_reasoning": "resend"}},
}


def merged(*settings: Mapping[str, Any]) -> dict[str, Any]:
    """Lay settings over each other, section by section."""
    result: dict[str, Any] = {}
    for layer in settings:
        for section, values in layer.items():
            result[section] = {**result.get(section, {}), **values}
    return result


@dataclass(frozen=True)
class Shares:
    """
    How often something goes wrong: for each turn and each upgrade upstream, on the network for each
    turn (and how many of these are outages), for each attempt of a client, between two prompts.
    """

    turns: float = 0.2
    upgrades: float = 0.15
    network: float = 0.1
    outages: float = 0.01
    leaves: float = 0.08
    moves: float = 0.35


@dataclass
class Stage:
    """Everything of one round."""

    sim: Simulator
    near: FaultProxy
    far: FaultProxy
    proxy: Proxy
    ledger: Ledger
    chaos: Chaos
    rng: random.Random
    lean: bool

    def conversation(self, own: str, twin: str, leaves: float = 0.0) -> Conversation:
        """Begin a conversation."""
        url, keys = self.near.base_url, (own, twin)
        return make_conversation(url, self.ledger, self.rng, keys, leaves=leaves, lean=self.lean)

    @property
    def upstream_connections(self) -> int:
        """WebSocket connections that upstream has open."""
        return self.sim.journal.connections_open

    async def warm_up(self) -> dict[str, Any]:
        """Let the proxy do everything once, so that what it keeps is there; return what it has."""
        talk = self.conversation(*KEYS[:2])
        await talk.prompt(1)
        await talk.close()
        return await self.holdings()

    async def holdings(self) -> dict[str, Any]:
        """Return what the proxy holds; `own_fds` are those that are no connection through us."""
        holdings = await self.proxy.holdings()
        connections = len(self.near.links) + len(self.far.links)
        return {**holdings, "own_fds": holdings["fds"] - connections}

    @contextlib.asynccontextmanager
    async def trouble(self, shares: Shares) -> AsyncIterator[None]:
        """Let things go wrong for a while; afterwards all is well."""
        self.chaos.turns_share, self.chaos.upgrades_share = shares.turns, shares.upgrades
        saboteur = Saboteur(
            self.near,
            self.far,
            random.Random(f"network {self.rng.random()}"),
            self.ledger,
            shares.network,
            shares.outages,
        )
        sabotage = asyncio.get_running_loop().create_task(saboteur.run(), name="saboteur")
        try:
            yield
        finally:
            sabotage.cancel()
            await asyncio.wait([sabotage])
            saboteur.heal()
            self.chaos.turns_share = self.chaos.upgrades_share = 0.0
        if not sabotage.cancelled():
            sabotage.result()  # it never ends by itself

    async def leave_clean(self, before: dict[str, Any]) -> None:
        """Nothing may be held for clients that are gone; then the proxy must end, and well."""
        deadline = time.monotonic() + SETTLE_DEADLINE_S
        while not self._is_settled(before, now := await self.holdings()):
            if time.monotonic() > deadline:
                there = self.upstream_connections
                self.ledger.blame("stuck", f"before {before}, after {now}, upstream has {there}")
                break
            await asyncio.sleep(0.1)
        status, _ = await self.proxy.stop()
        if status != 0:
            self.ledger.blame("stuck", f"exit status {status}")
        await self.proxy.log_ended.wait()
        for line in self.proxy.alarms:
            self.ledger.blame("alarms", line)
        for line in self.proxy.leaks:
            self.ledger.blame("cross_credential", f"a secret in the log: {line}")

    def _is_settled(self, before: dict[str, Any], now: dict[str, Any]) -> bool:
        held = now["connections"]
        open_ones = held["idle"] + held["spare"]
        return (
            held["busy"] + held["connecting"] == 0
            and self.upstream_connections == open_ones
            and now["tasks"] <= before["tasks"]
            and not self.near.links
            and now["own_fds"] <= before["own_fds"]
        )


@contextlib.asynccontextmanager
async def stage(
    seed: object, settings: dict[str, Any], *, max_age_s: float = 3600.0, lean: bool = False
) -> AsyncIterator[Stage]:
    """Set everything up, and take it down."""
    rng = random.Random(f"campaign {seed}")
    ledger = Ledger()
    answers = LEAN_ANSWERS if lean else ANSWERS
    async with Simulator(SimulatorOptions(answers=answers, max_connection_age_s=max_age_s)) as sim:
        chaos = Chaos(rng=random.Random(f"chaos {seed}"), injected=ledger.injected)
        sim.faults = chaos
        async with (
            FaultProxy(("127.0.0.1", sim.port), random.Random(f"far {seed}")) as far,
            started(far.base_url, secrets=SECRETS, **settings) as proxy,
            FaultProxy(("127.0.0.1", proxy.port), random.Random(f"near {seed}")) as near,
        ):
            yield Stage(sim, near, far, proxy, ledger, chaos, rng, lean)


async def play_round(number: int, turns: int, shares: Shares = Shares()) -> dict[str, Any]:
    """Play a round of about so many turns; return what came of it."""
    profile = list(PROFILES)[number % len(PROFILES)]
    began = time.monotonic()
    settings = merged(BASE, PROFILES[profile])
    max_age_s = settings["websocket"].get("max_age_s", 3600.0)
    async with stage(number, settings, max_age_s=max_age_s, lean=number % 3 > 0) as s:
        before = await s.warm_up()
        async with s.trouble(shares):
            await _converse(s, turns, shares)
        finished = s.ledger.inspect(s.sim.journal)
        await s.leave_clean(before)
        return {
            "round": number,
            "profile": profile,
            "seconds": round(time.monotonic() - began, 1),
            "finished_upstream": finished,
            **s.ledger.as_json(),
        }


async def _converse(s: Stage, turns: int, shares: Shares) -> None:
    """Hold conversations, `AT_A_TIME` of them at a time, until there were so many turns."""

    async def one_after_another() -> None:
        while s.ledger.turns < turns:
            own, twin = s.rng.sample(KEYS, 2)
            talk = s.conversation(own, twin, shares.leaves)
            try:
                with contextlib.suppress(LostTurn):
                    await hold(talk, s.rng.randint(1, 7), shares.moves)
            finally:
                await talk.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_A_TIME):
            group.create_task(one_after_another())
