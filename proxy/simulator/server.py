"""
The witness on a port: HTTP and WebSocket around the engine.

Both transports play the same `Script`; they differ in how a step is written down and in how a
connection ends. One WebSocket connection runs one turn at a time and queues what comes
meanwhile (protocol section 4, services without lanes).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from aiohttp import WSMsgType, web

from proxy.simulator import chat
from proxy.simulator.answers import AnswerOptions, answer
from proxy.simulator.engine import Engine, Turn, usage_of
from proxy.simulator.events import CompletedOutput
from proxy.simulator.faults import (
    Action,
    ErrorReply,
    Fault,
    Faults,
    Moment,
    Outcome,
    RefuseUpgrade,
    Script,
    Step,
    fault_from_json,
)
from proxy.simulator.journal import Journal, Seen, principal_of
from proxy.simulator.latency import PRESETS, LatencyModel
from proxy.simulator.playback import (
    Connection,
    SocketSink,
    SseSink,
    abort,
    end_http,
    is_terminal,
    play,
    settle,
    sleep_until,
)
from proxy.simulator.state import ConnectionMemory, Held, Storage
from proxy.simulator.validate import Transport, parse
from proxy.simulator.wire import ApiError, Json, Problem, Shape, dumps

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_MIB = 1024 * 1024
_MODELS = ("gpt-5.2", "gpt-5.6", "gpt-6")


@dataclass(frozen=True, slots=True)
class SimulatorOptions:
    """How the simulator behaves. `latency` is a model, or the name of one in `PRESETS`."""

    latency: LatencyModel | str = "instant"
    answers: AnswerOptions = field(default_factory=AnswerOptions)
    completed_output: CompletedOutput = CompletedOutput.FULL
    max_connection_age_s: float = 3600.0
    max_message_bytes: int = 16 * _MIB
    max_body_bytes: int = 256 * _MIB
    require_auth: bool = True
    ping_interval_s: float | None = None
    websocket: bool = True
    orphan_reasoning_is_refused: bool = False
    journal_max_bytes: int = 256 * _MIB

    @property
    def latency_model(self) -> LatencyModel:
        """The latency model itself."""
        return PRESETS[self.latency] if isinstance(self.latency, str) else self.latency


class Simulator:
    """
    A fake Responses API on a port of its own.

    Use it as an async context manager, or `await start()` and `await stop()`. `clock` gives the
    age of connections, so that a test can make them old without waiting.
    """

    def __init__(
        self,
        options: SimulatorOptions | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.options = options or SimulatorOptions()
        self.journal = Journal(self.options.journal_max_bytes)
        self.faults = Faults()
        self.engine = Engine(
            answers=self.options.answers,
            latency=self.options.latency_model,
            completed_output=self.options.completed_output,
            max_connection_age_s=self.options.max_connection_age_s,
            orphan_reasoning_is_refused=self.options.orphan_reasoning_is_refused,
            clock=clock,
        )
        self._clock = clock
        self._runner: web.AppRunner | None = None
        self._sockets: set[Connection] = set()
        self._port = 0
        self._host = ""

    @property
    def storage(self) -> Storage:
        """The stored responses."""
        return self.engine.storage

    @property
    def base_url(self) -> str:
        """What a client takes as its base URL, `/v1` included."""
        return f"http://{self._host}:{self._port}/v1"

    @property
    def port(self) -> int:
        """The port in use."""
        return self._port

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> Self:
        """Listen. Port 0 takes a free one. Raises OSError if the port is taken."""
        runner = web.AppRunner(
            self._app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await runner.setup()
        self._runner = runner
        site = web.TCPSite(runner, host, port, reuse_address=True)
        await site.start()
        self._host, self._port = runner.addresses[0][:2]
        return self

    async def stop(self) -> None:
        """Cut all connections and stop listening."""
        self.drop_connections()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def drop_connections(self) -> None:
        """Abort every WebSocket connection, without close frames."""
        for conn in list(self._sockets):
            abort(conn.request)

    async def close_connections(self, code: int = 1001) -> None:
        """Close every WebSocket connection with a close frame."""
        await asyncio.gather(*(conn.ws.close(code=code) for conn in list(self._sockets)))

    def _app(self) -> web.Application:
        app = web.Application(
            client_max_size=self.options.max_body_bytes, middlewares=[self._with_headers]
        )
        app.add_routes(
            [
                web.post("/v1/responses", self._post_response),
                web.get("/v1/responses", self._upgrade),
                web.post("/v1/responses/compact", self._post_compact),
                web.get("/v1/responses/{id}", self._get_response),
                web.delete("/v1/responses/{id}", self._delete_response),
                web.post("/v1/chat/completions", self._post_chat),
                web.post("/v1/embeddings", self._post_embeddings),
                web.post("/v1/files", self._post_file),
                web.get("/v1/models", self._get_models),
                web.get("/v1/models/{id}", self._get_model),
                web.get("/_sim/journal", self._get_journal),
                web.delete("/_sim/journal", self._delete_journal),
                web.get("/_sim/faults", self._get_faults),
                web.post("/_sim/faults", self._post_faults),
                web.delete("/_sim/faults", self._delete_faults),
            ]
        )
        return app

    # Every reply: realistic headers, errors in the API's shape.

    @web.middleware
    async def _with_headers(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if not request.path.startswith("/_sim/"):
                self._check_auth(request)
            reply = await handler(request)
        except ApiError as error:
            reply = _problem_reply(error.problem)
        except web.HTTPException as error:
            reply = _problem_reply(Problem(error.status, error.reason))
        if not reply.prepared:
            reply.headers.update({**_reply_headers(), **reply.headers})
        return reply

    def _check_auth(self, request: web.Request) -> None:
        given = request.headers.get("Authorization") or request.headers.get("api-key") or ""
        if not self.options.require_auth:
            return
        if not given or given.startswith(("bad", "Bearer bad")):
            message = "Incorrect API key provided." if given else "Missing bearer authentication."
            raise ApiError(401, message, code="invalid_api_key")

    def _saw(
        self,
        request: web.Request,
        raw: bytes = b"",
        size: int | None = None,
        transport: Transport = Transport.HTTP,
    ) -> Seen:
        return self.journal.add(
            Seen(
                transport,
                0,
                principal_of(request.headers),
                request.path,
                request.headers,
                len(raw) if size is None else size,
                raw,
                request.method,
            )
        )

    def _fault_for(self, seen: Seen) -> Fault | None:
        """The fault of this turn. Predicates may ask whether it continues a response."""
        if not self.faults.armed:
            return None
        with suppress(ApiError):
            previous = parse(seen.raw or b"").get("previous_response_id")
            seen.previous_response_id = None if previous is None else str(previous)
        return self.faults.take(seen)

    # Responses over HTTP.

    async def _post_response(self, request: web.Request) -> web.StreamResponse:
        started = asyncio.get_running_loop().time()
        seen = self._saw(request, await request.read())
        fault = self._fault_for(seen)
        if isinstance(fault, ErrorReply):
            streamed = bool(parse(seen.raw or b"").get("stream"))
            if fault.moment is Moment.REQUEST or not streamed:
                seen.status = fault.status
                return _problem_reply(fault.problem, fault.raw_body)
        turn = self.engine.begin(seen)
        script = _script(turn, fault)
        if turn.streamed:
            return await self._stream(request, turn, script, started)
        return await self._reply_json(request, turn, script, started)

    async def _stream(
        self, request: web.Request, turn: Turn, script: Script, started: float
    ) -> web.StreamResponse:
        reply = web.StreamResponse(headers=_reply_headers())
        reply.content_type = "text/event-stream"
        reply.charset = "utf-8"
        first = script.steps[0]
        if first.action is not Action.SEND:
            # Nothing of the reply may be seen before a break that comes first.
            await sleep_until(started + first.due_s)
            await end_http(request, first.action)
            return reply
        await sleep_until(started + first.due_s)
        await reply.prepare(request)
        await play(script, SseSink(request, reply, script.slice_bytes), turn, None, started)
        return reply

    async def _reply_json(
        self, request: web.Request, turn: Turn, script: Script, started: float
    ) -> web.StreamResponse:
        response = turn.response
        for step in script.steps:
            await sleep_until(started + step.due_s)
            if step.action is not Action.SEND:
                await end_http(request, step.action)
                return web.Response(status=500)
            settle(step.outcome, turn, None)
            response = step.body["response"] if is_terminal(step) else response
        return _json(response)

    async def _get_response(self, request: web.Request) -> web.StreamResponse:
        self._saw(request)
        return web.json_response(self._stored(request).response)

    async def _delete_response(self, request: web.Request) -> web.StreamResponse:
        self._saw(request)
        held = self._stored(request)
        self.storage.delete(held.response_id)
        return web.json_response({"id": held.response_id, "object": "response", "deleted": True})

    async def _post_compact(self, request: web.Request) -> web.StreamResponse:
        self._saw(request, await request.read())
        raise ApiError(404, "Compaction is not simulated.")

    def _stored(self, request: web.Request) -> Held:
        identity = request.match_info["id"]
        held = self.storage.find(identity, principal_of(request.headers))
        if held is None:
            raise ApiError(404, f"Response with id '{identity}' not found.")
        return held

    # Responses over WebSocket.

    async def _upgrade(self, request: web.Request) -> web.StreamResponse:
        is_upgrade = request.headers.get("Upgrade", "").lower() == "websocket"
        if not is_upgrade or not self.options.websocket:
            raise ApiError(405, "Method not allowed.")
        seen = self._saw(request, transport=Transport.WS)
        fault = self.faults.take(seen, upgrade=True)
        if isinstance(fault, RefuseUpgrade):
            self.journal.upgrades_refused += 1
            seen.status = fault.status
            return web.Response(status=fault.status, text=fault.body, headers=fault.headers)
        ws = web.WebSocketResponse(
            max_msg_size=self.options.max_message_bytes,
            compress=False,
            heartbeat=self.options.ping_interval_s,
            timeout=0.5,
        )
        await ws.prepare(request)
        seen.status = 101
        self.journal.connections_opened += 1
        number = self.journal.connections_opened
        await self._serve_socket(
            Connection(request, ws, ConnectionMemory(number, seen.principal, self._clock()))
        )
        return ws

    async def _serve_socket(self, conn: Connection) -> None:
        """Read until the connection ends, while a worker runs the turns one by one."""
        self._sockets.add(conn)
        self.journal.connections_open += 1
        frames: asyncio.Queue[bytes] = asyncio.Queue()
        try:
            async with asyncio.TaskGroup() as group:
                worker = group.create_task(self._run_turns(conn, frames))
                async for message in conn.ws:
                    if message.type is not WSMsgType.TEXT:
                        await conn.ws.close(code=1003)
                        break
                    frames.put_nowait(message.data.encode())
                worker.cancel()
        finally:
            self._sockets.discard(conn)
            self.journal.connections_open -= 1

    async def _run_turns(self, conn: Connection, frames: asyncio.Queue[bytes]) -> None:
        while True:
            raw = await frames.get()
            with suppress(ConnectionError):  # the client left; the reader ends the connection
                await self._run_turn(conn, raw)

    async def _run_turn(self, conn: Connection, raw: bytes) -> None:
        started = asyncio.get_running_loop().time()
        memory, request = conn.memory, conn.request
        headers = request.headers
        seen = self.journal.add(
            Seen(
                Transport.WS, memory.number, memory.principal, request.path, headers, len(raw), raw
            )
        )
        fault = self._fault_for(seen)
        sink = SocketSink(conn)
        try:
            if isinstance(fault, ErrorReply) and fault.moment is Moment.REQUEST:
                memory.evict(parse(raw).get("previous_response_id"))
                seen.status = fault.status
                await sink.send(Step(body=fault.problem.frame(fault.shape), text=fault.raw_body))
                return
            turn = self.engine.begin(seen, memory)
        except ApiError as error:
            await sink.send(Step(body=error.problem.frame(Shape.NESTED)))
            return
        await play(_script(turn, fault), sink, turn, memory, started)

    # The rest of the API.

    async def _post_chat(self, request: web.Request) -> web.StreamResponse:
        seen = self._saw(request, await request.read())
        fault = self.faults.take(seen)
        if isinstance(fault, ErrorReply):
            return _problem_reply(fault.problem, fault.raw_body)
        body = parse(seen.raw or b"")
        context = chat.context_of(body)
        found = answer(context, self.options.answers)
        usage = usage_of(context, found.tokens)
        identity = f"chatcmpl-{secrets.token_hex(12)}"
        seen.given, seen.digest = tuple(context.items), context.digest.hex()
        seen.response_id, seen.status, seen.finished = identity, 200, True
        if not body.get("stream"):
            return _json(chat.completion(body, found, usage, identity))
        reply = web.StreamResponse(headers=_reply_headers())
        reply.content_type, reply.charset = "text/event-stream", "utf-8"
        await reply.prepare(request)
        texts = [dumps(chunk) for chunk in chat.chunks(body, found, usage, identity)]
        await reply.write("".join(f"data: {text}\n\n" for text in (*texts, chat.DONE)).encode())
        return reply

    async def _post_embeddings(self, request: web.Request) -> web.StreamResponse:
        seen = self._saw(request, await request.read())
        body = parse(seen.raw or b"")
        given = body.get("input")
        inputs = given if isinstance(given, list) else [given]
        data = [
            {"object": "embedding", "index": index, "embedding": [float(len(str(each))), 0.5]}
            for index, each in enumerate(inputs)
        ]
        usage = {"prompt_tokens": len(inputs), "total_tokens": len(inputs)}
        return _json({"object": "list", "data": data, "model": body.get("model"), "usage": usage})

    async def _post_file(self, request: web.Request) -> web.StreamResponse:
        size = 0
        async for block in request.content.iter_any():
            size += len(block)
        self._saw(request, b"", size)
        return _json({"id": f"file-{secrets.token_hex(8)}", "object": "file", "bytes": size})

    async def _get_models(self, request: web.Request) -> web.StreamResponse:
        self._saw(request)
        return _json({"object": "list", "data": [_model(name) for name in _MODELS]})

    async def _get_model(self, request: web.Request) -> web.StreamResponse:
        self._saw(request)
        return _json(_model(request.match_info["id"]))

    # What tests and the demo ask over HTTP.

    async def _get_journal(self, _: web.Request) -> web.StreamResponse:
        records = [seen.summary() for seen in self.journal]
        return _json({"counters": self.journal.counters(), "records": records})

    async def _delete_journal(self, _: web.Request) -> web.StreamResponse:
        self.journal.clear()
        return web.Response(status=204)

    async def _get_faults(self, _: web.Request) -> web.StreamResponse:
        return _json({"armed": len(self.faults.armed), "fired": len(self.faults.fired)})

    async def _post_faults(self, request: web.Request) -> web.StreamResponse:
        try:
            faults = [fault_from_json(each) for each in await request.json()]
        except (ValueError, TypeError, AttributeError) as error:
            raise ApiError(400, str(error)) from error
        self.faults.arm(*faults)
        return _json({"armed": len(self.faults.armed)})

    async def _delete_faults(self, _: web.Request) -> web.StreamResponse:
        self.faults.clear()
        return web.Response(status=204)


async def serve(
    options: SimulatorOptions,
    host: str,
    port: int,
    *,
    on_ready: Callable[[Simulator], None] | None = None,
) -> None:
    """Run a simulator until cancelled. `on_ready` is called once it listens."""
    simulator = Simulator(options)
    await simulator.start(host, port)
    try:
        if on_ready is not None:
            on_ready(simulator)
        await asyncio.Event().wait()
    finally:
        await simulator.stop()


def _script(turn: Turn, fault: Fault | None) -> Script:
    last = len(turn.events) - 1
    steps = tuple(
        Step(
            due_s=timed.due_s,
            body=timed.event.body,
            outcome=Outcome.COMMIT if index == last else Outcome.NOTHING,
        )
        for index, timed in enumerate(turn.events)
    )
    script = Script(steps)
    return script if fault is None else fault.change(script)


def _problem_reply(problem: Problem, raw_body: str | None = None) -> web.Response:
    """An error over HTTP; `raw_body` stands for what a middlebox would send."""
    if raw_body is None:
        return _json(problem.http_body(), problem.status, problem.headers)
    headers = {"Content-Type": "text/html", **problem.headers}
    return web.Response(status=problem.status, text=raw_body, headers=headers)


def _json(value: Json, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    text = dumps(value)
    return web.Response(status=status, text=text, content_type="application/json", headers=headers)


def _model(name: str) -> dict[str, Json]:
    return {"id": name, "object": "model", "created": 1735689600, "owned_by": "openai"}


def _reply_headers() -> dict[str, str]:
    """The headers that the API adds to its replies (protocol section 5.2)."""
    return {
        "x-request-id": f"req_{secrets.token_hex(16)}",
        "openai-version": "2020-10-01",
        "openai-organization": "org-simulated",
        "openai-processing-ms": "12",
        "x-ratelimit-limit-requests": "5000",
        "x-ratelimit-remaining-requests": "4999",
        "x-ratelimit-reset-requests": "12ms",
    }
