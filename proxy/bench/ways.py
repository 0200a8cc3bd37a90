"""
The ways to the upstream that are compared, and how each is set up.

    straight   no proxy: what the load by itself costs
    turnwire   `python -m proxy serve` with the default configuration, its log (level info) in a
               file
    plain, naive   controls of ours, see `controls`
    nginx      where it is installed, one process
    ..., TLS   the same, speaking TLS to the upstream
"""

from __future__ import annotations

import contextlib
import enum
import shutil
import socket
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.bench.children import START_TIMEOUT_S, Role, python_command
from proxy.bench.controls import nginx_configuration
from proxy.bench.ports import port_to_serve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from proxy.bench.children import Child
    from proxy.bench.load import Bench, Upstream

_POLL_S = 0.002


class Way(enum.StrEnum):
    """A way to the upstream."""

    STRAIGHT = "straight"
    TURNWIRE = "turnwire"
    PLAIN = "plain"
    NAIVE = "naive"
    NGINX = "nginx"
    TURNWIRE_TLS = "turnwire, TLS"
    PLAIN_TLS = "plain, TLS"
    NGINX_TLS = "nginx, TLS"

    @property
    def is_secured(self) -> bool:
        """Whether it speaks TLS to the upstream."""
        return self in _UNSECURED

    @property
    def unsecured(self) -> Way:
        """The same proxy without TLS."""
        return _UNSECURED.get(self, self)


_UNSECURED = {
    Way.TURNWIRE_TLS: Way.TURNWIRE,
    Way.PLAIN_TLS: Way.PLAIN,
    Way.NGINX_TLS: Way.NGINX,
}


def available(*, tls: bool = False) -> tuple[Way, ...]:
    """Return the ways that can be measured here; `tls`: those with TLS, and what they add to."""
    has_nginx = shutil.which("nginx") is not None
    wanted = {Way.STRAIGHT, *_UNSECURED, *_UNSECURED.values()} if tls else {*Way} - {*_UNSECURED}
    return tuple(way for way in Way if way in wanted and (has_nginx or way.unsecured != Way.NGINX))


@dataclass(frozen=True, slots=True)
class Running:
    """A way that is set up: clients connect to `port`; `pid` is the proxy's, None without one."""

    port: int
    pid: int | None
    ready_after_s: float = 0.0


@contextlib.contextmanager
def running(way: Way, bench: Bench, upstream: Upstream) -> Iterator[Running]:
    """Set a way up, and take it down with the context. Raises BenchFailed."""
    if way is Way.STRAIGHT:
        yield Running(upstream.port, None)
        return
    origin = upstream.tls_origin if way.is_secured else upstream.origin
    with contextlib.ExitStack() as stack:
        match way.unsecured:
            case Way.TURNWIRE:
                yield start_turnwire(bench, origin, stack)
            case Way.NGINX:
                yield _start_nginx(bench, origin, stack)
            case control:
                yield start_control(control, bench, origin, stack)


def start_turnwire(bench: Bench, origin: str, stack: contextlib.ExitStack) -> Running:
    """Start `turnwire serve` and wait until it is ready."""
    port, admin_port = (stack.enter_context(port_to_serve()) for _ in range(2))
    flags = {
        "--upstream": f"{origin}/v1",
        "--port": str(port),
        "--admin-port": str(admin_port),
        "--log-level": "info",
        "--log-format": "json",
        "--shutdown-drain-timeout-s": "1",
    }
    command = python_command("proxy", "serve", *(text for pair in flags.items() for text in pair))
    began = time.monotonic()
    proxy = bench.start(command, Role.PROXY)
    stack.callback(proxy.end)
    _wait_until_ready(f"http://127.0.0.1:{admin_port}/readyz", proxy)
    return Running(port, proxy.pid, time.monotonic() - began)


def start_control(name: str, bench: Bench, origin: str, stack: contextlib.ExitStack) -> Running:
    """Start one of the proxies of `controls`."""
    began = time.monotonic()
    command = python_command("proxy.bench.controls", name, origin)
    proxy = bench.start(command, Role.PROXY)
    stack.callback(proxy.end)
    return Running(int(proxy.read_line(START_TIMEOUT_S)), proxy.pid, time.monotonic() - began)


def _start_nginx(bench: Bench, origin: str, stack: contextlib.ExitStack) -> Running:
    port = stack.enter_context(port_to_serve())
    file = bench.folder / "nginx.conf"
    authority = bench.certificates.authority if bench.certificates else None
    file.write_text(nginx_configuration(bench.folder, port, origin, authority))
    program = shutil.which("nginx")
    assert program is not None, "nginx is not installed"
    began = time.monotonic()
    log = str(bench.folder / "nginx-start.log")
    proxy = bench.start([program, "-e", log, "-c", str(file)], Role.PROXY)
    stack.callback(proxy.end)
    _wait_until_open(port, proxy)
    return Running(port, proxy.pid, time.monotonic() - began)


def _wait_until_ready(url: str, proxy: Child) -> None:
    def is_ready() -> bool:
        # The opener takes no proxy from the environment: this is loopback.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(url, timeout=1):
                return True
        except (urllib.error.URLError, OSError):
            return False

    _wait(is_ready, proxy)


def _wait_until_open(port: int, proxy: Child) -> None:
    def is_open() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            return False
        return True

    _wait(is_open, proxy)


def _wait(is_done: Callable[[], bool], proxy: Child) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not is_done():
        if proxy.has_ended or time.monotonic() > deadline:
            raise proxy.failure("did not start")
        time.sleep(_POLL_S)
