"""
The composition root: builds every part, runs them, and takes them down again in order.

Two listeners: the data listener, where agents send their requests, and the admin listener
(metrics, health), which outlives it while the process drains. Secrets are drawn here, once per
process: the key of all fingerprints, the seed of the prefix index, and the name by which a request
that comes round in a loop is recognised.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import platform
import secrets
import signal
import ssl
import time
from typing import TYPE_CHECKING, Any, Self

from proxy import __version__
from proxy.core.budget import RetryBudget
from proxy.core.chains import ChainStore
from proxy.core.chat_models import TranslatedModels
from proxy.core.connection_state import LifePolicy
from proxy.core.history import MatchingPolicy
from proxy.core.items import Fingerprinter
from proxy.core.leases import LeaseLimits, Want
from proxy.core.plan import Planner
from proxy.core.shadow import ShadowPool
from proxy.downstream.bodies import BodyLimits
from proxy.downstream.carrier import Services, Timing
from proxy.downstream.client import ClientConnection, ClientSettings
from proxy.downstream.deadlines import READS_STRICTLY, RESTS_VISIBLY, FrontRunner, build_runner
from proxy.downstream.hosts import host_guard, is_loopback
from proxy.downstream.listener import LastCallSite
from proxy.downstream.server import Front, FrontSettings
from proxy.downstream.shadow import Shadow
from proxy.errors import ConfigError
from proxy.observe import log as logging
from proxy.observe.admin import Health, State, build_admin_app
from proxy.observe.live import Live
from proxy.observe.metrics import Metrics, watch_loop_lag
from proxy.observe.page import add_page
from proxy.observe.tracing import Tracing, open_tracing
from proxy.upstream.connection import ConnectionSettings
from proxy.upstream.passthrough import Passthrough
from proxy.upstream.pool import Pool, PoolSettings
from proxy.upstream.tasks import cancel_and_wait, spawn

try:
    import resource
except ImportError:  # Windows, which has no such limits
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from aiohttp import web

    from proxy.config import Config
    from proxy.core.history import Head
    from proxy.core.reasons import Reason
    from proxy.downstream.deadlines import Connect

SWITCHING_PROTOCOLS = 101
_MANY_DESCRIPTORS = 65_536

EXIT_OK = 0
EXIT_FAILED = 1

# Hardly anything here is garbage that only a collector finds, so it looks less often.
GC_THRESHOLDS = (20_000, 20, 20)

# Parameters of glibc's `mallopt` (malloc.h), and values that were measured to pay: by default a
# large body's memory is mapped anew each time, page fault by page fault, and unmapped after it.
MALLOPT = {
    -3: 32 << 20,  # M_MMAP_THRESHOLD, as large as glibc allows
    -1: 512 << 20,  # M_TRIM_THRESHOLD
    -2: 64 << 20,  # M_TOP_PAD
}


class Turnwire:
    """
    One running proxy. An async context manager: entered, it serves; left, it has drained.

    `base_url` and `admin_url` are where it listens; with a configured port of 0 they name the port
    that was taken. Entering raises ConfigError if a port can't be had.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.metrics = Metrics(__version__)
        self.health = Health()
        self.log: Any = logging.get_logger()
        self.base_url = ""
        self.admin_url = ""
        self.live: Live
        self._stack = contextlib.AsyncExitStack()
        self._front_runner: FrontRunner | None = None

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._not_ready()
        await self._stack.aclose()

    async def give_notice(self) -> None:
        """
        Say that the end is near, and go on serving for `shutdown.notice_s`.

        Whoever cancels this does not want to wait for the turns that run either.
        """
        self._not_ready()
        try:
            await asyncio.sleep(self.config.shutdown.notice_s)
        except asyncio.CancelledError:
            if self._front_runner is not None:
                self._front_runner.hurry()
            raise

    def _not_ready(self) -> None:
        self.health.state = State.DRAINING
        self.metrics.draining(True)

    async def _let_go(self, _request: web.Request, response: web.StreamResponse) -> None:
        """Tell a client, once the end is near, that its connection ends with this reply."""
        if self.health.state is State.DRAINING and response.status != SWITCHING_PROTOCOLS:
            response.headers["Connection"] = "close"
            response.force_close()

    async def _start(self) -> None:
        config = self.config
        self._check_parser()
        self.live = self._make_live()
        watching = [
            spawn(watch_loop_lag(self.metrics), name="watch-loop-lag"),
            spawn(self.live.keep_folding(), name="fold-turns"),
        ]
        self._stack.push_async_callback(cancel_and_wait, watching)
        admin = build_admin_app(self.metrics, self.health)
        if is_loopback(config.admin_host):
            security = config.security
            guard = host_guard(security.allowed_hosts, security.allowed_origins)
            admin.middlewares.insert(0, guard)
        add_page(admin, self.live)
        self.admin_url = await self._listen(
            build_runner(admin, header_timeout_s=config.limits.header_timeout_s),
            config.admin_host,
            config.admin_port,
            "admin_port",
        )
        front = await self._build_front()
        application = front.application()
        application.on_response_prepare.append(self._let_go)
        front.is_draining = lambda: self.health.state is State.DRAINING
        runner = self._front_runner = build_runner(
            application,
            header_timeout_s=config.limits.header_timeout_s,
            max_header_bytes=config.limits.max_header_bytes,
            shutdown_timeout_s=config.shutdown.drain_timeout_s,
            connect=_connect_to(front, config) if is_express(config) else None,
        )
        self.base_url = await self._listen(runner, config.host, config.port, "port") + "/v1"
        self.live.tell(base_url=self.base_url)
        self.health.state = State.READY

    def _check_parser(self) -> None:
        """Refuse to serve others without a strict HTTP parser; tell who serves itself."""
        if READS_STRICTLY:
            return
        if not is_loopback(self.config.host):
            raise ConfigError(
                "aiohttp has no llhttp here, and what it has instead is too lenient for `host`"
                f" {self.config.host}; install aiohttp from a wheel, or unset AIOHTTP_NO_EXTENSIONS"
            )
        self.log.warning("lenient_http_parser")

    async def _listen(self, runner: web.AppRunner, host: str, port: int, setting: str) -> str:
        """Open a listener that closes with us; return its URL without a path."""
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        try:
            await LastCallSite(runner, host, port).start()
        except OSError as error:
            raise ConfigError(
                f"can't listen on {host}:{port} ({error.strerror or error}); choose another"
                f" with `{setting}`"
            ) from error
        address = runner.addresses[0]
        name = f"[{address[0]}]" if ":" in address[0] else address[0]
        return f"http://{name}:{address[1]}"

    async def _build_front(self) -> Front:
        """Make what serves the data listener, and all that turns need."""
        config, secret = self.config, secrets.token_bytes(32)
        services = await self._build_services(secret)
        shadow = self._shadow(services)
        status = services.pool.status if shadow is None else shadow.status
        planner = Planner(
            store=services.store,
            fingerprints=services.fingerprints,
            policy=matching_policy(config),
            held=_held_by(status),
            max_message_bytes=services.max_message_bytes,
        )
        return Front(
            front_settings(config, secret),
            services,
            planner,
            self.metrics,
            self.log,
            self.live.turn_finished,
            shadow,
            self._open_tracing(),
        )

    async def _build_services(self, secret: bytes) -> Services:
        """Make what all turns share, and let those who watch look into it."""
        config, timer = self.config, asyncio.get_running_loop().time
        tls = ssl.create_default_context()  # costs 17 ms: one for both ways upstream
        pool = self._open_pool(tls)
        store = ChainStore(
            seed=secrets.randbits(64),
            max_bytes=config.chains.max_bytes,
            ttl_s=config.chains.ttl_s,
            timer=timer,
        )
        self.metrics.bind_gauges(pool.counts, lambda: (len(store), store.size_bytes))
        self.live.connections = pool.describe
        return Services(
            pool=pool,
            store=store,
            fingerprints=Fingerprinter(secret),
            passthrough=await self._open_passthrough(tls),
            timing=turn_timing(config),
            max_message_bytes=config.websocket.max_send_bytes,
            resend_budget=RetryBudget(config.resends.budget_ratio, config.resends.budget_per_s),
            models=TranslatedModels(
                config.chat.models, retry_after_s=config.chat.retry_refused_s, timer=timer
            ),
            tells_lost_upstream=config.reply.lost_upstream == "error",
        )

    def _open_pool(self, tls: ssl.SSLContext) -> Pool:
        """Make the way upstream by WebSocket; it closes with us."""
        pool = Pool(
            pool_settings(self.config),
            ssl_context=tls if self.config.websocket_url.startswith("wss:") else None,
            on_connect=self._connected,
            log=self.log,
        )
        self._stack.push_async_callback(pool.close, 1.0)
        return pool

    async def _open_passthrough(self, tls: ssl.SSLContext) -> Passthrough:
        """Make the way upstream by plain HTTP; it closes with us."""
        limits = self.config.limits
        return await self._stack.enter_async_context(
            Passthrough(
                self.config.upstream,
                instance_id=secrets.token_hex(8),
                connect_timeout_s=limits.http_connect_timeout_s,
                body_timeout_s=limits.body_timeout_s,
                ssl_context=tls,
            )
        )

    def _open_tracing(self) -> Tracing | None:
        if not self.config.tracing.enabled:
            return None
        tracing = open_tracing(self.config.upstream, __version__)
        self._stack.push_async_callback(asyncio.to_thread, tracing.close)
        return tracing

    def _make_live(self) -> Live:
        config = self.config
        about = {"version": __version__, "mode": config.mode, "upstream": config.upstream}
        live = Live(about, asyncio.get_running_loop().time, time.time)
        live.state = lambda: self.health.state.value
        live.in_flight = lambda: self.metrics.in_flight
        return live

    def _connected(self, result: str) -> None:
        self.metrics.connect(result)
        self.live.connect(result)

    def _shadow(self, services: Services) -> Shadow | None:
        """Make what shadow mode needs, if it is on."""
        if self.config.mode != "shadow":
            return None
        settings = pool_settings(self.config)
        return Shadow(
            services,
            ShadowPool(settings.limits, settings.life),
            self.metrics,
            self.log,
            clock=asyncio.get_running_loop().time,
            max_answer_bytes=self.config.websocket.max_event_bytes,
        )


def is_express(config: Config) -> bool:
    """Tell whether turns may take the express way, past aiohttp."""
    return (
        config.tuning.express
        and config.websocket.enabled
        and config.mode != "shadow"
        and RESTS_VISIBLY
    )


def _connect_to(front: Front, config: Config) -> Connect:
    settings = ClientSettings(
        header_timeout_s=config.limits.header_timeout_s,
        body_timeout_s=config.limits.body_timeout_s,
        max_field_bytes=config.limits.max_header_bytes,
        max_body_bytes=config.limits.max_body_bytes,
        max_decoded_body_bytes=config.limits.max_decoded_body_bytes,
    )
    return functools.partial(ClientConnection, front, settings)


def _held_by(status: Callable[[str, Want], Reason | None]) -> Callable[[Head], Reason | None]:
    def held(head: Head) -> Reason | None:
        return status(head.principal, Want(head.connection_id, head.response_id))

    return held


def pool_settings(config: Config) -> PoolSettings:
    """Return what the pool must know of a configuration."""
    websocket, connections = config.websocket, config.connections
    return PoolSettings(
        url=config.websocket_url,
        limits=LeaseLimits(
            max_per_principal=connections.max_per_principal,
            max_total=connections.max_total,
            nursery_size=connections.nursery_size,
            spare_per_principal=connections.spare_per_principal,
            handshakes_per_s=connections.handshakes_per_s,
            handshake_burst=connections.handshake_burst,
            yield_after_s=connections.yield_after_s,
        ),
        life=LifePolicy(
            ping_interval_s=websocket.ping_interval_s,
            ping_timeout_s=websocket.ping_timeout_s,
            probe_after_idle_s=websocket.probe_after_idle_s,
            max_age_s=websocket.max_age_s,
            retire_margin_s=websocket.retire_margin_s,
            retire_jitter=websocket.retire_jitter,
            nursery_ttl_s=connections.nursery_ttl_s,
            idle_ttl_s=connections.idle_ttl_s,
        ),
        connection=ConnectionSettings(
            connect_timeout_s=websocket.connect_timeout_s,
            close_timeout_s=websocket.close_timeout_s,
            max_event_bytes=websocket.max_event_bytes,
            user_agent=f"turnwire/{__version__}",
        ),
        probe_timeout_s=websocket.probe_timeout_s,
        cooldown_first_s=config.cooldown.first_s,
        cooldown_max_s=config.cooldown.max_s,
    )


def turn_timing(config: Config) -> Timing:
    """Return the deadlines of turns that a configuration sets."""
    return Timing(
        first_event_timeout_s=config.websocket.first_event_timeout_s,
        silence_timeout_s=config.websocket.silence_timeout_s,
        keepalive_s=config.reply.keepalive_s,
    )


def matching_policy(config: Config) -> MatchingPolicy:
    """Return the matching rules that a configuration chooses."""
    return MatchingPolicy(
        ignore_changed_tools=config.matching.changed_tools == "continue",
        ignore_missing_reasoning=config.matching.missing_reasoning == "continue",
        ignore_dropped_text=config.matching.dropped_text == "continue",
    )


def front_settings(config: Config, secret: bytes) -> FrontSettings:
    """Return what the front must know of a configuration."""
    limits = config.limits
    return FrontSettings(
        identity_headers=frozenset(config.security.identity_headers),
        secret=secret,
        body_limits=BodyLimits(
            max_body_bytes=limits.max_body_bytes,
            max_decoded_body_bytes=limits.max_decoded_body_bytes,
            body_timeout_s=limits.body_timeout_s,
        ),
        max_inflight_body_bytes=limits.max_inflight_body_bytes,
        websocket_enabled=config.websocket.enabled,
        # Shadow mode reads replies as they pass by, in the form of the Responses API only.
        translates_chat=config.chat_completions == "translate" and config.mode == "live",
        check_hosts=is_loopback(config.host),
        allowed_hosts=frozenset(config.security.allowed_hosts),
        allowed_origins=frozenset(config.security.allowed_origins),
    )


async def serve(config: Config) -> int:
    """Serve until SIGINT or SIGTERM, then drain. A second signal ends at once."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    serving = asyncio.current_task()
    assert serving is not None

    def on_signal() -> None:
        if stop.is_set():
            serving.cancel()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C raises instead
            loop.add_signal_handler(number, on_signal)
    try:
        async with Turnwire(config) as running:
            gc.set_threshold(*GC_THRESHOLDS)
            gc.enable()
            if config.tuning.gc_freeze:
                gc.collect()
                gc.freeze()
            running.log.info(
                "serving",
                version=__version__,
                base_url=running.base_url,
                admin_url=running.admin_url,
                upstream=config.upstream,
            )
            await stop.wait()
            running.log.info("draining", timeout_s=config.shutdown.drain_timeout_s)
            await running.give_notice()
    except asyncio.CancelledError:
        if not stop.is_set():
            raise
    return EXIT_OK


def run(config: Config) -> int:
    """Serve until told to stop; return the exit status. Raises ConfigError."""
    logging.configure(config.log.level, config.log.format)
    if config.tuning.malloc:
        keep_freed_memory()
    allow_descriptors()
    with asyncio.Runner(loop_factory=loop_factory(config)) as runner:
        return runner.run(serve(config))


def allow_descriptors() -> int:
    """
    Allow ourselves as many descriptors as the system lets us; return how many that is, or 0.

    The usual limit of 1024, or 256, is there for programs that use select(), which we do not. A
    thousand conversations take two thousand sockets, and what has no descriptor left drops clients.
    """
    if resource is None:
        return 0
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_DESCRIPTORS if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # macOS names a hard limit that it does not grant
        return soft
    return wanted


def keep_freed_memory() -> bool:
    """Make malloc keep what is freed for the next large body; False where it isn't glibc's."""
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    taken = [mallopt(parameter, value) for parameter, value in MALLOPT.items()]
    return all(taken)


def loop_factory(config: Config) -> Callable[[], asyncio.AbstractEventLoop]:
    """Return uvloop's event loop where it is wanted and installed, else asyncio's."""
    if config.tuning.uvloop:
        with contextlib.suppress(ImportError):
            import uvloop  # noqa: PLC0415  optional: it does not exist for every platform

            return uvloop.new_event_loop
    return asyncio.new_event_loop
