"""
The upstream over plain HTTP: does it answer as the API does, to whom, and by which clock.

The key is the caller's own; it goes to the upstream of the configuration and nowhere else, and is
never shown.
"""

from __future__ import annotations

import email.utils
import json
import re
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp

from proxy import __version__
from proxy.doctor.causes import Cause, cause_of
from proxy.doctor.findings import Check, Code, Finding, fail, fine, skipped, warn
from proxy.doctor.machine import proxy_of_http
from proxy.doctor.way import REMEDY_SELF_LOOP
from proxy.upstream.passthrough import environment_proxy

if TYPE_CHECKING:
    from proxy.config import Config

_DEFAULT_MODEL = "gpt-5"
_ANSWER_TIMEOUT_S = 15.0
_CLOCK_TOLERANCE_S = 60.0
_MAX_BODY_BYTES = 4 * 1024 * 1024

NAME = re.compile(r"[a-zA-Z0-9_.-]{1,60}")
"""What a code looks like that is fit to be shown; anything else could be content."""


@dataclass(frozen=True, slots=True)
class Key:
    """The key to ask with, and the environment variable it is from; None if that is not set."""

    variable: str
    value: str | None = field(repr=False)

    @property
    def headers(self) -> list[tuple[str, str]]:
        """The headers that carry it."""
        return [] if self.value is None else [("Authorization", f"Bearer {self.value}")]

    @property
    def may_be_sent(self) -> bool:
        """Whether a header can carry it."""
        return self.value is None or (self.value.isascii() and self.value.isprintable())


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP reply as far as it matters. `error_code` is a name that is fit to be shown."""

    status: int
    date: str | None
    error_code: str | None
    models: tuple[str, ...]
    is_json: bool


async def ask(config: Config, key: Key) -> Reply | Cause:
    """Ask for the list of models, which every such API has and nobody bills."""
    timeout = aiohttp.ClientTimeout(
        total=_ANSWER_TIMEOUT_S, connect=config.limits.http_connect_timeout_s
    )
    base = config.upstream if urlsplit(config.upstream).path else f"{config.upstream}/v1"
    try:
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=ssl.create_default_context()),
                timeout=timeout,
                proxy=environment_proxy(base),
            ) as session,
            session.get(
                f"{base}/models",
                headers=[*key.headers, ("User-Agent", f"turnwire/{__version__}")],
                allow_redirects=False,
            ) as reply,
        ):
            body = await reply.content.read(_MAX_BODY_BYTES)
            return read(reply.status, reply.headers.get("Date"), body)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return cause_of(error, proxy_of_http(config))


def read(status: int, date: str | None, body: bytes) -> Reply:
    """Read what matters of a reply, whatever its body is."""
    try:
        parsed: Any = json.loads(body)
    except (ValueError, RecursionError):
        return Reply(status, date, None, (), is_json=False)
    parsed = parsed if isinstance(parsed, dict) else {}
    error = parsed.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    listed = parsed.get("data")
    names = (
        [each.get("id") for each in listed or () if isinstance(each, dict)]
        if isinstance(listed, list)
        else []
    )
    return Reply(
        status,
        date,
        code if isinstance(code, str) and NAME.fullmatch(code) else None,
        tuple(name for name in names if isinstance(name, str)),
        is_json=True,
    )


def judge_http(reply: Reply, key: Key) -> Finding:
    """Say whether the API answers at all."""
    said = f"it answered {reply.status}{f' {reply.error_code}' if reply.error_code else ''}"
    if reply.error_code == "loop_detected":
        return fail(
            Check.HTTP,
            Code.SELF_LOOP,
            "a Turnwire answers there, whose own upstream is itself",
            REMEDY_SELF_LOOP,
        )
    if reply.status == 407:
        return fail(
            Check.HTTP,
            Code.PROXY_IN_THE_WAY,
            "the proxy wants credentials of its own (407)",
            "write them into the proxy's URL: http://user:password@host:port",
        )
    if reply.status == 429:
        return warn(Check.HTTP, Code.RATE_LIMITED, said, "wait, and ask again")
    if reply.status >= 500:
        return fail(
            Check.HTTP,
            Code.UPSTREAM_FAILING,
            said,
            "the upstream is in trouble, or a gateway before it; look at its status page",
        )
    if not reply.is_json or 300 <= reply.status < 400:
        return warn(
            Check.HTTP,
            Code.NOT_THE_API,
            f"{said}, and not in JSON: this may be another server than the API",
            "`upstream` is the API's base URL, mostly with /v1 at its end; a proxy or the login"
            " page of a network may also answer in its place",
        )
    expected = " as it should without a key" if reply.status == 401 and key.value is None else ""
    return fine(Check.HTTP, f"{said}{expected}")


def judge_key(reply: Reply, key: Key) -> Finding:
    """Say whether the key is taken."""
    if key.value is None:
        if reply.status == 200:
            return fine(Check.KEY, "the upstream asks for none")
        return warn(
            Check.KEY,
            Code.NO_KEY,
            f"{key.variable} is not set, so the key and what needs one can't be looked at",
            f"export {key.variable}, or name another variable with --key-from",
        )
    if reply.status in (401, 403):
        why = f" {reply.error_code}" if reply.error_code else ""
        return fail(
            Check.KEY,
            Code.WRONG_KEY,
            f"the upstream refuses the key in {key.variable} ({reply.status}{why})",
            "is it this upstream's, not revoked, and of the right project? Turnwire itself needs"
            " no key: it passes on what the agent sends",
        )
    if reply.status == 200:
        return fine(Check.KEY, f"the upstream accepts the key in {key.variable}")
    return warn(
        Check.KEY,
        Code.UNCLEAR,
        f"status {reply.status} does not tell whether the key in {key.variable} is good",
        "look at the WebSocket's line, which asks with the same key",
    )


def judge_odd_key(key: Key) -> Finding:
    """Say that a key holds what no header may."""
    fact = f"what is in {key.variable} can't be a key: a header can't carry it"
    return fail(Check.KEY, Code.WRONG_KEY, fact, "look for quotes, line ends and foreign letters")


def judge_clock(reply: Reply, now: float) -> Finding:
    """Compare this machine's clock, which reads `now` (a Unix time), with the reply's date."""
    if reply.date is None:
        return skipped(Check.CLOCK, "the reply has no date")
    try:
        theirs = email.utils.parsedate_to_datetime(reply.date).timestamp()
    except ValueError:
        return skipped(Check.CLOCK, "the reply's date can't be read")
    off_s = now - theirs
    if abs(off_s) <= _CLOCK_TOLERANCE_S:
        return fine(Check.CLOCK, f"within {_CLOCK_TOLERANCE_S:g} s of the upstream's")
    word = "ahead of" if off_s > 0 else "behind"
    return warn(
        Check.CLOCK,
        Code.CLOCK_OFF,
        f"{abs(off_s):.0f} s {word} the upstream's: certificates and tokens may seem out of date",
        "set it by NTP (timedatectl set-ntp true)",
    )


def model_of(reply: Reply) -> str:
    """Choose a model to ask about from those that are listed."""
    return next(
        (name for name in reply.models if name.startswith("gpt-")),
        reply.models[0] if reply.models else _DEFAULT_MODEL,
    )
