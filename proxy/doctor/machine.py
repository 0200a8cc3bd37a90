"""This side of the connection: settings, ports, descriptors, proxies in the environment."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import urllib.request
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import aiohttp
from websockets.proxy import get_proxy
from websockets.uri import parse_uri

from proxy.doctor.findings import Check, Code, Finding, fail, fine, skipped, warn
from proxy.upstream.passthrough import environment_proxy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.config import Config, Loaded

# Besides the connections upstream and as many clients: listeners, logs, files that Python opens.
_DESCRIPTORS_BESIDES = 64
_ASK_TIMEOUT_S = 2.0


def configuration(loaded: Loaded) -> Finding:
    """Say that the configuration is good, and how much of it is not default."""
    own = [key for key, origin in loaded.origins.items() if origin != "default"]
    where = sorted({loaded.origins[key] for key in own})
    fact = (
        f"not at their defaults: {', '.join(own)} ({', '.join(where)})" if own else "all defaults"
    )
    return fine(Check.CONFIGURATION, fact)


async def ports(config: Config) -> Finding:
    """Look whether both listeners can be opened, or are a Turnwire's already."""
    wanted = (
        ("port", config.host, config.port),
        ("admin_port", config.admin_host, config.admin_port),
    )
    for key, host, port in wanted:
        problem = await _problem_of(host, port)
        if problem == errno.EADDRINUSE and await _is_turnwire(config):
            fact = f"a Turnwire is running already, at {config.host}:{config.port}"
            return fine(Check.PORTS, fact)
        if problem == errno.EADDRINUSE:
            fact = f"{host}:{port} is in use by another program"
            remedy = f"choose another with --{key.replace('_', '-')}, or end what listens there"
            return fail(Check.PORTS, Code.PORT_IN_USE, fact, remedy)
        if problem is not None:
            fact = f"can't listen on {host}:{port} ({errno.errorcode.get(problem, problem)})"
            remedy = "choose an address of this machine, and a port from 1024 up"
            return fail(Check.PORTS, Code.PORT_IN_USE, fact, remedy)
    return fine(Check.PORTS, f"{config.port} and {config.admin_port} are free")


async def _problem_of(host: str, port: int) -> int | None:
    """Return the errno with which listening fails, or None."""
    try:
        server = await asyncio.start_server(_hang_up, host, port)
    except socket.gaierror:
        return errno.EADDRNOTAVAIL
    except OSError as error:
        # asyncio gives several addresses' errors one text and no number.
        return error.errno or errno.EADDRINUSE
    server.close()
    await server.wait_closed()
    return None


def _hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


async def _is_turnwire(config: Config) -> bool:
    """Ask the admin listener whether it is one of ours."""
    url = f"http://{config.admin_host}:{config.admin_port}/livez?verbose"
    timeout = aiohttp.ClientTimeout(total=_ASK_TIMEOUT_S)
    with contextlib.suppress(aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as reply:
            return "[+] live: " in await reply.text()
    return False


def descriptors(config: Config) -> Finding:
    """Compare the limit of open files with what the configuration may come to need."""
    try:
        import resource  # noqa: PLC0415  there is none on Windows
    except ImportError:
        return skipped(Check.DESCRIPTORS, "this system has no such limit")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # `serve` raises the soft one to it
    needed = 2 * config.connections.max_total + _DESCRIPTORS_BESIDES
    if hard == resource.RLIM_INFINITY or hard >= needed:
        allowed = "any number of" if hard == resource.RLIM_INFINITY else hard
        return fine(Check.DESCRIPTORS, f"{allowed} files may be open, {needed} may be needed")
    served = max(0, (hard - _DESCRIPTORS_BESIDES) // 2)
    return warn(
        Check.DESCRIPTORS,
        Code.FEW_DESCRIPTORS,
        f"{hard} files may be open: enough for about {served} agents at one time",
        f"for more, `ulimit -Hn {needed}` in the shell, LimitNOFILE={needed} in a systemd unit",
    )


def proxies(config: Config) -> Iterator[Finding]:
    """Tell which proxies are on the way upstream, and whether agents would go through one to us."""
    named = urllib.request.getproxies()
    http, websocket = proxy_of_http(config), proxy_of_websocket(config)
    if named and not urllib.request.proxy_bypass("127.0.0.1"):
        yield warn(
            Check.PROXIES,
            Code.PROXY_IN_THE_WAY,
            "agents that heed the environment's proxy would call Turnwire through it",
            "export NO_PROXY=127.0.0.1,localhost in the shell of the agent",
        )
    elif not named:
        yield fine(Check.PROXIES, "none in the environment")
    if named:
        ways = f"HTTP {_by(http)}, WebSocket {_by(websocket)}"
        if http == websocket:
            ways = f"all requests {_by(http)}"
        yield fine(Check.PROXIES, f"to the upstream: {ways}")


def _by(proxy: str | None) -> str:
    return "go straight" if proxy is None else f"go through {proxy}"


def proxy_of_http(config: Config) -> str | None:
    """Return the proxy of plain HTTP requests upstream, without credentials."""
    proxy = environment_proxy(config.upstream)
    return None if proxy is None else _without_user(str(proxy))


def proxy_of_websocket(config: Config) -> str | None:
    """Return the proxy of WebSocket connections, without credentials."""
    proxy = get_proxy(parse_uri(config.websocket_url))
    return None if proxy is None else _without_user(proxy)


def _without_user(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
