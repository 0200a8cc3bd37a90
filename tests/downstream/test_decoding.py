"""Replies decoded chunk by chunk, for those who listen."""

from __future__ import annotations

import gzip
import sys
import zlib

import brotli
import pytest

from proxy.downstream.decoding import Undecodable, make_decoder

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

TEXT = b'data: {"type":"response.output_text.delta","delta":"word"}\n\n' * 50
ENCODED = {
    "": TEXT,
    "identity": TEXT,
    "gzip": gzip.compress(TEXT),
    "deflate": zlib.compress(TEXT),
    "br": brotli.compress(TEXT),
    "zstd": zstd.compress(TEXT),
}


@pytest.mark.parametrize("name", ENCODED)
@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_decodes_in_any_pieces(name, size):
    """What comes out of all chunks together is the text."""
    decode = make_decoder(name, 1_000_000)
    encoded = ENCODED[name]

    assert b"".join(decode(encoded[i : i + size]) for i in range(0, len(encoded), size)) == TEXT


@pytest.mark.parametrize("name", ["gzip, br", "compress", "x y"])
def test_refuses_what_it_does_not_know(name):
    """Several encodings or an unknown one are said at once."""
    with pytest.raises(Undecodable):
        make_decoder(name, 1000)


@pytest.mark.parametrize("name", ["gzip", "deflate", "br", "zstd"])
def test_refuses_damaged_data_and_bombs(name):
    """Neither noise nor a chunk that becomes a mountain is taken."""
    with pytest.raises(Undecodable):
        make_decoder(name, 1000)(b"this is not encoded at all, not by any of them")
    with pytest.raises(Undecodable):
        make_decoder(name, 1000)(ENCODED[name])
