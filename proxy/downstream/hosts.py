"""
The Host and Origin check of a listener on loopback.

A web page can resolve its own name to 127.0.0.1 and have a browser talk to this process with
whatever credentials the process would add or the page could guess (DNS rebinding), or simply
post to it across origins. Programs that are meant to use a loopback listener name it by a
loopback name, and only browsers send `Origin`. So: the Host must be a loopback name, any port,
or be listed; an Origin must be the very host and port asked, or be listed.

The same holds for the admin listener, which is guarded by `host_guard`: what it shows is nobody
else's business.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from aiohttp import web

from proxy.downstream.refusals import refuse
from proxy.errors import HostRefused

if TYPE_CHECKING:
    from collections.abc import Collection

    from aiohttp.typedefs import Handler, Middleware


def check_host(
    request: web.Request,
    allowed_hosts: Collection[str] = (),
    allowed_origins: Collection[str] = (),
) -> None:
    """
    Let a request through, or raise HostRefused.

    `allowed_hosts` are lower-case names without port (or with one, to allow only that port);
    `allowed_origins` are origins as browsers send them, such as `http://localhost:3000`.
    """
    host = request.headers.get("Host", "").lower()
    if not is_allowed_host(host, allowed_hosts):
        raise HostRefused("this Host is not served here (security.allowed_hosts)")
    origin = request.headers.get("Origin")
    if origin is None or origin in allowed_origins:
        return
    if urlsplit(origin.lower()).netloc != host or not host:
        raise HostRefused("this Origin is not served here (security.allowed_origins)")


def host_guard(allowed_hosts: Collection[str], allowed_origins: Collection[str]) -> Middleware:
    """Make a middleware that answers 403 where `check_host` says no."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            check_host(request, allowed_hosts, allowed_origins)
        except HostRefused as error:
            return refuse(error)
        return await handler(request)

    return guard


def is_allowed_host(host: str, allowed_hosts: Collection[str]) -> bool:
    """Tell whether a Host field names this machine, or one of `allowed_hosts`."""
    host = host.lower()
    name = _host_name(host)
    return is_loopback(name) or name in allowed_hosts or host in allowed_hosts


@lru_cache(maxsize=256)
def is_loopback(name: str) -> bool:
    """Tell whether a host name (lower case, no port, no brackets) can only mean this machine."""
    if name == "localhost" or name.endswith(".localhost"):  # RFC 6761 section 6.3
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _host_name(host: str) -> str:
    """Take the port, and the brackets of an IPv6 address, off a Host field."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
