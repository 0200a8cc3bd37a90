"""
The HTTP server with the limits that aiohttp leaves out.

aiohttp waits for ever for a request's head: whoever opens a thousand sockets and sends a byte
now and then holds them all. Here, a head must be complete within `header_timeout_s` of the
connection's start or, on a connection kept alive, of its own first byte. Who has sent part of
one is answered 408 and let go; who has sent nothing is just let go.

What is no HTTP is refused in the API's error shape, and quotes nothing of what was sent: aiohttp
would show the line in question, which may be a credential with a space too many.

`build_runner` also sets what the rest of Turnwire relies on: bodies are not decoded (see
`bodies`), a handler is cancelled when its client leaves, and nobody lingers for a body that
nobody will read.
"""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, Final

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http_parser import HttpRequestParser, HttpRequestParserPy
from aiohttp.streams import EMPTY_PAYLOAD

from proxy.downstream.client import TOO_SLOW
from proxy.downstream.refusals import refusal
from proxy.errors import FramingUnsupported

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from aiohttp import StreamReader
    from aiohttp.http_parser import RawRequestMessage

    from proxy.downstream.client import ClientConnection

    LendMaker: TypeAlias = Callable[[ClientConnection], "LentProtocol"]
    OnEnd: TypeAlias = Callable[[ClientConnection], None]
    Connect: TypeAlias = Callable[[LendMaker, OnEnd], ClientConnection]

READS_STRICTLY: Final = HttpRequestParser is not HttpRequestParserPy
"""Whether aiohttp parses with llhttp. Its parser in Python takes what others read differently."""

_OTHER_VERSION: Final = web.RequestKey("other_version", bool)

# A new connection whose request is still on its way is waited for so long before the end.
_FIRST_WORDS_S: Final = 1.0
_BETWEEN_LOOKS_S: Final = 0.01
_AT_ONCE_S: Final = 0.001  # aiohttp takes a timeout of 0 for none at all


def build_runner(
    app: web.Application,
    *,
    header_timeout_s: float = 10.0,
    max_header_bytes: int = 32 * 1024,
    lingering_time_s: float = 1.0,
    shutdown_timeout_s: float = 1.0,
    connect: Connect | None = None,
) -> FrontRunner:
    """
    Make the runner for a client-facing application.

    `max_header_bytes` bounds the request line and each header field. `shutdown_timeout_s` is how
    long `cleanup` waits for handlers; draining before that is the caller's business. `connect`
    makes the protocol of each connection; without it aiohttp's reads all of them.
    """
    return FrontRunner(
        app,
        connect,
        header_timeout_s=header_timeout_s,
        access_log=None,
        auto_decompress=False,
        handler_cancellation=True,
        lingering_time=lingering_time_s,
        max_field_size=max_header_bytes,
        max_line_size=max_header_bytes,
        shutdown_timeout=max(shutdown_timeout_s, _AT_ONCE_S),
    )


class FrontRunner(web.AppRunner):
    """An AppRunner whose server makes our protocols instead of aiohttp's."""

    __slots__ = ("_connect", "_first_words_s", "_header_timeout_s")

    def __init__(
        self,
        app: web.Application,
        connect: Connect | None,
        *,
        header_timeout_s: float,
        **kwargs: Any,
    ) -> None:
        super().__init__(app, **kwargs)
        self._connect = connect
        self._header_timeout_s = header_timeout_s
        self._first_words_s = _FIRST_WORDS_S

    def hurry(self) -> None:
        """Let `cleanup` wait for nobody."""
        self._shutdown_timeout = _AT_ONCE_S
        self._first_words_s = 0.0

    async def cleanup(self) -> None:
        """
        Stop listening, let requests that are on their way arrive, wait for handlers, close.

        aiohttp would close a connection that has not said anything yet as an idle one.
        """
        for site in tuple(self.sites):
            await site.stop()
        await self._hear_out_newcomers()
        await super().cleanup()

    async def _hear_out_newcomers(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._first_words_s
        while loop.time() < deadline:
            # First, since a loop may have accepted what its protocol has not heard of yet.
            await asyncio.sleep(_BETWEEN_LOOKS_S)
            if not self._has_newcomer():
                return

    def _has_newcomer(self) -> bool:
        return isinstance(self.server, _Server) and self.server.has_newcomer()

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return _Server(server, self._header_timeout_s, self._connect)


class _Server(web.Server):
    """A copy of aiohttp's server for the application, but for the protocols it makes."""

    def __init__(
        self, server: web.Server, header_timeout_s: float, connect: Connect | None
    ) -> None:
        super().__init__(
            server.request_handler,
            request_factory=functools.partial(_make_request, server.request_factory),
            handler_cancellation=server.handler_cancellation,
            **server._kwargs,  # noqa: SLF001  the runner's settings, completed by the application
        )
        self._header_timeout_s = header_timeout_s
        self._connect = connect
        self._clients: set[ClientConnection] = set()

    def __call__(self) -> Any:
        """Make the protocol of a new connection."""
        if self._connect is None:
            return self._lend(None)
        client = self._connect(self._lend, self._clients.discard)
        self._clients.add(client)
        return client

    def _lend(self, client: ClientConnection | None) -> LentProtocol:
        return LentProtocol(self, client, self._header_timeout_s, loop=self._loop, **self._kwargs)

    def has_newcomer(self) -> bool:
        """Tell whether a connection is open that has not sent its first request yet."""
        return any(client.is_new for client in self._clients) or any(
            isinstance(each, LentProtocol) and each.client is None and each.is_new
            for each in self.connections
        )

    def pre_shutdown(self) -> None:
        """Take no more requests."""
        for client in list(self._clients):
            client.close_when_at_rest()
        super().pre_shutdown()

    async def shutdown(self, timeout: float | None = None) -> None:  # noqa: ASYNC109  aiohttp's
        """Wait for the turns under way, then for aiohttp's handlers; cut off what is left."""
        deadline = None if timeout is None else self._loop.time() + timeout
        if self._clients:
            await asyncio.gather(*(client.finish(timeout) for client in self._clients))
        if deadline is not None:
            timeout = max(deadline - self._loop.time(), _AT_ONCE_S)
        await super().shutdown(timeout)


class _BrokenBody(web.RequestPayloadError, TimeoutError):
    """
    A body's framing broke in a later read than its head's.

    aiohttp, which would see whether an unread body comes to its end, takes it for the end of its
    patience, and closes the connection quietly.
    """


def _make_request(factory: Any, message: RawRequestMessage, *rest: Any) -> web.BaseRequest:
    """
    Make a request, or what a reply can be sent to where it is none.

    It is the last one of its connection if bytes after it may be lost: aiohttp answers a request
    that asks to upgrade to what it does not know (`h2c`), but drops what the same read brought
    behind it. What comes next would be read from the middle of something.
    """
    speaks_http = message.version in (HttpVersion10, HttpVersion11)
    if not speaks_http:
        message = message._replace(version=HttpVersion11)
    if message.upgrade and message.headers.get("Upgrade", "").lower() != "websocket":
        message = message._replace(should_close=True)
    request: web.BaseRequest = factory(message, *rest)
    if not speaks_http:
        request[_OTHER_VERSION] = True
    return request


def check_framing(request: web.Request) -> None:
    """
    Raise FramingUnsupported where aiohttp takes what another parser might take differently.

    That is a version of HTTP besides 1.0 and 1.1, and a transfer coding besides `chunked`, or any
    under HTTP/1.0 (RFC 9112 section 6.1). aiohttp undoes `chunked` only and says nothing of what
    is below: upstream, which is not told, would take compressed bytes for the body.
    """
    if _OTHER_VERSION in request:
        raise FramingUnsupported("only HTTP/1.1 and HTTP/1.0 are spoken here")
    codings = request.headers.getall("Transfer-Encoding", None)
    if codings is None:
        return
    if request.version == HttpVersion10 or [each.lower() for each in codings] != ["chunked"]:
        raise FramingUnsupported("of transfer codings, only chunked under HTTP/1.1 is supported")


def _shows_its_rest() -> bool:
    # What `LentProtocol` knows of aiohttp beyond what is promised.
    known = {"_waiter", "_messages", "_close", "_keepalive_timeout", "_next_keepalive_close_time"}
    return known <= set(web.RequestHandler.__slots__) and hasattr(
        web.RequestHandler, "_process_keepalive"
    )


RESTS_VISIBLY: Final = _shows_its_rest()
"""Whether aiohttp's protocol can be shared with ours. If not, it reads all requests."""


class LentProtocol(web.RequestHandler):
    """aiohttp's protocol, with a timer that runs while a head is awaited."""

    __slots__ = ("_body", "_head_begun", "_head_timer", "_header_timeout_s", "client")

    def __init__(
        self,
        server: web.Server,
        client: ClientConnection | None,
        header_timeout_s: float,
        **kwargs: Any,
    ) -> None:
        super().__init__(server, **kwargs)
        self.client = client
        self._header_timeout_s = header_timeout_s
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_begun = False
        self._body: StreamReader = EMPTY_PAYLOAD  # that of the latest request

    @property
    def is_new(self) -> bool:
        """Whether the connection is open, and the head of its first request is still awaited."""
        return self.transport is not None and not self._request_count

    @property
    def is_at_rest(self) -> bool:
        """Whether all requests so far are answered, and the next one is waited for."""
        waiter = self._waiter
        return not (waiter is None or waiter.done() or self._messages or self._close)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a head."""
        super().connection_made(transport)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        """Take what the socket has read."""
        heads = self._request_count
        # aiohttp calls this with no data to go on after a pause.
        is_body = not (data and self._body.is_eof())
        self._head_begun = True
        super().data_received(data)
        if self._request_count > heads:
            self._stop_head_timer()
            if not self._body.is_eof():
                # What broke was a body. aiohttp queues its 400 behind the request, and tells the
                # request nothing, which would wait for the rest until its deadline. Said twice:
                # a reader that was just woken by a chunk's end does not look before it waits again.
                self._body.set_exception(_BrokenBody())
                self._loop.call_soon(self._body.set_exception, _BrokenBody())
            self._body = self._messages[-1][1]
        elif not (is_body or self._head_timer or self._request_in_progress or self._messages):
            self._start_head_timer()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Log as aiohttp does, and answer in the API's error shape."""
        super().handle_error(request, status, exc, message)
        if status >= 500:
            response = refusal(status, "Turnwire failed", type_="server_error", code=None)
        else:
            response = refusal(
                status,
                "the request is no valid HTTP/1.1",
                type_="invalid_request_error",
                code="malformed_request",
            )
        response.force_close()
        return response

    def connection_lost(self, exc: BaseException | None) -> None:
        """Let go of everything."""
        self._stop_head_timer()
        super().connection_lost(exc)

    def _start_head_timer(self) -> None:
        self._head_timer = self._loop.call_later(self._header_timeout_s, self._give_up)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self.transport is None or self._request_in_progress:
            return
        if self._head_begun:
            self.transport.write(TOO_SLOW)
        self.force_close()

    # While a turn is under way that aiohttp knows nothing of, it believes to be idle.

    def close(self) -> None:
        """Take no more requests; the transport is closed when none is under way."""
        if self.client is None or not self.client.is_busy:
            super().close()

    def _process_keepalive(self) -> None:
        if self.client is not None:
            due_at = self.client.active_at + self._keepalive_timeout
            self._next_keepalive_close_time = max(self._next_keepalive_close_time, due_at)
        super()._process_keepalive()
