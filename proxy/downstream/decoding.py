"""
Replies decoded as they pass by, for those who listen.

Other than `bodies.decode`, which has a whole body before it, this takes chunk after chunk and gives
what each has brought, since an event must be heard when it comes and not at the end.
"""

from __future__ import annotations

import sys
import zlib
from typing import TYPE_CHECKING

import brotli  # type: ignore[import-untyped]  # no stubs are published

from proxy.downstream.bodies import ZSTD_WINDOW_LOG, parse_encodings
from proxy.errors import EncodingUnsupported

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Callable


class Undecodable(Exception):
    """A reply can't be read: an unknown encoding, damaged data, or more of it than allowed."""


def make_decoder(content_encoding: str, max_step_bytes: int) -> Callable[[bytes], bytes]:
    """
    Return a function that takes the chunks of one reply and gives them decoded.

    It raises Undecodable for damaged data and where one chunk yields more than `max_step_bytes`;
    and so does this for an encoding that is not known, or for several.
    """
    try:
        names = parse_encodings([content_encoding])
    except EncodingUnsupported as error:
        raise Undecodable(str(error)) from None
    if not names:
        return bytes
    if len(names) > 1:
        raise Undecodable("stacked encodings")
    steps = {"br": _brotli_steps, "zstd": _zstd_steps}
    step = steps.get(names[0], _zlib_steps)(max_step_bytes)

    def decode(chunk: bytes) -> bytes:
        try:
            data = step(chunk)
        except (zlib.error, zstd.ZstdError, brotli.error, EOFError) as error:
            raise Undecodable("damaged data") from error
        if len(data) > max_step_bytes:
            raise Undecodable("too much data")
        return data

    return decode


def _zlib_steps(max_step_bytes: int) -> Callable[[bytes], bytes]:
    # 32: zlib finds out by itself whether it is gzip or zlib data.
    decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)
    return lambda chunk: decoder.decompress(chunk, max_step_bytes + 1)


def _brotli_steps(max_step_bytes: int) -> Callable[[bytes], bytes]:
    decoder = brotli.Decompressor()

    def step(chunk: bytes) -> bytes:
        data: bytes = decoder.process(chunk, output_buffer_limit=max_step_bytes + 1)
        return data

    return step


def _zstd_steps(max_step_bytes: int) -> Callable[[bytes], bytes]:
    options = {int(zstd.DecompressionParameter.window_log_max): ZSTD_WINDOW_LOG}
    decoder = zstd.ZstdDecompressor(options=options)
    return lambda chunk: decoder.decompress(chunk, max_step_bytes + 1)
