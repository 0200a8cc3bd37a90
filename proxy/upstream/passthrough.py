"""
The plain HTTP relay: the fallback of turns, and the way of everything that is not a turn.

It changes as little as HTTP lets a proxy change. Kept: method, path and query as spelled, header
order, duplicates and spelling, bodies in the encoding they came in, status, reason, redirects,
Content-Length. Changed: Host; hop-by-hop headers (RFC 9110 section 7.6.1) go, in both directions,
and so do those that tell upstream of the hop to us; `Via` is added to requests, by which a loop
onto this process is noticed. Bodies are streamed with back-pressure and never held.

How it ends is part of the reply. If upstream breaks off in the middle, so does what the client
gets: the connection is closed before the end that the framing announced, never after it. If the
client leaves, the request upstream is given up.

A request is sent again in one case only: a connection that had been kept alive turned out to be
closed, no byte of a reply had come, and the whole body is at hand. aiohttp does so by itself for
idempotent methods. For POST, RFC 9112 section 9.3.1 asks for a reason to believe that the
request was never processed; `_is_stale` says what we take as one.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import socket
import struct
import urllib.request
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol, Self
from urllib.parse import quote, urlsplit

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from proxy.errors import BodyCorrupt, BodyTimeout, LoopDetected, TurnwireError, UpstreamUnreachable

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Iterable, Mapping
    from types import SimpleNamespace, TracebackType

# RFC 9110 section 7.6.1, and what of the older RFC 2616 section 13.5.1 is still seen.
HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)

# What proxies before us say of the hop to us. To upstream we are the client: a network behind us is
# not its business, and some (Cloudflare) refuse requests in which another writes for them.
# Everything else, `cf-access-client-secret` for one, is for upstream and stays.
_OF_THE_LAST_HOP: Final = frozenset(
    {
        "cf-connecting-ip",
        "cf-connecting-ipv6",
        "cf-connecting-o2o",
        "cf-ew-via",
        "cf-ipcountry",
        "cf-pseudo-ipv4",
        "cf-ray",
        "cf-visitor",
        "cf-warp-tag-id",
        "cf-worker",
        "forwarded",
        "true-client-ip",
        "x-client-ip",
        "x-real-ip",
    }
)
_FORWARDED: Final = "x-forwarded-"

# aiohttp would add these where the client did not send them.
_NO_AUTO_HEADERS: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")

# Replies with large cookies and policies are normal; aiohttp's own limit is 8 KiB a field.
_MAX_REPLY_FIELD_BYTES: Final = 64 * 1024
_MAX_REPLY_FIELDS: Final = 512

# An idle close that crosses a request shows within a round trip; this is a generous one.
_STALE_WITHIN_S: Final = 1.0

# A larger body is written piece by piece: in one piece it would all be copied to the transport at
# once, and aiohttp warns of that (a ResourceWarning).
_ONE_WRITE_BYTES: Final = 512 * 1024

# An upstream that vanished without a word is noticed within about a minute, replies or not.
_KEEPALIVE_IDLE_S: Final = 30
_KEEPALIVE_INTERVAL_S: Final = 10
_KEEPALIVE_PROBES: Final = 3
_UNACKNOWLEDGED_MS: Final = 120_000

# How long a connection that is being closed may take to send what it still has.
_FLUSH_WITHIN_S: Final = 2.0

# What may stand in a request target unescaped: all of visible ASCII but the fragment's sign.
_TARGET_CHARS: Final = "".join(map(chr, range(0x21, 0x7F))).replace("#", "")

_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class Tap(Protocol):
    """
    Who listens to a reply that is relayed. It changes nothing, waits for nothing, never raises.

    Each chunk is told after it has been written to the client.
    """

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Take note of the head of the reply, as upstream gave it."""

    def take(self, chunk: bytes) -> None:
        """Take the next bytes of the body, encoded as they are."""

    def end(self) -> None:
        """Take note that the body has ended, where it was to end."""


_TRACE_CONTEXT: Final = ("traceparent", "tracestate")  # W3C Trace Context, section 3
TRACE_HEADERS: Final = web.RequestKey("trace_headers", dict[str, str])
"""Under this key a request carries the trace context that goes upstream in place of its own."""


def via(instance_id: str) -> str:
    """Give the Via entry (RFC 9110 section 7.6.3) by which this process marks its requests."""
    return f"1.1 turnwire-{instance_id}"


def check_loop(request: web.Request, instance_id: str) -> None:
    """Raise LoopDetected if a request was sent by this very process."""
    mark = via(instance_id)
    for value in request.headers.getall("Via", ()):
        if any(entry.strip() == mark for entry in value.split(",")):
            raise LoopDetected("this process is its own upstream (check `upstream`)")


def join_url(upstream: str, raw_path_qs: str) -> URL:
    """
    Join the upstream's base URL and a request target; escapes stay as they are spelled.

    An upstream with a path is a base URL as SDKs take it, so a client's leading `/v1` stands for
    that path. A client path that begins with the upstream's own path is complete already. An
    upstream without a path is an origin: the client's path is kept whole.
    """
    base = urlsplit(upstream)
    base_path = base.path.rstrip("/")
    path, question, query = _origin_form(raw_path_qs).partition("?")
    if base_path and not _is_under(path, base_path):
        path = base_path + (path[len("/v1") :] if _is_under(path, "/v1") else path)
    target = f"{path}{question}{query}".encode(errors="surrogateescape")
    return URL(f"{base.scheme}://{base.netloc}{quote(target, safe=_TARGET_CHARS)}", encoded=True)


def _origin_form(target: str) -> str:
    """Give path and query of a request target in any form (RFC 9112 section 3.2)."""
    if target.startswith("/"):
        return target
    _, separator, rest = target.partition("://")
    if not separator:  # the asterisk form, or an authority
        return "/"
    slash = rest.find("/")
    return rest[slash:] if slash >= 0 else "/"


def _is_under(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(prefix + "/")


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> CIMultiDict[str]:
    """Keep the headers that are not for one hop only; order, duplicates and spelling stay."""
    pairs = [(_text(name), _text(value)) for name, value in headers]
    dropped = HOP_BY_HOP | {
        token.strip().lower()
        for name, value in pairs
        if name.lower() == "connection"
        for token in value.split(",")
    }
    return CIMultiDict((name, value) for name, value in pairs if name.lower() not in dropped)


def _spelled_alike(headers: CIMultiDict[str]) -> CIMultiDict[str]:
    """
    Spell repeated names as their first occurrence.

    aiohttp's client keeps repetitions only of names in the same spelling.
    """
    first: dict[str, str] = {}
    return CIMultiDict(
        (first.setdefault(name.lower(), name), value) for name, value in headers.items()
    )


def _text(raw: bytes) -> str:
    """Decode a header. aiohttp writes UTF-8 and leaves lone surrogates out, hence Latin-1."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("latin-1")


@dataclass(slots=True)
class _Attempt:
    """What became known of one try, from aiohttp's tracing."""

    started_at: float
    reused: bool = False


class _Upload:
    """A client's body on its way up, chunk by chunk; keeps the reason if it stops."""

    def __init__(self, content: aiohttp.StreamReader, body_timeout_s: float) -> None:
        self._content = content
        self._body_timeout_s = body_timeout_s
        self.error: TurnwireError | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Give the chunks as they arrive."""
        try:
            while True:
                async with asyncio.timeout(self._body_timeout_s):
                    chunk = await self._content.readany()
                if not chunk:
                    return
                yield chunk
        except web.RequestPayloadError:
            self.error = BodyCorrupt("the body breaks its own Transfer-Encoding")
            raise self.error from None
        except TimeoutError:
            self.error = BodyTimeout(f"no byte of the body arrived for {self._body_timeout_s:g} s")
            raise self.error from None


class _RelayedResponse(web.StreamResponse):
    """A reply that carries upstream's headers, and none that aiohttp would put in."""

    async def _prepare_headers(self) -> None:
        absent = [name for name in ("Content-Type", "Server") if name not in self.headers]
        await super()._prepare_headers()
        for name in absent:
            self.headers.popall(name, None)


class Passthrough:
    """
    Relays requests to one upstream. Use it as an async context manager.

    `upstream` is the base URL from the configuration; `instance_id` is unique to this process.
    Proxies are taken from the environment once, at the start. (aiohttp's own `trust_env` would
    also look for credentials in ~/.netrc, on every request, and refuse those of the client.)
    """

    def __init__(
        self,
        upstream: str,
        *,
        instance_id: str,
        connect_timeout_s: float = 10.0,
        body_timeout_s: float = 60.0,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self.upstream = upstream
        self.instance_id = instance_id
        self._connect_timeout_s = connect_timeout_s
        self._body_timeout_s = body_timeout_s
        self._ssl_context = ssl_context
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_note_reuse)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                ssl=self._ssl_context or True,
                socket_factory=_make_socket,
            ),
            timeout=aiohttp.ClientTimeout(
                total=None,
                connect=self._connect_timeout_s,
                sock_connect=self._connect_timeout_s,
                sock_read=None,  # an answer may think for many minutes
            ),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            max_field_size=_MAX_REPLY_FIELD_BYTES,
            max_headers=_MAX_REPLY_FIELDS,
            max_line_size=_MAX_REPLY_FIELD_BYTES,
            proxy=environment_proxy(self.upstream),
            skip_auto_headers=_NO_AUTO_HEADERS,
            trace_configs=[tracing],
        )
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection; what is still being relayed breaks off."""
        if self._session is not None:
            with contextlib.suppress(TimeoutError):  # a peer that does not read can't be flushed
                async with asyncio.timeout(_FLUSH_WITHIN_S):
                    await self._session.close()

    async def relay(
        self,
        request: web.Request,
        *,
        body: bytes | None = None,
        replayable: bool = True,
        extra_headers: Mapping[str, str] = _NOTHING,
        tap: Tap | None = None,
    ) -> web.StreamResponse:
        """
        Relay a request, and write the whole reply.

        `body` is the request's body as received, if it has been read already; else it is
        streamed. `replayable` is False where sending it twice might do something twice.
        `extra_headers` are added to the reply; `tap` listens to it.

        Raises UpstreamUnreachable, BodyTimeout, BodyCorrupt or LoopDetected as long as nothing
        was written to the client. Later trouble ends the reply short and is not raised.
        """
        upstream = await self.exchange(request, body=body, replayable=replayable)
        try:
            return await relay_reply(request, upstream, extra_headers, tap)
        finally:
            let_go(upstream)

    async def exchange(
        self,
        request: web.Request,
        *,
        body: bytes | None = None,
        replayable: bool = True,
        handshake: Mapping[str, str] = _NOTHING,
    ) -> aiohttp.ClientResponse:
        """
        Send a request upstream; gives the reply, of which only the head has been read.

        The caller calls `let_go` on it. `handshake` are the hop-by-hop headers of an upgrade.
        Raises as `relay` does.
        """
        check_loop(request, self.instance_id)
        headers = self._request_headers(request, body)
        headers.update(handshake)
        if (trace := request.get(TRACE_HEADERS)) is not None:
            for name in _TRACE_CONTEXT:
                headers.popall(name, None)
            headers.update(trace)
        url = join_url(self.upstream, request.raw_path)
        data: bytes | _Upload | None = None
        if request.body_exists:
            data = _Upload(request.content, self._body_timeout_s) if body is None else body
        attempt = _Attempt(asyncio.get_running_loop().time())
        try:
            return await self._send(request.method, url, headers, data, attempt)
        except aiohttp.ClientError as error:
            may_repeat = replayable and isinstance(data, bytes) and request.method == "POST"
            if not (may_repeat and _is_stale(error, attempt)):
                raise _explain(error, data) from error
        try:
            return await self._send(request.method, url, headers, data, attempt)
        except aiohttp.ClientError as error:
            raise _explain(error, data) from error

    async def _send(
        self,
        method: str,
        url: URL,
        headers: CIMultiDict[str],
        data: bytes | _Upload | None,
        attempt: _Attempt,
    ) -> aiohttp.ClientResponse:
        assert self._session is not None, "use Passthrough as a context manager"
        sent: bytes | io.BytesIO | _Upload | None = data
        if isinstance(data, bytes) and len(data) > _ONE_WRITE_BYTES:
            sent = io.BytesIO(data)
        return await self._session.request(
            method,
            url,
            headers=headers,
            data=sent,
            allow_redirects=False,
            trace_request_ctx=attempt,
        )

    def _request_headers(self, request: web.Request, body: bytes | None) -> CIMultiDict[str]:
        """Make the headers for upstream: the client's own, Host left to aiohttp, Via added."""
        headers = end_to_end(request.raw_headers)
        for name in {name.lower() for name in headers}:
            if name in _OF_THE_LAST_HOP or name.startswith(_FORWARDED):
                headers.popall(name)
        headers.popall("Host", None)
        if headers.get("Expect", "").lower() == "100-continue":
            del headers["Expect"]  # our own server has answered it
        if body is not None:
            headers.popall("Content-Length", None)
        headers.add("Via", via(self.instance_id))
        return _spelled_alike(headers)


async def relay_reply(
    request: web.Request,
    upstream: aiohttp.ClientResponse,
    extra_headers: Mapping[str, str] = _NOTHING,
    tap: Tap | None = None,
) -> web.StreamResponse:
    """
    Write upstream's reply to the client as it arrives, until its end; `tap` listens.

    The reply breaks off where upstream's does. Does not close `upstream`.
    """
    headers = end_to_end(upstream.raw_headers)
    headers.update(extra_headers)
    response = _RelayedResponse(status=upstream.status, reason=upstream.reason, headers=headers)
    with contextlib.suppress(ConnectionError):  # the client has left: nobody to tell
        await response.prepare(request)
        if tap is not None:
            tap.begin(upstream.status, upstream.headers)
        while chunk := await _next_chunk(upstream):
            await response.write(chunk)
            if tap is not None:
                tap.take(chunk)
        if chunk is None:
            _break_off(request, response)
        else:
            await response.write_eof()
            if tap is not None:
                tap.end()
    return response


def let_go(upstream: aiohttp.ClientResponse) -> None:
    """
    Give a reply's connection back, or close it if the reply was not read to its end.

    What is still to be sent may go out, but not for longer than `_FLUSH_WITHIN_S`: an upstream
    that has stopped reading would hold the connection for ever.
    """
    connection = upstream.connection
    transport = None if connection is None else connection.transport
    upstream.close()
    if transport is not None and transport.get_write_buffer_size():
        asyncio.get_running_loop().call_later(_FLUSH_WITHIN_S, transport.abort)


async def _next_chunk(upstream: aiohttp.ClientResponse) -> bytes | None:
    """Give the next bytes of a body, b"" at its end, None where it broke off."""
    try:
        return await upstream.content.readany()
    except (aiohttp.ClientError, OSError):
        return None


def _break_off(request: web.Request, response: web.StreamResponse) -> None:
    """Close the connection such that the client can't take the reply for complete."""
    transport = request.transport
    if transport is None:
        return
    framed = "Transfer-Encoding" in response.headers or "Content-Length" in response.headers
    if framed:
        transport.close()
        return
    # Only the end of the connection ends this body (HTTP/1.0): a reset says it is not the end.
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def environment_proxy(upstream: str) -> URL | None:
    """Give the proxy that http_proxy, https_proxy and no_proxy name for an upstream."""
    base = urlsplit(upstream)
    host = base.hostname or ""
    proxy = urllib.request.getproxies().get(base.scheme)
    if proxy is None or urllib.request.proxy_bypass(host):
        return None
    return URL(proxy)


def _make_socket(address: tuple[Any, ...]) -> socket.socket:
    """Make a socket that notices a peer gone silent, as far as the platform can."""
    family, kind, protocol, *_ = address
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", _KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", _KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", _KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", _UNACKNOWLEDGED_MS),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return sock


async def _note_reuse(
    _session: aiohttp.ClientSession, context: SimpleNamespace, _params: object
) -> None:
    context.trace_request_ctx.reused = True


def _is_stale(error: aiohttp.ClientError, attempt: _Attempt) -> bool:
    """
    Tell whether a request most likely met a kept-alive connection that was being closed.

    That is: the connection was a reused one, it ended without a byte of a reply, and it did so
    within a round trip. A server that took the request and failed over it would close later,
    or on a new connection as well.
    """
    age_s = asyncio.get_running_loop().time() - attempt.started_at
    lost = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
    partly_answered = isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(
        error.message, str
    )
    return attempt.reused and lost and not partly_answered and age_s <= _STALE_WITHIN_S


def _explain(error: aiohttp.ClientError, data: bytes | _Upload | None) -> TurnwireError:
    """Turn a failed exchange into our own error; the message names the kind, not the request."""
    if isinstance(data, _Upload) and data.error is not None:
        return data.error
    return UpstreamUnreachable(f"upstream can't be reached over HTTP: {_cause(error)}")


def _cause(error: aiohttp.ClientError) -> str:
    """Name what went wrong in the words of a person who runs this."""
    for kind, words in (
        (aiohttp.ClientConnectorDNSError, "its name does not resolve"),
        (aiohttp.ClientProxyConnectionError, "the proxy can't be reached"),
        (aiohttp.ClientHttpProxyError, "the proxy refused"),
        (aiohttp.ClientSSLError, "the TLS handshake failed"),
        (aiohttp.ClientConnectorCertificateError, "its certificate is not valid"),
        (aiohttp.ConnectionTimeoutError, "no connection in time"),
        (aiohttp.ClientConnectorError, "the connection was refused"),
        (aiohttp.ServerDisconnectedError, "it closed the connection without a reply"),
        (aiohttp.ClientResponseError, "its reply is not HTTP"),
    ):
        if isinstance(error, kind):
            return words
    return "the connection broke before a reply"
