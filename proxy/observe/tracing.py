"""
OpenTelemetry: one span a turn (the extra `otel`).

A span begins when its turn is planned, continues the caller's trace (W3C `traceparent`) or starts
one, and ends with the reply. Where the turn goes over plain HTTP, upstream is given the span's own
context in place of the caller's; a WebSocket message has no headers, and nothing is put into its
content. Without tracing a caller's `traceparent` is passed on as any other header.

Names of attributes are those of the conventions for generative AI, which are still in development:
they stand in `Attribute` and nowhere else. No content is in a span. Where spans go is for the SDK's
own environment variables to say (OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_SERVICE_NAME and their like).
"""

from __future__ import annotations

import enum
import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from proxy.core.usage import Usage
from proxy.errors import ConfigError
from proxy.observe.facts import model_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from proxy.observe.facts import TurnFacts

_FLUSH_WITHIN_MS: Final = 5000
_CLIENT_CLOSED: Final = 499
_ERROR_STATUS: Final = 400
_NO_USAGE: Final = Usage()


class Attribute(enum.StrEnum):
    """
    The names of a span's attributes.

    Sources: the semantic conventions for generative AI (gen-ai-spans, openai) as of semantic
    conventions 1.41 and their own repository, both in development; `turnwire.*` are ours.
    """

    OPERATION = "gen_ai.operation.name"
    PROVIDER = "gen_ai.provider.name"
    REQUEST_MODEL = "gen_ai.request.model"
    REQUEST_STREAM = "gen_ai.request.stream"
    RESPONSE_ID = "gen_ai.response.id"
    RESPONSE_MODEL = "gen_ai.response.model"
    FINISH_REASONS = "gen_ai.response.finish_reasons"
    TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    REASONING_TOKENS = "gen_ai.usage.reasoning.output_tokens"
    API_TYPE = "openai.api.type"
    SERVER_ADDRESS = "server.address"
    SERVER_PORT = "server.port"
    ERROR_TYPE = "error.type"
    MODE = "turnwire.mode"
    REASON = "turnwire.reason"
    BYTES_IN = "turnwire.request.bytes_in"
    BYTES_UP = "turnwire.request.bytes_up"
    OVERHEAD = "turnwire.overhead"
    RESENDS = "turnwire.resends"
    CONNECTION = "turnwire.connection"
    SHADOW_MODE = "turnwire.shadow.mode"
    SHADOW_REASON = "turnwire.shadow.reason"


# By the end of a host's name; whoever is not listed is called by the name of the host.
_PROVIDERS: Final = {
    "openai.com": "openai",
    "chatgpt.com": "openai",
    "azure.com": "azure.ai.openai",
    "x.ai": "x_ai",
}


class TurnSpan:
    """The span of one turn. `headers` carry its context to an upstream over HTTP."""

    __slots__ = ("_span", "headers")

    def __init__(self, span: Any, headers: dict[str, str]) -> None:
        self._span = span
        self.headers = headers

    @property
    def wants_usage(self) -> bool:
        """Whether anybody will see what is told at the end."""
        return bool(self._span.is_recording())

    def end(self, facts: TurnFacts, usage: Usage = _NO_USAGE) -> None:
        """End it with what became of the turn."""
        span = self._span
        told = {**_of_facts(facts), **_of_usage(usage)}
        span.set_attributes({key.value: value for key, value in told.items() if value is not None})
        if (error := _error_of(facts.status)) is not None:
            from opentelemetry.trace import StatusCode  # noqa: PLC0415  an extra

            span.set_attribute(Attribute.ERROR_TYPE.value, error)
            span.set_status(StatusCode.ERROR)
        span.end()


class Tracing:
    """Begins spans. `provider` is a TracerProvider of the SDK; make one with `open_tracing`."""

    def __init__(self, provider: Any, upstream: str, version: str) -> None:
        from opentelemetry import trace  # noqa: PLC0415  an extra
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415  an extra
            TraceContextTextMapPropagator,
        )

        self._provider = provider
        self._tracer = provider.get_tracer("turnwire", version)
        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        self._common = _of_upstream(upstream)

    def begin(
        self, context: Mapping[str, str], *, model: str | None, stream: bool, api: str
    ) -> TurnSpan:
        """Begin the span of a turn; `context` is from `context_of`, `api` is what was called."""
        name = model_name(model)
        parent = self._propagator.extract(context)
        attributes = self._common | {Attribute.REQUEST_STREAM: stream, Attribute.API_TYPE: api}
        if name is not None:
            attributes[Attribute.REQUEST_MODEL] = name
        span = self._tracer.start_span(
            f"{attributes[Attribute.OPERATION]} {name}"
            if name
            else attributes[Attribute.OPERATION],
            context=parent,
            kind=self._trace.SpanKind.CLIENT,
            attributes={key.value: value for key, value in attributes.items()},
            start_time=time.time_ns(),
        )
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._trace.set_span_in_context(span))
        return TurnSpan(span, carrier)

    def close(self) -> None:
        """Send what is left. Takes a few seconds at most; blocks, so call it in a thread."""
        self._provider.force_flush(_FLUSH_WITHIN_MS)
        self._provider.shutdown()


def context_of(fields: Iterable[tuple[str, str]]) -> dict[str, str]:
    """
    Return the trace context among the header fields of a request.

    Several `traceparent` are none, several `tracestate` are one list (W3C Trace Context, 3.2.1 and
    3.3.1).
    """
    found: dict[str, list[str]] = {"traceparent": [], "tracestate": []}
    for name, value in fields:
        if (values := found.get(name.lower())) is not None:
            values.append(value)
    parents, states = found["traceparent"], found["tracestate"]
    if len(parents) != 1:
        return {}
    return {"traceparent": parents[0], "tracestate": ",".join(states)}


def open_tracing(upstream: str, version: str) -> Tracing:
    """Make tracing as the SDK's environment variables say. Raises ConfigError without the extra."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415  an extra
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415  an extra
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415  an extra
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415  an extra
    except ImportError:
        raise ConfigError(
            "tracing.enabled needs packages that are missing: pip install 'turnwire[otel]'"
        ) from None
    # The environment's service name wins over ours, as the SDK has it for every resource.
    ours = Resource({"service.name": "turnwire", "service.version": version})
    told = Resource.create()
    named = told.attributes.get("service.name", "")
    unnamed = not named or str(named).startswith("unknown_service")
    provider = TracerProvider(resource=told.merge(ours) if unnamed else ours.merge(told))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider, upstream, version)


def _of_upstream(upstream: str) -> dict[Attribute, Any]:
    parts = urlsplit(upstream)
    host = parts.hostname or ""
    ends = (name for end, name in _PROVIDERS.items() if host == end or host.endswith(f".{end}"))
    return {
        Attribute.OPERATION: "chat",
        Attribute.PROVIDER: next(ends, host),
        Attribute.SERVER_ADDRESS: host,
        Attribute.SERVER_PORT: parts.port or (443 if parts.scheme == "https" else 80),
    }


def _of_facts(facts: TurnFacts) -> dict[Attribute, Any]:
    would = facts.would
    return {
        Attribute.MODE: facts.mode.value,
        Attribute.REASON: facts.reason.value,
        Attribute.BYTES_IN: facts.bytes_in,
        Attribute.BYTES_UP: facts.bytes_up,
        Attribute.OVERHEAD: facts.overhead_s,
        Attribute.RESENDS: [reason.value for reason in facts.resends] or None,
        Attribute.CONNECTION: facts.connection,
        Attribute.RESPONSE_ID: facts.response,
        Attribute.TIME_TO_FIRST_CHUNK: facts.first_event_s,
        Attribute.SHADOW_MODE: would and would.mode.value,
        Attribute.SHADOW_REASON: would and would.reason.value,
    }


def _of_usage(usage: Usage) -> dict[Attribute, Any]:
    return {
        Attribute.RESPONSE_MODEL: model_name(usage.model),
        Attribute.FINISH_REASONS: usage.finish_reason and [usage.finish_reason],
        Attribute.INPUT_TOKENS: usage.input_tokens,
        Attribute.CACHED_TOKENS: usage.cached_tokens,
        Attribute.OUTPUT_TOKENS: usage.output_tokens,
        Attribute.REASONING_TOKENS: usage.reasoning_tokens,
    }


def _error_of(status: int) -> str | None:
    if status == _CLIENT_CLOSED:
        return "client_closed"
    return str(status) if status >= _ERROR_STATUS else None
