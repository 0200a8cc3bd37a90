"""
Every exception of Turnwire, sorted by whose fault it is.

    TurnwireError
    ├── ConfigError              the operator's: one sentence, exit status 64
    │   └── SelfLoop             the upstream would be this very process
    ├── ClientError              the client's: answered with `status`, in the API's error shape
    │   ├── BodyCorrupt          400
    │   ├── BodyTimeout          408
    │   ├── BodyTooLarge         413
    │   ├── EncodingUnsupported  415
    │   ├── FramingUnsupported   400
    │   ├── HostRefused          403
    │   └── LoopDetected         508
    ├── Overloaded               ours: 503 with Retry-After
    └── UpstreamError            the upstream's
        ├── UpstreamUnreachable  502: no connection, or no reply
        ├── UpgradeRefused       the handshake was answered with an HTTP status
        ├── ConnectionLost       a connection ended; says whether the message had left
        └── LeaseRefused         no connection can be had for this turn; names the reason

Exceptions of libraries are turned into these once, at the edge where they occur. No message
carries content or credentials.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping


class TurnwireError(Exception):
    """The root of all that Turnwire raises on purpose."""


class ConfigError(TurnwireError):
    """The configuration can't be used. The message is one sentence for the operator."""


class SelfLoop(ConfigError):
    """By its configuration, the upstream is this very process."""


class ClientError(TurnwireError):
    """The request can't be served; `status` and `code` say how it is answered."""

    status: ClassVar[int] = 400
    code: ClassVar[str] = "invalid_request"


class BodyCorrupt(ClientError):
    """The body does not decode under its own Content-Encoding."""

    code = "corrupt_body"


class BodyTimeout(ClientError):
    """The body stopped arriving."""

    status = 408
    code = "body_timeout"


class BodyTooLarge(ClientError):
    """The body exceeds a limit, which the message names with its setting."""

    status = 413
    code = "body_too_large"


class EncodingUnsupported(ClientError):
    """The Content-Encoding is none of gzip, deflate, br, zstd, identity."""

    status = 415
    code = "unsupported_encoding"


class FramingUnsupported(ClientError):
    """The version of HTTP, or the Transfer-Encoding, is not one that is spoken here."""

    code = "unsupported_framing"


class HostRefused(ClientError):
    """The Host or Origin header is not one this listener serves (DNS rebinding)."""

    status = 403
    code = "host_not_allowed"


class LoopDetected(ClientError):
    """The request has passed through this very process already."""

    status = 508
    code = "loop_detected"


class Overloaded(TurnwireError):
    """A budget of ours is used up: answered 503 with Retry-After, in seconds."""

    retry_after_s: ClassVar[int] = 1


class UpstreamError(TurnwireError):
    """Something went wrong on the way to, or at, the upstream."""


class UpstreamUnreachable(UpstreamError):
    """No connection to the upstream, or no reply on it. Nothing of a reply has been read."""


class OutOfResources(UpstreamUnreachable):
    """This machine has no descriptor or buffer left for a connection; upstream may be well."""


class UpgradeRefused(UpstreamError):
    """The WebSocket handshake was answered with an HTTP status other than 101."""

    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        super().__init__(f"upgrade refused with status {status}")
        self.status = status
        self.headers = headers
        self.body = body


class ConnectionLost(UpstreamError):
    """
    A WebSocket connection ended.

    `code` is the close code (1006 where no close frame came). `sent` tells whether any byte of
    the message in question may have left: only False makes a resend safe without a doubt.
    """

    def __init__(self, code: int, *, sent: bool = True) -> None:
        super().__init__(f"connection lost with close code {code}")
        self.code = code
        self.sent = sent


class LeaseRefused(UpstreamError):
    """No connection can be had for this turn. `reason` is a member of `core.reasons.Reason`."""

    def __init__(self, reason: str, cause: UpstreamError | None = None) -> None:
        super().__init__(f"no connection: {reason}")
        self.reason = reason
        self.cause = cause
