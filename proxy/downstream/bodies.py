"""
Request bodies: read within limits, and decoded.

aiohttp decodes only a single Content-Encoding, passes stacked ones on undecoded without an
error, and has no deadline for a body. So its decoding is switched off (`auto_decompress=False`)
and the work is done here, in two steps:

* `read_body` takes the bytes off the wire. It refuses early what declares itself too large,
  late what turns out to be, and gives up when no byte arrives for a while.
* `decode` undoes the encodings, last one first. It is pure. Every layer writes into a sink that
  refuses the first byte over the limit, and every decoder is asked for little at a time, so
  that a bomb costs no more memory than an honest body of the permitted size.

The bytes as received are kept beside the decoded ones: whatever is passed on over HTTP is passed
on as it came.

All bodies together have a budget. A body is charged for what it holds at any moment, while it
arrives and while it is decoded: a thousand clients that announce little, or nothing, and then send
much at the same time are refused before their bytes fill the memory, and not after.
"""

from __future__ import annotations

import asyncio
import io
import sys
import threading
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

import brotli  # type: ignore[import-untyped]  # no stubs are published
from aiohttp import web

from proxy.errors import (
    BodyCorrupt,
    BodyTimeout,
    BodyTooLarge,
    ClientError,
    EncodingUnsupported,
    Overloaded,
)

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from aiohttp import StreamReader

MAX_LAYERS: Final = 3
MAX_MEMBERS: Final = 1024  # gzip members or zstd frames of one body; each costs a new decoder
PIECE_BYTES: Final = 64 * 1024  # input handed to a decoder at once
STEP_BYTES: Final = 256 * 1024  # output asked of a decoder at once
INLINE_ENCODED_BYTES: Final = 1024 * 1024  # larger bodies are decoded in a thread
INLINE_DECODED_BYTES: Final = 4 * 1024 * 1024  # and so are those that turn out larger than this
NO_BYTE: Final = "no byte of the body arrived for {:g} s (limits.body_timeout_s)"

# RFC 9659 lets an encoder use windows up to 8 MB; twice that bounds what one frame can reserve.
ZSTD_WINDOW_LOG: Final = 24


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What a body may cost: bytes on the wire, bytes decoded, and seconds without a byte."""

    max_body_bytes: int
    max_decoded_body_bytes: int
    body_timeout_s: float


@dataclass(slots=True)
class Body:
    """A body as received, and decoded: the same object where no encoding was used."""

    raw: bytes = field(repr=False)
    decoded: bytes = field(repr=False)


class BodyBudget:
    """What all bodies that are held at one time may weigh. Threads may share it."""

    def __init__(self, max_bytes: int) -> None:
        self.held_bytes = 0
        self.lock = threading.Lock()
        self._max_bytes = max_bytes

    def check(self, more_bytes: int) -> None:
        """Raise Overloaded if so much more would be too much."""
        if self.held_bytes + more_bytes > self._max_bytes:
            raise Overloaded("too many request bodies are held (limits.max_inflight_body_bytes)")


class Share:
    """
    What one body holds of a budget. `close` gives all of it back, and so does leaving it as a
    context manager.

    A thread that decodes for a client that has left is stopped by its next `charge`.
    """

    def __init__(self, budget: BodyBudget) -> None:
        self.budget = budget
        self.held_bytes = 0
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back what is held; nothing more can be charged."""
        with self.budget.lock:
            self._is_closed = True
            self.budget.held_bytes -= self.held_bytes
            self.held_bytes = 0

    def charge(self, more_bytes: int) -> None:
        """Hold so much more, or raise Overloaded and hold what was held."""
        with self.budget.lock:
            if self._is_closed:
                raise Overloaded("the request is over")
            self.budget.check(more_bytes)
            self.budget.held_bytes += more_bytes
            self.held_bytes += more_bytes


class _Sink:
    """A growing buffer with a limit and a share. Its bytes are handed out without another copy."""

    def __init__(self, max_bytes: int, setting: str, share: Share | None = None) -> None:
        self._buffer = io.BytesIO()
        self._left_bytes = max_bytes
        self._refusal = f"the body exceeds {max_bytes} bytes ({setting})"
        self._share = share

    def write(self, data: bytes) -> None:
        """Append, or raise BodyTooLarge or Overloaded."""
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise BodyTooLarge(self._refusal)
        if self._share is not None:
            self._share.charge(len(data))
        self._buffer.write(data)

    def getvalue(self) -> bytes:
        """All that was written."""
        return self._buffer.getvalue()


async def read_body(request: web.Request, limits: BodyLimits, share: Share) -> Body:
    """
    Read and decode the body of a request whose server runs with `auto_decompress=False`.

    `share` is charged for all bytes of the body that are held: received and, if that is not the
    same, decoded.

    Raises BodyTooLarge, BodyTimeout, BodyCorrupt, EncodingUnsupported or Overloaded. A client that
    leaves shows as the handler's cancellation or as ConnectionError.
    """
    encodings = parse_encodings(request.headers.getall("Content-Encoding", ()))
    raw = await _receive(request, limits, share)
    if not encodings or not raw:
        return Body(raw, raw)
    return Body(raw, await _decode_aside(raw, encodings, limits.max_decoded_body_bytes, share))


async def _receive(request: web.Request, limits: BodyLimits, share: Share) -> bytes:
    sink = _Sink(limits.max_body_bytes, "limits.max_body_bytes", share)
    declared_bytes = request.content_length or 0
    if declared_bytes > limits.max_body_bytes:
        raise BodyTooLarge(
            f"the body exceeds {limits.max_body_bytes} bytes (limits.max_body_bytes)"
        )
    share.budget.check(declared_bytes)
    content = request.content
    try:
        if content.is_eof():  # a small body is here with its headers: nothing to wait for
            sink.write(content.read_nowait())
            return sink.getvalue()
        return await _receive_rest(content, sink, limits.body_timeout_s)
    except web.RequestPayloadError:
        raise BodyCorrupt("the body breaks its own Transfer-Encoding") from None
    except TimeoutError:
        raise BodyTimeout(NO_BYTE.format(limits.body_timeout_s)) from None


async def _receive_rest(content: StreamReader, sink: _Sink, timeout_s: float) -> bytes:
    """Read to the end, or raise TimeoutError when nothing came for so long, or an eighth more."""
    loop = asyncio.get_running_loop()
    slack_s = timeout_s / 8  # a timer is not moved for each of a large body's hundreds of pieces
    armed_at = loop.time()
    async with asyncio.timeout(timeout_s + slack_s) as deadline:
        while chunk := await content.readany():
            sink.write(chunk)
            now = loop.time()
            if now - armed_at > slack_s:
                armed_at = now
                deadline.reschedule(now + timeout_s + slack_s)
    return sink.getvalue()


async def _decode_aside(
    raw: bytes, encodings: Sequence[str], max_bytes: int, share: Share
) -> bytes:
    """Decode small bodies at once, and whatever may take long in a thread."""
    if len(raw) <= INLINE_ENCODED_BYTES:
        try:
            decoded = decode(raw, encodings, min(max_bytes, INLINE_DECODED_BYTES))
        except BodyTooLarge:
            if max_bytes <= INLINE_DECODED_BYTES:
                raise
        else:
            share.charge(len(decoded))
            return decoded
    return await asyncio.to_thread(decode, raw, encodings, max_bytes, share)


def decode_at_once(raw: bytes, fields: Sequence[str], max_bytes: int) -> bytes | None:
    """
    Decode a body if that is quick; `fields` are its Content-Encoding fields.

    None where it is not, or where the body is to be refused: `read_body` says with what.
    """
    try:
        encodings = parse_encodings(fields)
        if len(raw) > INLINE_ENCODED_BYTES and encodings:
            return None
        return decode(raw, encodings, min(max_bytes, INLINE_DECODED_BYTES))
    except ClientError:
        return None


def parse_encodings(values: Iterable[str]) -> tuple[str, ...]:
    """
    Read Content-Encoding fields into the names of the encodings, in the order of application.

    Names are lower case, `identity` is left out (RFC 9110 section 8.4.1). Raises
    EncodingUnsupported for an unknown name or more than three layers.
    """
    names = tuple(
        name
        for value in values
        for part in value.split(",")
        if (name := part.strip().lower()) not in ("", "identity")
    )
    if len(names) > MAX_LAYERS:
        raise EncodingUnsupported(f"more than {MAX_LAYERS} stacked Content-Encodings")
    if not _DECODERS.keys() >= set(names):
        raise EncodingUnsupported("of Content-Encodings, gzip, deflate, br and zstd are supported")
    return names


def decode(
    raw: bytes, encodings: Sequence[str], max_bytes: int, share: Share | None = None
) -> bytes:
    """
    Undo encodings (names as from `parse_encodings`), the last applied first.

    Raises BodyCorrupt for data that is damaged, cut short or followed by something else,
    BodyTooLarge as soon as any layer yields more than `max_bytes`, and Overloaded as soon as
    `share` has no room for what the layers have yielded so far.
    """
    for name in reversed(encodings):
        sink = _Sink(max_bytes, "limits.max_decoded_body_bytes", share)
        try:
            _DECODERS[name](raw, sink)
        except (zlib.error, zstd.ZstdError, brotli.error):
            raise BodyCorrupt(f"the body is not valid {name} data") from None
        raw = sink.getvalue()
    return raw


def _pieces(raw: bytes) -> Iterator[bytes]:
    """Cut the input, so that what a decoder keeps for later stays cheap to copy."""
    for start in range(0, len(raw), PIECE_BYTES):
        yield raw[start : start + PIECE_BYTES]


def _finish(finished: bool, name: str) -> None:
    if not finished:
        raise BodyCorrupt(f"the {name} data of the body is cut short")


def _next_member(members: int) -> int:
    """Count one more gzip member or zstd frame, or raise BodyCorrupt."""
    if members >= MAX_MEMBERS:
        raise BodyCorrupt(f"the body has more than {MAX_MEMBERS} compressed members")
    return members + 1


def _gunzip(raw: bytes, sink: _Sink) -> None:
    """Decode gzip, of one or several members (RFC 1952 section 2.2)."""
    decoder, members = zlib.decompressobj(zlib.MAX_WBITS | 16), 1
    for piece in _pieces(raw):
        rest = piece
        while rest:
            if decoder.eof:
                decoder, members = zlib.decompressobj(zlib.MAX_WBITS | 16), _next_member(members)
            rest = _zlib_step(decoder, rest, sink)
    _finish(decoder.eof, "gzip")


def _inflate(raw: bytes, sink: _Sink) -> None:
    """Decode `deflate`, which is zlib data by the RFC and raw deflate from some clients."""
    is_zlib = len(raw) >= 2 and raw[0] & 0x0F == 8 and int.from_bytes(raw[:2]) % 31 == 0
    decoder = zlib.decompressobj(zlib.MAX_WBITS if is_zlib else -zlib.MAX_WBITS)
    for piece in _pieces(raw):
        rest = piece
        while rest:
            if decoder.eof:
                raise BodyCorrupt("data follows the deflate data of the body")
            rest = _zlib_step(decoder, rest, sink)
    _finish(decoder.eof, "deflate")


def _zlib_step(decoder: zlib._Decompress, data: bytes, sink: _Sink) -> bytes:
    """Write at least one step of output; returns the input that was not taken."""
    produced = decoder.decompress(data, STEP_BYTES)
    sink.write(produced)
    while not decoder.eof and not decoder.unconsumed_tail and len(produced) == STEP_BYTES:
        produced = decoder.decompress(b"", STEP_BYTES)
        sink.write(produced)
    return decoder.unused_data if decoder.eof else decoder.unconsumed_tail


def _unbrotli(raw: bytes, sink: _Sink) -> None:
    """Decode brotli; bytes after the end make the decoder raise."""
    decoder = brotli.Decompressor()
    for piece in _pieces(raw):
        sink.write(decoder.process(piece, output_buffer_limit=STEP_BYTES))
        while not decoder.can_accept_more_data():
            sink.write(decoder.process(b"", output_buffer_limit=STEP_BYTES))
    while not decoder.is_finished():
        produced = decoder.process(b"", output_buffer_limit=STEP_BYTES)
        if not produced:
            break
        sink.write(produced)
    _finish(decoder.is_finished(), "brotli")


def _unzstd(raw: bytes, sink: _Sink) -> None:
    """Decode zstd, of one or several frames (RFC 8878 section 3)."""
    options = {int(zstd.DecompressionParameter.window_log_max): ZSTD_WINDOW_LOG}
    decoder, members = zstd.ZstdDecompressor(options=options), 1
    for piece in _pieces(raw):
        rest = piece
        while rest:
            if decoder.eof:
                decoder = zstd.ZstdDecompressor(options=options)
                members = _next_member(members)
            sink.write(decoder.decompress(rest, STEP_BYTES))
            while not decoder.eof and not decoder.needs_input:
                sink.write(decoder.decompress(b"", STEP_BYTES))
            rest = decoder.unused_data if decoder.eof else b""
    _finish(decoder.eof, "zstd")


_DECODERS: Final[dict[str, Callable[[bytes, _Sink], None]]] = {
    "gzip": _gunzip,
    "x-gzip": _gunzip,
    "deflate": _inflate,
    "br": _unbrotli,
    "zstd": _unzstd,
}
