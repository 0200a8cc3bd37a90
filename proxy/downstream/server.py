"""
The front: one handler for every request.

`POST /v1/responses` becomes a turn: its body is read and decoded, the planner says how it can go
upstream, a driver carries that out. So does `POST /v1/chat/completions`, in another dialect, where
the settings say so. Everything else passes through untouched. A WebSocket upgrade
on the responses endpoint is answered 426, the one status on which Codex turns to HTTP at once;
other upgrades are tunnelled.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import HttpVersion11, hdrs, web

from proxy.core.chat_turn import CHAT
from proxy.core.plan import PassThrough, Planner
from proxy.core.principals import Identities
from proxy.core.reasons import Mode, Reason
from proxy.core.request import RESPONSES
from proxy.downstream.bodies import Body, BodyBudget, BodyLimits, Share, read_body
from proxy.downstream.deadlines import check_framing
from proxy.downstream.driver import Driver, Services, mode_headers
from proxy.downstream.hosts import check_host
from proxy.downstream.refusals import refusal, refuse
from proxy.errors import TurnwireError
from proxy.observe.facts import TurnFacts
from proxy.observe.log import log_turn
from proxy.upstream.passthrough import check_loop
from proxy.upstream.tunnel import tunnel

if TYPE_CHECKING:
    from collections.abc import Collection

    from proxy.core.plan import Plan
    from proxy.core.principals import Principal
    from proxy.core.request import Endpoint
    from proxy.downstream.shadow import Shadow
    from proxy.observe.facts import Watch, Would
    from proxy.observe.metrics import Metrics

# What is logged as the status of a turn whose client left before it had one (nginx's number).
CLIENT_CLOSED = 499

TURN_PATHS = {"/v1/responses": RESPONSES, "/responses": RESPONSES}
CHAT_PATHS = {"/v1/chat/completions": CHAT, "/chat/completions": CHAT}


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """
    What the front must know.

    `check_hosts` is set on a loopback listener, where Host and Origin must be local or listed.
    `max_inflight_body_bytes` bounds all bodies that are held at one time.
    """

    identity_headers: Collection[str]
    secret: bytes
    body_limits: BodyLimits
    max_inflight_body_bytes: int
    websocket_enabled: bool
    translates_chat: bool
    check_hosts: bool
    allowed_hosts: Collection[str]
    allowed_origins: Collection[str]


class Front:
    """Serves every request of the data listener; in shadow mode, `shadow` has all turns."""

    def __init__(
        self,
        settings: FrontSettings,
        services: Services,
        planner: Planner,
        metrics: Metrics,
        log: Any,
        watch: Watch,
        shadow: Shadow | None = None,
    ) -> None:
        self._settings = settings
        self._watch = watch
        self._shadow = shadow
        self._services = services
        self._planner = planner
        self._metrics = metrics
        self._log = log
        self._identities = Identities(settings.identity_headers, settings.secret)
        self._budget = BodyBudget(settings.max_inflight_body_bytes)
        self._endpoints = TURN_PATHS | (CHAT_PATHS if settings.translates_chat else {})

    def application(self) -> web.Application:
        """Return the aiohttp application with the one route."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.handle, expect_handler=_meet_expectation)
        return app

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        try:
            return await self._route(request)
        except TurnwireError as error:
            return refuse(error)
        except OSError:
            raise  # the client has left
        except Exception:
            if request.writer.output_size:
                raise  # aiohttp logs it, and breaks off what has begun
            self._log.exception("failed")
            return refuse(TurnwireError("Turnwire failed; its log says where"))

    async def _route(self, request: web.Request) -> web.StreamResponse:
        settings = self._settings
        check_framing(request)
        if settings.check_hosts:
            check_host(request, settings.allowed_hosts, settings.allowed_origins)
        check_loop(request, self._services.passthrough.instance_id)
        endpoint = self._endpoints.get(request.path)
        if hdrs.UPGRADE in request.headers and request.method == "GET":
            if endpoint is RESPONSES:
                return _upgrade_refused()
            return await tunnel(request, self._services.passthrough)
        # A query is not part of the endpoint as we know it, so HTTP decides about it.
        if endpoint is not None and request.method == "POST" and not request.query_string:
            return await self._turn(request, endpoint)
        response = await self._services.passthrough.relay(request)
        self._metrics.passthrough(response.status)
        return response

    async def _turn(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        principal = self._identities.of(request.headers.items())
        with Share(self._budget) as share:
            body = await read_body(request, self._settings.body_limits, share)
            record = _TurnRecord(
                self._metrics, self._log, self._watch, principal, len(body.decoded), loop.time()
            )
            self._metrics.turn_started()
            try:
                return await self._carry_out(request, body, record, endpoint)
            finally:
                record.close(loop.time())

    async def _carry_out(
        self, request: web.Request, body: Body, record: _TurnRecord, endpoint: Endpoint
    ) -> web.StreamResponse:
        principal = record.principal
        plan = self._plan(principal, body, endpoint)
        record.planned(plan)
        for gap in plan.gaps:
            for name in gap.fields:
                self._metrics.gap(name)
            self._log.info("normalisation_gap", turn=record.turn_id, fields=list(gap.fields))
        if self._shadow is not None:
            record.passed_through(self._shadow.reason(plan))
            response = await self._shadow.relay(
                request, body, principal, plan, record.turn_id, record.would_be
            )
            record.status = response.status
            return response
        if isinstance(plan, PassThrough):
            if plan.field is not None:
                self._metrics.untranslatable(plan.field)
                self._log.info("untranslatable", turn=record.turn_id, field=plan.field)
            record.passed_through(plan.reason)
            response = await self._services.passthrough.relay(
                request, body=body.raw, extra_headers=mode_headers(Mode.HTTP, plan.reason)
            )
            record.status = response.status
            return response
        driver = Driver(self._services, request, body, principal, plan, f"req_{record.turn_id}")
        record.driver = driver
        response = await driver.run()
        record.status = response.status
        return response

    def _plan(self, principal: Principal, body: Body, endpoint: Endpoint) -> Plan:
        if not self._settings.websocket_enabled:
            return PassThrough(Reason.WEBSOCKET_OFF)
        plan = self._planner.plan(principal.key, body.decoded, endpoint)
        if endpoint is CHAT and plan.request is not None:
            told = plan.request.envelope
            models = self._services.models
            why = models.objection(principal.key, told.model, told.message_members)
            if why is not None:
                return PassThrough(why, plan.request)
        return plan


class _TurnRecord:
    """What is told of one turn when it is over: one log line, the metrics, and whoever watches."""

    def __init__(
        self,
        metrics: Metrics,
        log: Any,
        watch: Watch,
        principal: Principal,
        bytes_in: int,
        read_at: float,
    ) -> None:
        self.turn_id = secrets.token_hex(16)
        self.principal = principal
        self.driver: Driver | None = None
        self.model: str | None = None
        self.status = CLIENT_CLOSED
        self._previous: str | None = None
        self._would: Would | None = None
        self._response: str | None = None
        self._watch = watch
        self._http_reason = Reason.UNPARSABLE
        self._metrics = metrics
        self._log = log
        self._bytes_in = bytes_in
        self._read_at = read_at

    def planned(self, plan: Plan) -> None:
        """Note what is known of the turn before it is sent."""
        self.model = plan.request.envelope.model if plan.request else None
        self._previous = plan.previous

    def would_be(self, would: Would, response_id: str | None) -> None:
        """Note what would have become of the turn, were it not for shadow mode."""
        self._would = would
        self._response = response_id

    def passed_through(self, reason: Reason) -> None:
        """Note that the turn was planned as plain HTTP."""
        self._http_reason = reason

    def close(self, now: float) -> None:
        """Tell it."""
        driver = self.driver
        mode = driver.turn.mode if driver else Mode.HTTP
        reason = driver.turn.reason if driver else self._http_reason
        bytes_up = driver.bytes_up if driver else self._bytes_in
        first_event_s = self._since_read(driver.first_event_at if driver else None)
        duration_s = now - self._read_at
        if mode is Mode.HTTP and (driver or reason is Reason.TOO_LARGE):
            self._metrics.fallback(reason)
        for resend in driver.turn.resends if driver else ():
            self._metrics.resend(resend)
        self._metrics.turn_finished(
            mode,
            reason,
            bytes_in=self._bytes_in,
            bytes_up=bytes_up,
            duration_s=duration_s,
            first_event_s=first_event_s,
            overhead_s=self._since_read(driver.sent_at if driver else None),
        )
        log_turn(
            self._log,
            turn=self.turn_id,
            principal=self.principal.label,
            mode=mode,
            reason=reason,
            bytes_in=self._bytes_in,
            bytes_up=bytes_up,
            first_event_ms=None if first_event_s is None else first_event_s * 1000,
            duration_ms=duration_s * 1000,
            status=self.status,
            model=self.model,
            resends=len(driver.turn.resends) if driver else 0,
            connection=driver.connection_id if driver else None,
        )
        self._watch(
            TurnFacts(
                turn_id=self.turn_id,
                principal=self.principal.key,
                label=self.principal.label,
                mode=mode,
                reason=reason,
                status=self.status,
                bytes_in=self._bytes_in,
                bytes_up=bytes_up,
                ended_at=now,
                duration_s=duration_s,
                first_event_s=first_event_s,
                overhead_s=self._since_read(driver.sent_at if driver else None),
                model=self.model,
                resends=tuple(driver.turn.resends) if driver else (),
                connection=driver.connection_id if driver else None,
                previous=self._previous,
                response=driver.response_id if driver else self._response,
                would=self._would,
            )
        )

    def _since_read(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self._read_at


async def _meet_expectation(request: web.Request) -> web.Response | None:
    """Ask for the body, if the client waits for that; any other expectation is refused."""
    if request.version < HttpVersion11:
        return None
    if request.headers[hdrs.EXPECT].lower() != "100-continue":
        return refusal(
            417, "only 100-continue can be expected", type_="invalid_request_error", code=None
        )
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # what aiohttp tells by whether the reply has begun
    return None


def _upgrade_refused() -> web.Response:
    return refusal(
        426,
        "This proxy takes requests over HTTP and speaks WebSocket upstream by itself.",
        type_="invalid_request_error",
        code="websocket_not_supported",
    )
