"""The way to the upstream: its name, whether that is our own, and TLS."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from proxy.doctor.causes import cause_of
from proxy.doctor.findings import Check, Code, Finding, fail, fine, skipped, warn
from proxy.doctor.machine import proxy_of_http

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from proxy.config import Config

REMEDY_SELF_LOOP = (
    "`upstream` must name the API itself, never Turnwire; OPENAI_BASE_URL is for agents, and not"
    " read here"
)


async def examine(config: Config) -> AsyncIterator[Finding]:
    """Look the name up, see whether it is our own, and shake hands."""
    parts = urlsplit(config.upstream)
    host, secure = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    if proxy_of_http(config) is not None:
        yield skipped(Check.DNS, "the proxy looks the name up")
        return
    try:
        addresses = await _addresses(host, port)
    except OSError as error:
        yield cause_of(error, None).finding(Check.DNS)
        return
    is_address = addresses == [host]
    yield fine(Check.DNS, "an address" if is_address else f"{host} is {', '.join(addresses[:3])}")
    yield _judge_loop(config, host, port, addresses)
    if secure:
        yield await _tls(host, port, config.websocket.connect_timeout_s)
    elif _is_here(addresses):
        yield skipped(Check.TLS, "plain HTTP on this machine")
    else:
        yield warn(
            Check.TLS,
            Code.CLEAR_TEXT,
            "keys and prompts cross the network in clear text",
            "use https:// in `upstream`, unless this network is yours alone",
        )


async def _addresses(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _judge_loop(config: Config, host: str, port: int, addresses: list[str]) -> Finding:
    """Tell whether the name leads to a listener of ours, whatever name it is."""
    listeners = ((config.host, config.port), (config.admin_host, config.admin_port))
    for own_host, own_port in listeners:
        if port == own_port and _is_here(addresses) and _covers(own_host, addresses):
            fact = f"{host}:{port} is where this very Turnwire listens"
            return fail(Check.LOOP, Code.SELF_LOOP, fact, REMEDY_SELF_LOOP)
    return fine(Check.LOOP, "the upstream is another program than this one")


def _covers(own_host: str, addresses: list[str]) -> bool:
    try:
        own = ipaddress.ip_address(own_host)
    except ValueError:  # a name: the loopback names are the ones in use
        return any(ipaddress.ip_address(address).is_loopback for address in addresses)
    return own.is_unspecified or str(own) in addresses


def _is_here(addresses: list[str]) -> bool:
    """Tell whether all addresses are this machine's: only those can be bound to."""
    return all(_can_bind(address) for address in addresses)


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        try:
            sock.bind((address, 0))
        except OSError:
            return False
    return True


async def _tls(host: str, port: int, timeout_s: float) -> Finding:
    context = ssl.create_default_context()
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
    except (OSError, TimeoutError) as error:
        return cause_of(error, None).finding(Check.TLS)
    secured = writer.get_extra_info("ssl_object")
    writer.close()
    return fine(Check.TLS, f"{secured.version()}, the certificate is valid")
