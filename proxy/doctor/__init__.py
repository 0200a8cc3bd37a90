"""
`turnwire doctor`: what stands between this machine and a delta, each line with its remedy.

Nothing here is guessed from settings alone: the upstream is asked, with the caller's own key if the
environment has one, over the same libraries and proxies as the proxy itself would. What it asks
costs no tokens: a list of models, a handshake, and requests that upstream has to refuse.

    findings   what a check may find, and how it is told (pure)
    machine    this side: settings, ports, proxies in the environment, descriptors
    upstream   the other side, step by step: `way` (name, loop, TLS), `http` (key, clock),
               `websocket` (the upgrade, what it can do)
    causes     what an exception of a connection means, in words and with a remedy
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING

from proxy.doctor import machine, upstream
from proxy.doctor.findings import Check, Code, Finding, Verdict, as_json, as_text, fail
from proxy.doctor.http import Key
from proxy.doctor.way import REMEDY_SELF_LOOP
from proxy.errors import ConfigError, SelfLoop
from proxy.observe import log

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from proxy.config import Loaded

OK, FAILED = 0, 1


def main(
    load: Callable[[], Loaded], *, key_variable: str, model: str | None, json_wanted: bool
) -> int:
    """
    Examine, print, and return the exit status: 1 if a check failed.

    `load` gives the configuration or raises ConfigError, which is a finding like any other.
    `key_variable` names the environment variable with the key; `model` is asked about.
    """
    log.configure("error", "auto")
    findings = asyncio.run(_all(load, key_variable, model, os.environ, live=not json_wanted))
    if json_wanted:
        sys.stdout.write(f"{json.dumps(as_json(findings), indent=2)}\n")
    failed = [finding for finding in findings if finding.verdict is Verdict.FAIL]
    if not json_wanted:
        sys.stdout.write(f"\n{_summary(findings)}\n")
    return FAILED if failed else OK


async def _all(
    load: Callable[[], Loaded],
    key_variable: str,
    model: str | None,
    environment: Mapping[str, str],
    *,
    live: bool,
) -> list[Finding]:
    findings = []
    async for finding in examine(load, key_variable, model, environment):
        findings.append(finding)
        if live:
            sys.stdout.write(f"{as_text(finding)}\n")
            sys.stdout.flush()
    return findings


async def examine(
    load: Callable[[], Loaded],
    key_variable: str,
    model: str | None,
    environment: Mapping[str, str],
) -> AsyncIterator[Finding]:
    """Give the findings one after the other, as they are made."""
    try:
        loaded = load()
    except SelfLoop as error:
        yield fail(Check.LOOP, Code.SELF_LOOP, str(error), REMEDY_SELF_LOOP)
        return
    except ConfigError as error:
        remedy = "`turnwire config --markdown` lists every setting and what it takes"
        yield fail(Check.CONFIGURATION, Code.BAD_CONFIGURATION, str(error), remedy)
        return
    yield machine.configuration(loaded)
    yield await machine.ports(loaded.config)
    yield machine.descriptors(loaded.config)
    for finding in machine.proxies(loaded.config):
        yield finding
    key = Key(key_variable, environment.get(key_variable, "").strip() or None)
    async for finding in upstream.examine(loaded.config, key, model):
        yield finding


def _summary(findings: list[Finding]) -> str:
    failed = [finding.check.value for finding in findings if finding.verdict is Verdict.FAIL]
    if failed:
        return f"Not in order: {', '.join(failed)}."
    warned = sum(finding.verdict is Verdict.WARN for finding in findings)
    return f"In order{f', with {warned} to look at' if warned else ''}."
