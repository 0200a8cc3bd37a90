"""
Every setting of Turnwire, and how a value reaches it.

`Config` is a frozen tree of one model per part; a part is handed its own section and knows
nothing of the rest. A setting has one dotted key (`websocket.ping_interval_s`) from which its
names elsewhere follow: the flag `--websocket-ping-interval-s` and the environment variable
`TURNWIRE_WEBSOCKET_PING_INTERVAL_S`; in a TOML file it is `ping_interval_s` under `[websocket]`.

`load` lays flags over the environment over the file over the defaults, and remembers where each
value came from. The result is complete and checked before a port opens; whatever is wrong is
one sentence in a `ConfigError`. A name that we do not know is an error too, since a setting
with a typing mistake would otherwise be a default that nobody chose.

The environment variable OPENAI_BASE_URL is never read here: it is how an agent finds *us*, and
taking it for the upstream would make a loop.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from proxy.errors import ConfigError, SelfLoop

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pydantic_core import ErrorDetails

ENV_PREFIX = "TURNWIRE_"
FILE_VARIABLE = "TURNWIRE_CONFIG"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
# Without them in a principal, callers with different credentials would share a chain.
CREDENTIAL_HEADERS = ("authorization", "api-key", "x-api-key", "cookie")
LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
WILDCARD_HOSTS = frozenset({"0.0.0.0", "::"})  # noqa: S104  compared with, never bound to


# --- how a value is written ------------------------------------------------------------------

_QUANTITY = re.compile(r"(\d+(?:_\d+)*(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": KIB, "mib": MIB, "gib": GIB}
_BYTES |= {"ki": KIB, "mi": MIB, "gi": GIB}  # as Kubernetes writes them
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+")  # RFC 9110 section 5.6.2, in lower case


def _number(value: object) -> object:
    """Refuse a boolean, which would pass for 0 or 1."""
    if isinstance(value, bool):
        raise ValueError("must be a number, not a boolean")  # noqa: TRY004  pydantic's contract
    return value


def _seconds(value: object) -> object:
    """Read a duration: a number of seconds, or one with a unit."""
    if not isinstance(value, str):
        return _number(value)
    match = _QUANTITY.fullmatch(value.strip())
    if match is None or match[2].lower() not in _SECONDS:
        raise ValueError("must be a duration such as 30, 30s, 10m, 1h or 250ms")
    return float(match[1]) * _SECONDS[match[2].lower()]


def _bytes(value: object) -> object:
    """Read a size: a number of bytes, or one with a unit; both MB and MiB are known."""
    if not isinstance(value, str):
        return _number(value)
    match = _QUANTITY.fullmatch(value.strip())
    if match is None or match[2].lower() not in _BYTES:
        raise ValueError("must be a size such as 65536, 64KiB, 64MiB, 16MB or 1GiB")
    return int(Decimal(match[1]) * _BYTES[match[2].lower()])


def _names(value: object) -> object:
    """Split a comma-separated text; a list of a TOML file is left as it is."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    return value


def _host(value: str) -> str:
    """Check what one listens on: a name or an address, no URL and no port."""
    host = value.strip().removeprefix("[").removesuffix("]")
    looks_like_port = host.count(":") == 1
    if not host or looks_like_port or re.search(r"[\s/]", host):
        raise ValueError("must be a host name or an IP address, without scheme and port")
    return host


def _split_url(value: str, schemes: tuple[str, ...], example: str) -> SplitResult:
    """Split an absolute URL of one of `schemes` that holds no secret, or raise ValueError."""
    try:
        parts = urlsplit(value)
        usable = parts.scheme in schemes and parts.hostname and parts.port != 0
    except ValueError:  # a port that is no number, half an IPv6 address
        usable = None
    # urlsplit() silently drops tabs and newlines, so they are looked for in the text itself.
    if not usable or re.search(r"[\s\x00-\x1f\x7f]", value):
        raise ValueError(f"must be a URL of {' or '.join(schemes)} with a host, such as {example}")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must hold no credentials; the caller's own are forwarded")
    if parts.fragment:
        raise ValueError("must have no fragment")
    return parts


def _upstream(value: str) -> str:
    """Check the upstream's base URL; its path prefix is kept, a slash at the end is not."""
    url = value.strip()
    parts = _split_url(url, ("http", "https"), "https://api.openai.com/v1")
    if "?" in url:
        raise ValueError("must have no query, which would be lost when paths are appended")
    path = parts.path.rstrip("/")
    if path.endswith("/responses"):
        raise ValueError("must be the base URL, without /responses at its end")
    return f"{parts.scheme}://{parts.netloc}{path}"


def _websocket_url(value: str) -> str:
    """Check a WebSocket URL; unlike the upstream's it is used as it stands, query and all."""
    url = value.strip()
    _split_url(url, ("ws", "wss"), "wss://api.openai.com/v1/responses")
    return url


def _header_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Lower-case header names; those that carry credentials must be among them."""
    lowered = tuple(dict.fromkeys(name.lower() for name in names))
    for name in lowered:
        if not _TOKEN.fullmatch(name):
            raise ValueError("must be names of headers")
    if not set(CREDENTIAL_HEADERS) <= set(lowered):
        raise ValueError(f"must keep {', '.join(CREDENTIAL_HEADERS)}: they keep callers apart")
    return lowered


def _origins(names: tuple[str, ...]) -> tuple[str, ...]:
    """Check origins as browsers write them: scheme, host and perhaps a port, nothing else."""
    for name in names:
        if not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+", name.lower()):
            raise ValueError("must be origins such as http://localhost:3000")
    return tuple(name.lower() for name in names)


def _lower(names: tuple[str, ...]) -> tuple[str, ...]:
    """Host names are compared in lower case."""
    return tuple(name.lower() for name in names)


Count = Annotated[int, BeforeValidator(_number)]
Ratio = Annotated[float, BeforeValidator(_number)]
Seconds = Annotated[float, BeforeValidator(_seconds)]
Bytes = Annotated[int, BeforeValidator(_bytes)]
Host = Annotated[str, AfterValidator(_host)]
Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
Choice = Literal["resend", "continue"]


class ContradictionError(ValueError):
    """Values that are fine alone but not together; `keys` are the settings in question."""

    def __init__(self, message: str, *keys: str) -> None:
        super().__init__(message)
        self.keys = keys


class LoopError(ContradictionError):
    """The upstream would be ourselves."""


# --- the settings ----------------------------------------------------------------------------


class Section(BaseModel):
    """What all models here share: frozen, strict about names, finite numbers."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )


class WebSocketConfig(Section):
    """Connections to the upstream: how they open, prove to be alive, and how long they live."""

    enabled: bool = Field(
        default=True,
        description="Use WebSocket connections at all; false relays every turn over plain HTTP.",
    )
    url: Annotated[str, AfterValidator(_websocket_url)] | None = Field(
        default=None,
        description="WebSocket URL of the Responses API; unset, it is the upstream's base URL "
        "with ws for http and /responses at its end.",
    )
    connect_timeout_s: Seconds = Field(
        default=10,
        gt=0,
        description="Seconds until a connection must be open, handshake included, before the "
        "turn goes over HTTP.",
    )
    first_event_timeout_s: Seconds = Field(
        default=120,
        gt=0,
        description="Seconds until the first server event of a turn must have come.",
    )
    silence_timeout_s: Seconds = Field(
        default=900,
        gt=0,
        description="Seconds between two server events of a turn; long, since reasoning is "
        "silent for minutes while pings show that the connection lives.",
    )
    close_timeout_s: Seconds = Field(
        default=1,
        gt=0,
        description="Seconds to wait for the closing handshake before the connection is cut.",
    )
    ping_interval_s: Seconds = Field(
        default=20,
        gt=0,
        description="Seconds between our pings, which keep idle connections open on the way.",
    )
    ping_timeout_s: Seconds = Field(
        default=10,
        gt=0,
        description="Seconds until a ping must be answered before its connection counts as dead.",
    )
    probe_after_idle_s: Seconds = Field(
        default=20,
        ge=0,
        description="Seconds of silence after which a connection is pinged before it is used.",
    )
    probe_timeout_s: Seconds = Field(
        default=2,
        gt=0,
        description="Seconds until that ping must be answered, since a turn is waiting for it.",
    )
    max_age_s: Seconds = Field(
        default=3600,
        gt=0,
        description="Seconds after which the upstream closes a connection, whatever it is doing.",
    )
    retire_margin_s: Seconds = Field(
        default=600,
        ge=0,
        description="Seconds of remaining life below which no new turn starts on a connection.",
    )
    retire_jitter: Ratio = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Fraction of the margin by which it varies, so that connections opened "
        "together do not retire together.",
    )
    max_send_bytes: Bytes = Field(
        default=16_000_000,
        gt=0,
        description="Bytes of a message to the upstream above which the turn goes over HTTP, "
        "since the upstream closes the connection on larger ones.",
    )
    max_event_bytes: Bytes = Field(
        default=64 * MIB,
        gt=0,
        description="Bytes of one server event above which its connection is closed.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.retire_margin_s >= self.max_age_s:
            raise ContradictionError(
                "websocket.retire_margin_s must be less than websocket.max_age_s, "
                "or no connection is ever used",
                "websocket.retire_margin_s",
                "websocket.max_age_s",
            )
        if self.probe_timeout_s > self.ping_timeout_s:
            raise ContradictionError(
                "websocket.probe_timeout_s must not exceed websocket.ping_timeout_s, "
                "after which the connection is dead anyway",
                "websocket.probe_timeout_s",
                "websocket.ping_timeout_s",
            )
        return self


class ConnectionsConfig(Section):
    """How many connections there may be, and which are kept. The smaller limit wins."""

    max_per_principal: Count = Field(
        default=32,
        ge=1,
        description="Connections of one principal; upstreams refuse more from about 40.",
    )
    max_total: Count = Field(default=1000, ge=1, description="Connections of all principals.")
    nursery_size: Count = Field(
        default=16,
        ge=1,
        description="Connections of one principal whose chains were not continued yet, so that "
        "one-shot requests do not push out conversations.",
    )
    nursery_ttl_s: Seconds = Field(
        default=300,
        gt=0,
        description="Seconds that an idle connection is kept while its chain was not continued.",
    )
    idle_ttl_s: Seconds = Field(
        default=1800,
        gt=0,
        description="Seconds that an idle connection is kept once its chain was continued.",
    )
    spare_per_principal: Count = Field(
        default=1,
        ge=0,
        description="Connections of one principal that are opened ahead of need.",
    )
    handshakes_per_s: Ratio = Field(
        default=3,
        gt=0,
        description="Handshakes per second of one principal, in the long run.",
    )
    handshake_burst: Count = Field(
        default=32,
        ge=1,
        description="Handshakes of one principal that may come at once.",
    )
    yield_after_s: Seconds = Field(
        default=30,
        gt=0,
        description="Seconds without a turn after which a continued chain gives its connection to a"
        " new conversation, if there is no other.",
    )


class MatchingConfig(Section):
    """What becomes of a request that differs from its chain in a way that may be harmless."""

    changed_tools: Choice = Field(
        default="resend",
        description="When `tools` differ from the chain's: resend the history, or continue.",
    )
    missing_reasoning: Choice = Field(
        default="continue",
        description="When the client echoes no reasoning items: continue, since upstream holds "
        "them, or resend the history.",
    )
    dropped_text: Choice = Field(
        default="resend",
        description="When the client drops visible text beside tool calls: resend the history, "
        "or continue, and then the model sees text that the client does not.",
    )


class ChatConfig(Section):
    """Which Chat Completions requests are translated, where `chat_completions` says so at all."""

    models: Names = Field(
        default=("*",),
        description="Models whose Chat Completions requests are translated: names, with `*` for "
        "any characters.",
    )
    retry_refused_s: Seconds = Field(
        default=600,
        ge=0,
        description="Seconds that a model, or settings, which only the Responses API refused are "
        "left to plain HTTP.",
    )


class ChainsConfig(Section):
    """What is remembered about chains. A chain that is evicted costs one full send."""

    max_bytes: Bytes = Field(
        default=256 * MIB,
        gt=0,
        description="Bytes of memory for chains; the least recently used go first.",
    )
    ttl_s: Seconds = Field(
        default=3600,
        gt=0,
        description="Seconds that an unused chain is remembered.",
    )


class LimitsConfig(Section):
    """What a client may send, and how slowly."""

    max_body_bytes: Bytes = Field(
        default=64 * MIB,
        gt=0,
        description="Bytes of a turn's body as received; larger ones are answered 413.",
    )
    max_decoded_body_bytes: Bytes = Field(
        default=128 * MIB,
        gt=0,
        description="Bytes of a turn's body once its Content-Encoding is undone; larger ones "
        "are answered 413.",
    )
    max_inflight_body_bytes: Bytes = Field(
        default=GIB,
        gt=0,
        description="Bytes of all bodies in memory at one time; above it turns are answered 503.",
    )
    body_timeout_s: Seconds = Field(
        default=60,
        gt=0,
        description="Seconds that a body may pause while it arrives before it is answered 408.",
    )
    header_timeout_s: Seconds = Field(
        default=10,
        gt=0,
        description="Seconds until the head of a request must have arrived.",
    )
    http_connect_timeout_s: Seconds = Field(
        default=10,
        gt=0,
        description="Seconds until an HTTP connection to the upstream must be open.",
    )
    max_header_bytes: Bytes = Field(
        default=32 * KIB,
        gt=0,
        description="Bytes of one header line, names and cookies included.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_body_bytes > self.max_decoded_body_bytes:
            raise ContradictionError(
                "limits.max_body_bytes must not exceed limits.max_decoded_body_bytes, "
                "which holds for plain bodies too",
                "limits.max_body_bytes",
                "limits.max_decoded_body_bytes",
            )
        if self.max_decoded_body_bytes > self.max_inflight_body_bytes:
            raise ContradictionError(
                "limits.max_decoded_body_bytes must not exceed limits.max_inflight_body_bytes, "
                "or the largest bodies are never served",
                "limits.max_decoded_body_bytes",
                "limits.max_inflight_body_bytes",
            )
        return self


class ResendsConfig(Section):
    """How often a turn may be sent again, over all turns: a broken upstream is not flooded."""

    budget_ratio: Ratio = Field(
        default=0.2,
        ge=0,
        le=1,
        description="Resends allowed per turn, as a fraction.",
    )
    budget_per_s: Ratio = Field(
        default=10,
        ge=0,
        description="Resends per second allowed besides, so that quiet times can resend too.",
    )


class CooldownConfig(Section):
    """
    How long WebSocket mode rests where it could not be had; turns go over HTTP meanwhile.

    It rests for those whom the trouble concerns: see `core.cooldown`.
    """

    first_s: Seconds = Field(
        default=10,
        gt=0,
        description="Seconds of the first cool-down, of one key or of all; each further one is"
        " twice as long; after it a connection is tried that no turn waits for.",
    )
    max_s: Seconds = Field(default=900, gt=0, description="Seconds of the longest cool-down.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.first_s > self.max_s:
            raise ContradictionError(
                "cooldown.first_s must not exceed cooldown.max_s",
                "cooldown.first_s",
                "cooldown.max_s",
            )
        return self


class ReplyConfig(Section):
    """What clients receive."""

    keepalive_s: Seconds = Field(
        default=15,
        gt=0,
        description="Seconds of silence after which a streamed reply carries a comment line, so "
        "that nothing on the way takes it for dead.",
    )
    lost_upstream: Literal["error", "break"] = Field(
        default="error",
        description="How a streamed reply ends whose upstream connection is lost: with an error "
        "event and then broken off, or just broken off, as it would be without a proxy; Cline and "
        "opencode retry a reply that breaks off, and not one that names an error.",
    )


class ShutdownConfig(Section):
    """How the process ends."""

    drain_timeout_s: Seconds = Field(
        default=600,
        ge=0,
        description="Seconds that running turns have to end after SIGTERM; turns last minutes.",
    )
    notice_s: Seconds = Field(
        default=0,
        ge=0,
        description="Seconds after SIGTERM in which requests are still taken while /readyz already "
        "says no, so that a load balancer notices before the listener closes.",
    )


class SecurityConfig(Section):
    """Who may talk to us, and what keeps callers apart."""

    allowed_hosts: Annotated[Names, AfterValidator(_lower)] = Field(
        default=(),
        description="Names in Host headers that are served besides the loopback names while "
        "bound to loopback (a guard against DNS rebinding).",
    )
    allowed_origins: Annotated[Names, AfterValidator(_origins)] = Field(
        default=(),
        description="Origins of web pages that may call us; all others are answered 403.",
    )
    identity_headers: Annotated[Names, AfterValidator(_header_names)] = Field(
        default=(
            *CREDENTIAL_HEADERS,
            "openai-organization",
            "openai-project",
            "openai-beta",
            "chatgpt-account-id",
            "originator",
            "x-openai-internal-codex-responses-lite",
        ),
        description="Headers that make a principal: requests share a connection or a chain only "
        "if all of these are equal.",
    )


class LogConfig(Section):
    """What is logged, on standard error. Content and credentials never are."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info",
        description="The least severe events that are logged.",
    )
    format: Literal["auto", "json", "console"] = Field(
        default="auto",
        description="JSON lines, or lines for people; auto is the latter on a terminal.",
    )


class TracingConfig(Section):
    """OpenTelemetry; where spans go is said by the SDK's own variables (OTEL_...)."""

    enabled: bool = Field(
        default=False,
        description="Send a span of each turn to the OpenTelemetry collector that "
        "OTEL_EXPORTER_OTLP_ENDPOINT names; needs the extra `otel`.",
    )


class TuningConfig(Section):
    """Speed of the process itself; nothing here changes what is sent."""

    uvloop: bool = Field(default=True, description="Run on uvloop where it is installed.")
    express: bool = Field(
        default=True,
        description="Carry out turns that need no waiting past the HTTP server's own machinery.",
    )
    gc_freeze: bool = Field(
        default=True,
        description="Take what start-up made out of the garbage collector's sight, for "
        "shorter pauses.",
    )
    malloc: bool = Field(
        default=True,
        description="Keep freed memory for the next large body instead of giving it back to the "
        "system (glibc only): bodies of a megabyte and more are received up to twice as fast; "
        "the process stays some 50 MB larger, and after a peak up to 512 MB.",
    )


class Config(Section):
    """All settings. `websocket_url` is where WebSocket connections go."""

    upstream: Annotated[str, AfterValidator(_upstream)] = Field(
        default="https://api.openai.com/v1",
        description="Base URL of the API; the only place that requests are sent to.",
    )
    host: Host = Field(
        default="127.0.0.1",
        description="Address to listen on; loopback, since whoever reaches it is served.",
    )
    port: Count = Field(
        default=8787, ge=0, le=65535, description="Port to listen on; 0 takes a free one."
    )
    admin_host: Host = Field(
        default="127.0.0.1",
        description="Address of the admin listener (metrics, health, dashboard).",
    )
    admin_port: Count = Field(
        default=8788, ge=0, le=65535, description="Port of the admin listener; 0 takes a free one."
    )
    chat_completions: Literal["translate", "passthrough"] = Field(
        default="translate",
        description="What becomes of `/v1/chat/completions`: turns like any other where that loses "
        "nothing, or plain HTTP.",
    )
    mode: Literal["live", "shadow"] = Field(
        default="live",
        description="shadow sends every turn in full over plain HTTP, as if Turnwire were not "
        "there, and only counts which would have been deltas, and whether rightly.",
    )
    websocket: WebSocketConfig = WebSocketConfig()
    connections: ConnectionsConfig = ConnectionsConfig()
    matching: MatchingConfig = MatchingConfig()
    chat: ChatConfig = ChatConfig()
    chains: ChainsConfig = ChainsConfig()
    limits: LimitsConfig = LimitsConfig()
    resends: ResendsConfig = ResendsConfig()
    cooldown: CooldownConfig = CooldownConfig()
    reply: ReplyConfig = ReplyConfig()
    shutdown: ShutdownConfig = ShutdownConfig()
    security: SecurityConfig = SecurityConfig()
    log: LogConfig = LogConfig()
    tracing: TracingConfig = TracingConfig()
    tuning: TuningConfig = TuningConfig()

    @property
    def websocket_url(self) -> str:
        """
        `websocket.url`, or what follows from `upstream`: https becomes wss, http ws.

        An upstream without a path is an origin, under which the API lives at `/v1`.
        """
        if self.websocket.url is not None:
            return self.websocket.url
        base = self.upstream if urlsplit(self.upstream).path else f"{self.upstream}/v1"
        return f"ws{base.removeprefix('http')}/responses"

    @model_validator(mode="after")
    def _listeners_differ(self) -> Self:
        if self.port and self.port == self.admin_port and _overlap(self.host, self.admin_host):
            raise ContradictionError(
                "port and admin_port must differ, since they are two listeners",
                "port",
                "admin_port",
            )
        return self

    @model_validator(mode="after")
    def _shadow_has_an_object(self) -> Self:
        if self.mode == "shadow" and not self.websocket.enabled:
            raise ContradictionError(
                "shadow mode tells what WebSocket mode would do, which is switched off",
                "mode",
                "websocket.enabled",
            )
        return self

    @model_validator(mode="after")
    def _upstream_is_elsewhere(self) -> Self:
        listeners = (
            ("port", self.host, self.port),
            ("admin_port", self.admin_host, self.admin_port),
        )
        urls = (("upstream", self.upstream), ("websocket.url", self.websocket.url))
        for key, url in urls:
            for port_key, host, port in listeners:
                if url is not None and port and _leads_to(url, host, port):
                    raise LoopError(
                        f"{key} is this very process, so requests would go round in a loop",
                        key,
                        port_key,
                    )
        return self


def _overlap(host: str, other: str) -> bool:
    """Tell whether two listeners on one port would take each other's address."""
    hosts = {host.lower(), other.lower()}
    return len(hosts) == 1 or bool(hosts & WILDCARD_HOSTS) or hosts <= LOOPBACK_HOSTS


def _leads_to(url: str, host: str, port: int) -> bool:
    """Tell whether `url` is served by a listener on `host` and `port`, as far as names tell."""
    parts = urlsplit(url)
    default_port = 443 if parts.scheme in ("https", "wss") else 80
    target = (parts.hostname or "").lower()
    if (parts.port or default_port) != port:
        return False
    local = LOOPBACK_HOSTS | WILDCARD_HOSTS
    return target == host.lower() or (target in local and host.lower() in local)


# --- their names, and the reference ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: its dotted `key`, its `default`, and a sentence about what it does."""

    key: str
    default: object
    description: str

    @property
    def environment(self) -> str:
        """The environment variable, such as TURNWIRE_LOG_LEVEL."""
        return ENV_PREFIX + self.key.replace(".", "_").upper()

    @property
    def flag(self) -> str:
        """The flag, such as --log-level."""
        return "--" + re.sub(r"[._]", "-", self.key)

    @property
    def is_switch(self) -> bool:
        """Whether the value is true or false, so that a bare flag means true."""
        return isinstance(self.default, bool)


@cache
def settings() -> dict[str, Setting]:
    """All settings by their keys, in the order of the models."""
    return {setting.key: setting for setting in _settings_of(Config, "")}


def _settings_of(model: type[Section], prefix: str) -> Iterator[Setting]:
    for name, field in model.model_fields.items():
        if isinstance(field.default, Section):
            yield from _settings_of(type(field.default), f"{prefix}{name}.")
        else:
            yield Setting(prefix + name, field.default, field.description or "")


def value_of(config: Config, key: str) -> Any:
    """The value of the setting called `key`."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def written(key: str, value: object) -> str:
    """`value` as one would write it in the environment: 64MiB, 20, true, a,b. None is empty."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case int() if key.endswith("_bytes"):
            return _written_bytes(value)
        case float():
            return str(int(value)) if value.is_integer() else repr(value)
        case tuple() | list():
            return ",".join(map(str, value))
        case _:
            return str(value)


def _written_bytes(value: int) -> str:
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("MB", 10**6), ("KiB", KIB)):
        if value and value % size == 0:
            return f"{value // size}{unit}"
    return str(value)


def reference_table() -> str:
    """Make the Markdown table of all settings that README carries; no line end at its end."""
    lines = ["| Key | Default | Environment variable | Meaning |", "| --- | --- | --- | --- |"]
    for setting in settings().values():
        default = written(setting.key, setting.default).replace(",", ", ")
        cells = (
            f"`{setting.key}`",
            f"`{default}`" if default else "",
            f"`{setting.environment}`",
            setting.description.replace("|", "\\|"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# --- loading ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loaded:
    """
    A configuration and where its values came from.

    `origins` has every key, with "default", "file turnwire.toml", "environment TURNWIRE_PORT"
    or "flag --port".
    """

    config: Config
    origins: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Given:
    """A value as it was written, and where."""

    value: object
    origin: str


def load(flags: Mapping[str, str], env: Mapping[str, str], file: Path | None) -> Loaded:
    """
    Lay `flags` (such as {"--port": "0"}) over `env` over a TOML file over the defaults.

    Without `file`, the environment variable TURNWIRE_CONFIG may name one. An environment
    variable that is set but empty counts as not set. Raises ConfigError, SelfLoop among them.
    """
    if file is None and env.get(FILE_VARIABLE):
        file = Path(env[FILE_VARIABLE])
    given = {**_from_file(file), **_from_environment(env), **_from_flags(flags)}
    try:
        config = Config.model_validate(_nested(given))
    except ValidationError as error:
        errors = error.errors(include_url=False)
        is_loop = isinstance(errors[0].get("ctx", {}).get("error"), LoopError)
        raise (SelfLoop if is_loop else ConfigError)(_sentence(errors, given)) from None
    origins = {key: given[key].origin if key in given else "default" for key in settings()}
    return Loaded(config, origins)


def _from_flags(flags: Mapping[str, str]) -> dict[str, _Given]:
    keys = {setting.flag: key for key, setting in settings().items()}
    for flag in flags:
        if flag not in keys:
            raise ConfigError(f"unknown flag {flag}{_suggestion(flag, keys)}")
    return {keys[flag]: _Given(value, f"flag {flag}") for flag, value in flags.items()}


# Kubernetes tells a pod about the Services of its namespace in variables named after them. One
# called "turnwire" would set TURNWIRE_PORT=tcp://10.0.0.1:8787 and more: none of it is for us.
_SERVICE_LINK = re.compile(
    r"TURNWIRE_(?:\w+_)?(?:SERVICE_HOST|SERVICE_PORT(?:_\w+)?"
    r"|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)
_SERVICE_ADDRESS = re.compile(r"(?:tcp|udp|sctp)://.+")


def _from_environment(env: Mapping[str, str]) -> dict[str, _Given]:
    keys = {setting.environment: key for key, setting in settings().items()}
    given = {}
    for name, value in env.items():
        if not name.startswith(ENV_PREFIX) or name == FILE_VARIABLE or not value:
            continue
        if _SERVICE_LINK.fullmatch(name):
            continue
        if name.endswith("_PORT") and _SERVICE_ADDRESS.fullmatch(value):
            continue
        if name not in keys:
            raise ConfigError(f"unknown environment variable {name}{_suggestion(name, keys)}")
        given[keys[name]] = _Given(value, f"environment {name}")
    return given


def _from_file(file: Path | None) -> dict[str, _Given]:
    if file is None:
        return {}
    values = _flat(_parsed(file), "")
    for key in values:
        if key not in settings():
            raise ConfigError(f"unknown key {key} in file {file}{_suggestion(key, settings())}")
    return {key: _Given(value, f"file {file}") for key, value in values.items()}


def _parsed(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        reason = (error.strerror or "unknown reason").lower()
        raise ConfigError(f"file {file} can't be read: {reason}") from None
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError are both
        raise ConfigError(f"file {file} is not valid TOML: {error}") from None


def _flat(table: Mapping[str, Any], prefix: str) -> dict[str, object]:
    """Flatten sections to dotted keys; a section with an unknown name becomes an unknown key."""
    flat: dict[str, object] = {}
    for name, value in table.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        elif value != {} or not any(key.startswith(f"{prefix}{name}.") for key in settings()):
            flat[prefix + name] = value
    return flat


def _nested(given: Mapping[str, _Given]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, item in given.items():
        *sections, name = key.split(".")
        table = nested
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = item.value
    return nested


# --- sentences about mistakes ----------------------------------------------------------------


def _suggestion(name: str, known: Iterable[str]) -> str:
    """Name the nearest known name, by its last part if that is one's own, else by spelling."""
    known = list(known)
    same_end = [key for key in known if key.endswith(f".{name}")]
    near = same_end or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else "; `turnwire config` lists all keys"


def _sentence(errors: list[ErrorDetails], given: Mapping[str, _Given]) -> str:
    """Say in one sentence what is wrong with the first of the values, and where it was given."""
    error = errors[0]
    more = f"; {len(errors) - 1} more to follow" if len(errors) > 1 else ""
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, ContradictionError):
        return f"{cause} ({_provenance(cause.keys, given)}){more}"
    key = ".".join(str(part) for part in error["loc"][:2])
    key = key if key in settings() else str(error["loc"][0])
    item = given[key]
    return f"{key} = {_shown(item.value)} {_problem(error)} ({item.origin}){more}"


def _provenance(keys: Iterable[str], given: Mapping[str, _Given]) -> str:
    """List what the settings are and where that was said."""
    items = ((key, given.get(key, _Given(settings()[key].default, "default"))) for key in keys)
    return ", ".join(f"{key} = {_shown(item.value)} from {item.origin}" for key, item in items)


def _problem(error: ErrorDetails) -> str:
    """Turn pydantic's "Input should be a valid integer, unable to ..." into "must be ..."."""
    text = error["msg"].removeprefix("Value error, ")
    text = re.sub(r"^\w+ should\b", "must", text)
    return text.partition(", unable")[0]


_SECRET = re.compile(r"(?<=//)[^/@\s]*@|\b(?:sk|sess|key)-[\w-]{8,}")


def _shown(value: object) -> str:
    """Show a value, cut short, without what may be a secret: a URL's user, an API key."""
    text = json.dumps(value, default=str)
    text = _SECRET.sub("***", text)
    return text if len(text) <= 80 else f"{text[:76]} ..."
