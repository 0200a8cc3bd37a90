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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import HttpVersion11, hdrs, web

from proxy.core.chat_turn import CHAT
from proxy.core.plan import PassThrough, Planner, may_repeat
from proxy.core.principals import Identities
from proxy.core.reasons import Mode, Reason
from proxy.core.request import RESPONSES
from proxy.downstream.bodies import Body, BodyBudget, BodyLimits, Share, read_body
from proxy.downstream.carrier import Services, mode_headers
from proxy.downstream.client import FAILED, handed_over
from proxy.downstream.deadlines import check_framing
from proxy.downstream.driver import Driver
from proxy.downstream.express import Client, DeadlineWatch, Express
from proxy.downstream.hosts import check_host, is_allowed_host
from proxy.downstream.intake import Caller, Intake
from proxy.downstream.pace import Pace
from proxy.downstream.record import TurnRecord
from proxy.downstream.refusals import refusal, refuse
from proxy.errors import TurnwireError
from proxy.observe.tracing import context_of
from proxy.upstream.passthrough import TRACE_HEADERS, check_loop
from proxy.upstream.tunnel import tunnel

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from proxy.core.plan import Plan
    from proxy.core.principals import Principal
    from proxy.core.request import Endpoint
    from proxy.downstream.heads import PlainHead
    from proxy.downstream.shadow import Shadow
    from proxy.observe.facts import Watch
    from proxy.observe.metrics import Metrics
    from proxy.observe.tracing import Tracing, TurnSpan

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
    """
    Serves every request of the data listener.

    In shadow mode `shadow` has all turns; `tracing`, if it is on, makes a span of each.
    """

    def __init__(
        self,
        settings: FrontSettings,
        services: Services,
        planner: Planner,
        metrics: Metrics,
        log: Any,
        watch: Watch,
        shadow: Shadow | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.is_draining: Callable[[], bool] = lambda: False
        self._settings = settings
        self._watch = watch
        self._tracing = tracing
        self._shadow = shadow
        self._services = services
        self._planner = planner
        self._metrics = metrics
        self._log = log
        self._identities = Identities(settings.identity_headers, settings.secret)
        self._budget = BodyBudget(settings.max_inflight_body_bytes)
        self._endpoints = TURN_PATHS | (CHAT_PATHS if settings.translates_chat else {})
        self._loop = asyncio.get_running_loop()
        timing = services.timing
        shortest_s = min(timing.first_event_timeout_s, timing.silence_timeout_s, timing.keepalive_s)
        self._deadlines = DeadlineWatch(min(1.0, shortest_s / 4))
        self._pace = Pace()

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
        except ConnectionError:
            # The client has left, and the first to notice was what wrote to it. Mostly aiohttp
            # notices first, and cancels us; to it this is the same, and nothing went wrong.
            raise asyncio.CancelledError from None
        except Exception:
            if request.writer.output_size:
                raise  # aiohttp logs it, and breaks off what has begun
            self._log.exception("failed")
            return refuse(TurnwireError(FAILED))

    async def _route(self, request: web.Request) -> web.StreamResponse:
        settings = self._settings
        check_framing(request)
        if settings.check_hosts:
            check_host(request, settings.allowed_hosts, settings.allowed_origins)
        check_loop(request, self._services.passthrough.instance_id)
        endpoint = self._endpoints.get(request.path)
        is_upgrade = hdrs.UPGRADE in request.headers and request.method == "GET"
        if is_upgrade and endpoint is RESPONSES:
            return _upgrade_refused()
        # A query is not part of the endpoint as we know it, so HTTP decides about it.
        if endpoint is not None and request.method == "POST" and not request.query_string:
            return await self._turn(request, endpoint)
        await self._pace.let_in(0)
        if is_upgrade:
            return await tunnel(request, self._services.passthrough)
        response = await self._services.passthrough.relay(request)
        self._metrics.passthrough(response.status)
        return response

    async def _turn(self, request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
        intake = handed_over(request)
        if intake is None:
            intake = await self._read(request, endpoint)
        try:
            return await self._carry_out(request, intake)
        finally:
            self.close(intake)

    async def _read(self, request: web.Request, endpoint: Endpoint) -> Intake:
        caller = self._caller(request.headers.items(), endpoint)
        share = Share(self._budget)
        try:
            body = await read_body(request, self._settings.body_limits, share)
            read_at = self._loop.time()
            await self._pace.let_in(len(body.decoded))
        except BaseException:
            share.close()
            raise
        return self.take_in(caller, body, share, read_at)

    def _caller(self, fields: Iterable[tuple[str, str]], endpoint: Endpoint) -> Caller:
        if self._tracing is None:
            return Caller(self._identities.of(fields), endpoint)
        fields = tuple(fields)
        return Caller(self._identities.of(fields), endpoint, context_of(fields))

    def take_in(self, caller: Caller, body: Body, share: Share, read_at: float) -> Intake:
        """
        Plan the turn of a body that is here since `read_at`, a loop time.

        `close` must follow, whatever becomes of it.
        """
        principal, endpoint = caller.principal, caller.endpoint
        record = TurnRecord(
            self._metrics, self._log, self._watch, principal, len(body.decoded), read_at
        )
        try:
            plan = self._plan(principal, body, endpoint)
            record.planned(plan)
            if self._tracing is not None:
                record.span = self._begin_span(self._tracing, caller, plan)
        except BaseException:
            share.close()
            record.close(self._loop.time())
            raise
        return Intake(principal, body, share, record, plan)

    def close(self, intake: Intake) -> None:
        """Take note that a turn is over, however it went."""
        intake.share.close()
        intake.record.close(self._loop.time())
        # Each holds the other: without this a turn would be garbage that only a collector finds.
        intake.record.carrier = intake.begun = None

    async def _carry_out(self, request: web.Request, intake: Intake) -> web.StreamResponse:
        plan, record = intake.plan, intake.record
        if record.span is not None:
            request[TRACE_HEADERS] = record.span.headers
        if self._shadow is not None:
            record.passed_through(self._shadow.reason(plan))
            response = await self._shadow.relay(
                request, intake.body, intake.principal, plan, record.turn_id, record.would_be
            )
        elif isinstance(plan, PassThrough):
            record.passed_through(plan.reason)
            response = await self._services.passthrough.relay(
                request,
                body=intake.body.raw,
                replayable=may_repeat(plan),
                extra_headers=mode_headers(Mode.HTTP, plan.reason),
            )
        else:
            driver = Driver(self._services, request, intake)
            record.carrier = driver
            response = await driver.run()
        record.status = response.status
        return response

    @staticmethod
    def _begin_span(tracing: Tracing, caller: Caller, plan: Plan) -> TurnSpan:
        envelope = plan.request.envelope if plan.request else None
        return tracing.begin(
            caller.trace or {},
            model=envelope.model if envelope else None,
            stream=envelope is not None and envelope.stream,
            api="chat_completions" if caller.endpoint is CHAT else "responses",
        )

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

    # The express way.

    @property
    def budget(self) -> BodyBudget:
        """What all bodies share."""
        return self._budget

    @property
    def pace(self) -> Pace:
        """In whose line turns wait."""
        return self._pace

    def express_caller(self, head: PlainHead) -> Caller | None:
        """
        Return who sends a turn, and where to, if a request could be one that goes express.

        Whatever would refuse the request is left to `handle`, which says so.
        """
        settings = self._settings
        endpoint = self._endpoints.get(head.target)
        if head.method != "POST" or endpoint is None:
            return None
        if settings.check_hosts and not is_allowed_host(head.host, settings.allowed_hosts):
            return None
        return self._caller(head.fields, endpoint)

    def express(self, client: Client, intake: Intake) -> Express | None:
        """Return who can carry a turn out without waiting, if that is possible at all."""
        if isinstance(intake.plan, PassThrough):
            return None
        turn = Express(self._services, self._deadlines, client, intake)
        intake.record.carrier = turn
        return turn

    def log_failure(self) -> None:
        """Log the exception that is being handled: a turn failed by a fault of ours."""
        self._log.exception("failed")


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
