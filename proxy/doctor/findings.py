"""
What a check may find, and how it is told. Pure.

`Check`, `Verdict` and `Code` are closed sets: scripts may compare with them. A finding that is not
well says what to do about it; that is what `remedy` is for, and why there is no verdict without.
"""

from __future__ import annotations

import enum
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_WIDTH = 98
_COLUMN = 24


class Check(enum.StrEnum):
    """What is looked at, in the order of looking."""

    CONFIGURATION = "configuration"
    PORTS = "ports"
    DESCRIPTORS = "descriptors"
    PROXIES = "proxies"
    DNS = "dns"
    LOOP = "self-loop"
    TLS = "tls"
    HTTP = "http"
    KEY = "key"
    CLOCK = "clock"
    WEBSOCKET = "websocket"
    CHAINING = "chaining"
    LANES = "lanes"


class Verdict(enum.StrEnum):
    """How serious it is. Only FAIL makes the exit status 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"


class Code(enum.StrEnum):
    """What was found."""

    OK = "ok"
    NOT_LOOKED_AT = "not_looked_at"
    BAD_CONFIGURATION = "bad_configuration"
    PORT_IN_USE = "port_in_use"
    FEW_DESCRIPTORS = "few_descriptors"
    PROXY_IN_THE_WAY = "proxy_in_the_way"
    DNS_FAILED = "dns_failed"
    SELF_LOOP = "self_loop"
    TLS_FAILED = "tls_failed"
    CLEAR_TEXT = "clear_text"
    UNREACHABLE = "unreachable"
    UPSTREAM_FAILING = "upstream_failing"
    RATE_LIMITED = "rate_limited"
    NOT_THE_API = "not_the_api"
    NO_KEY = "no_key"
    WRONG_KEY = "wrong_key"
    CLOCK_OFF = "clock_off"
    WEBSOCKET_OFF = "websocket_off"
    NO_WEBSOCKET = "no_websocket"
    NO_CHAINING = "no_chaining"
    NO_LANES = "no_lanes"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check has found. `remedy` is a sentence on what to do; empty where all is well."""

    check: Check
    verdict: Verdict
    code: Code
    fact: str
    remedy: str = ""


def fine(check: Check, fact: str) -> Finding:
    """Make a finding of a check with which all is well."""
    return Finding(check, Verdict.OK, Code.OK, fact)


def warn(check: Check, code: Code, fact: str, remedy: str) -> Finding:
    """Make a finding of something to look at, which stops nothing."""
    return Finding(check, Verdict.WARN, code, fact, remedy)


def fail(check: Check, code: Code, fact: str, remedy: str) -> Finding:
    """Make a finding of something that does not work."""
    return Finding(check, Verdict.FAIL, code, fact, remedy)


def skipped(check: Check, why: str) -> Finding:
    """Make a finding of a check that was not made."""
    return Finding(check, Verdict.SKIPPED, Code.NOT_LOOKED_AT, why)


def as_text(finding: Finding) -> str:
    """Write a finding for people: one line, and its remedy below."""
    head = f"{finding.verdict.value:<8}{finding.check.value}"
    indent = " " * _COLUMN
    lines = textwrap.fill(
        finding.fact, _WIDTH, initial_indent=f"{head:<{_COLUMN}}", subsequent_indent=indent
    )
    if not finding.remedy:
        return lines
    remedy = textwrap.fill(
        finding.remedy, _WIDTH, initial_indent=f"{indent}-> ", subsequent_indent=f"{indent}   "
    )
    return f"{lines}\n{remedy}"


def as_json(findings: Sequence[Finding]) -> dict[str, object]:
    """Write findings for scripts."""
    return {
        "ok": all(finding.verdict is not Verdict.FAIL for finding in findings),
        "checks": [
            {
                "check": finding.check.value,
                "verdict": finding.verdict.value,
                "code": finding.code.value,
                "fact": finding.fact,
                "remedy": finding.remedy,
            }
            for finding in findings
        ],
    }
