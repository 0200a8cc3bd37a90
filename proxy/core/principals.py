"""
Whose credentials a turn carries.

A WebSocket is authenticated once, at its handshake: key, organisation and project hold for as
long as it lives, and no message can change them. A connection therefore belongs to the caller that
opened it, and to nobody else; and so does every chain. Both are filed under `Principal.key`, a
keyed digest of *all* headers that upstream may take for identity. Two callers whose headers
differ in any of them never share anything.

The digest's secret is drawn at the start of each process, so neither `key` nor `label` says
anything about a credential outside of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache, partial
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

_DIGEST_BYTES = 16
LABEL_HEX = 8
_REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class Principal:
    """
    The holder of one set of credentials. Make one with `identify`.

    `key` files connections and chains; `label` is its first 8 hex digits, for logs. `headers`
    are the credentials themselves, as sent at the handshake: they are in no repr.
    """

    key: str = field(repr=False)
    headers: tuple[tuple[str, str], ...] = field(repr=False, compare=False)
    label: str


def identify(
    headers: Iterable[tuple[str, str]], identity_names: Collection[str], secret: bytes
) -> Principal:
    """
    Return the principal of a request.

    `headers` are all of the request's, `identity_names` those that make an identity, in lower
    case. The order of differently named headers and the case of names don't matter; a header that
    is absent differs from one that is empty; repeated headers count in their order. `secret` is
    16 to 64 random bytes.
    """
    return _principal(_own(headers, identity_names), secret)


class Identities:
    """
    Identifies callers, as `identify` does with the same names and secret.

    Those met last are remembered by their very headers.
    """

    def __init__(self, identity_names: Collection[str], secret: bytes) -> None:
        self._names = identity_names
        self._principal = lru_cache(_REMEMBERED)(partial(_principal, secret=secret))

    def of(self, headers: Iterable[tuple[str, str]]) -> Principal:
        """Return the principal of a request with these headers."""
        return self._principal(_own(headers, self._names))


def _own(
    headers: Iterable[tuple[str, str]], identity_names: Collection[str]
) -> tuple[tuple[str, str], ...]:
    return tuple([(name, value) for name, value in headers if name.lower() in identity_names])


def _principal(own: tuple[tuple[str, str], ...], secret: bytes) -> Principal:
    digest = blake2b(key=secret, digest_size=_DIGEST_BYTES)
    for name, value in sorted(own, key=lambda pair: pair[0].lower()):  # stable: keeps repeats
        for text in (name.lower(), value):
            # Lengths first, so that no two lists of headers hash the same bytes. Headers that
            # were not UTF-8 arrive with surrogates in place of the bytes that did not decode.
            encoded = text.encode("utf-8", "surrogateescape")
            digest.update(len(encoded).to_bytes(8, "big"))
            digest.update(encoded)
    key = digest.hexdigest()
    return Principal(key=key, headers=own, label=key[:LABEL_HEX])
