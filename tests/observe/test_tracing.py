"""Spans of turns: their names and attributes, and whose trace they continue."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest
from harness import play, serving, stack
from wire import Peer, Request, talk

from proxy import app
from proxy.core.usage import Usage, read_usage
from proxy.errors import ConfigError
from proxy.observe import tracing as tracing_module
from proxy.observe.tracing import Attribute, Tracing, context_of, open_tracing
from proxy.simulator.agent import user
from proxy.simulator.faults import ErrorReply, RefuseUpgrade

pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.trace import ReadableSpan

ON = {"tracing": {"enabled": True}}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
WORDS = "a secret prompt"


@pytest.fixture
def spans(monkeypatch) -> Iterator[InMemorySpanExporter]:
    """Keep the spans of all proxies that are started, in place of sending them."""
    exporter = InMemorySpanExporter()

    def opened(upstream: str, version: str) -> Tracing:
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        return Tracing(provider, upstream, version)

    monkeypatch.setattr(app, "open_tracing", opened)
    return exporter


def told(span: ReadableSpan) -> dict[Attribute, Any]:
    """Return a span's attributes by the names of the table; there are no others."""
    return {Attribute(key): value for key, value in (span.attributes or {}).items()}


async def test_one_span_a_turn(spans):
    """Each turn is a client span with what the conventions ask for, and how it was sent."""
    async with stack(**ON) as s:
        agent, history = s.agent(), []
        await play(agent, history, user(f"[calls=0] {WORDS}"))
        second = await play(agent, history, user("[calls=0] More."))
    first_span, span = spans.get_finished_spans()

    assert (span.name, span.kind) == ("chat gpt-5.2", SpanKind.CLIENT)
    found = told(span)
    usage = second.response["usage"]
    assert found[Attribute.OPERATION] == "chat"
    assert found[Attribute.PROVIDER] == found[Attribute.SERVER_ADDRESS] == "127.0.0.1"
    assert found[Attribute.SERVER_PORT] == s.sim.port
    assert found[Attribute.REQUEST_MODEL] == found[Attribute.RESPONSE_MODEL] == "gpt-5.2"
    assert found[Attribute.REQUEST_STREAM] is True
    assert found[Attribute.API_TYPE] == "responses"
    assert found[Attribute.RESPONSE_ID] == second.response["id"]
    assert found[Attribute.FINISH_REASONS] == ("completed",)
    assert found[Attribute.INPUT_TOKENS] == usage["input_tokens"]
    assert found[Attribute.OUTPUT_TOKENS] == usage["output_tokens"]
    assert 0 < found[Attribute.TIME_TO_FIRST_CHUNK] < 20
    assert (found[Attribute.MODE], found[Attribute.REASON]) == ("delta", "continued")
    assert told(first_span)[Attribute.MODE] == "full"
    assert span.status.status_code is StatusCode.UNSET
    assert span.parent is None
    assert span.context.trace_id != first_span.context.trace_id
    assert WORDS not in span.to_json() + first_span.to_json()


async def test_a_chat_turn_is_told_apart(spans):
    """What came as Chat Completions says so."""
    async with stack(chat_completions="translate", **ON) as s:
        body = b'{"model":"gpt-5.2","messages":[{"role":"user","content":"hi"}]}'
        reply = await s.agent().post(body, "/chat/completions")
    (span,) = spans.get_finished_spans()

    assert reply.status == 200
    assert told(span)[Attribute.API_TYPE] == "chat_completions"
    assert told(span)[Attribute.OUTPUT_TOKENS] > 0


async def test_an_error_is_an_error(spans):
    """The status that the client got is the class of the error."""
    async with stack(**ON) as s:
        s.sim.faults.arm(ErrorReply(status=429, code="rate_limit_exceeded"))
        await s.agent().send([user("[calls=0] Hi.")])
    (span,) = spans.get_finished_spans()

    assert told(span)[Attribute.ERROR_TYPE] == "429"
    assert span.status.status_code is StatusCode.ERROR


async def test_a_client_that_leaves_is_told(spans):
    """A turn whose client has gone before its reply ends as that."""

    async def keep_waiting(_request: Request, reader: Any, _writer: Any) -> None:
        await reader.read()

    async with (
        Peer(script=keep_waiting) as peer,
        serving(f"http://127.0.0.1:{peer.port}/v1", websocket={"enabled": False}, **ON) as (p, _),
    ):
        port = int(p.base_url.split(":")[2].split("/")[0])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(posted())
        async with asyncio.timeout(10):
            while not peer.requests:  # noqa: ASYNC110  has no event
                await asyncio.sleep(0.01)
            writer.close()
            while not spans.get_finished_spans():  # noqa: ASYNC110  has no event
                await asyncio.sleep(0.01)
    (span,) = spans.get_finished_spans()

    assert told(span)[Attribute.ERROR_TYPE] == "client_closed"


def posted(*fields: str) -> bytes:
    """Spell a turn with these headers."""
    body = b'{"model":"m","input":"x"}'
    lines = ["POST /v1/responses HTTP/1.1", "Host: localhost", "Authorization: Bearer k", *fields]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


@contextlib.asynccontextmanager
async def http_only(**config: Any) -> Any:
    """Run a proxy before an upstream that answers everything over HTTP; give its port, and that."""
    async with (
        Peer() as peer,
        serving(f"http://127.0.0.1:{peer.port}/v1", websocket={"enabled": False}, **config) as (
            proxy,
            _,
        ),
    ):
        yield int(proxy.base_url.split(":")[2].split("/")[0]), peer


async def test_the_callers_trace_goes_on_over_http(spans):
    """The span continues it, and upstream is given the span in place of the caller."""
    async with http_only(**ON) as (port, peer):
        await talk(port, posted(f"Traceparent: {TRACEPARENT}", "tracestate: a=1", "baggage: b=2"))
    (span,) = spans.get_finished_spans()
    (request,) = peer.requests

    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    assert request.get("traceparent") == f"00-{TRACE}-{span.context.span_id:016x}-01"
    assert request.get("tracestate") == "a=1"
    assert request.get("baggage") == "b=2"
    assert [name.lower() for name, _ in request.headers].count("traceparent") == 1


async def test_a_trace_that_is_none_is_begun_anew(spans):
    """What is not a trace context goes no further."""
    async with http_only(**ON) as (port, peer):
        await talk(port, posted("traceparent: nonsense", "tracestate: a=1"))
    (span,) = spans.get_finished_spans()
    (request,) = peer.requests

    own = f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-"
    assert span.parent is None
    assert (request.get("traceparent") or "").startswith(own)
    assert request.get("tracestate") is None


async def test_two_contexts_are_none(spans):
    """A caller that names two parents has none; its states are one list."""
    async with http_only(**ON) as (port, _):
        await talk(port, posted(f"traceparent: {TRACEPARENT}", f"traceparent: {TRACEPARENT}"))
    (span,) = spans.get_finished_spans()

    assert span.parent is None
    assert context_of([("traceparent", "p"), ("TraceState", "a=1"), ("tracestate", "b=2")]) == {
        "traceparent": "p",
        "tracestate": "a=1,b=2",
    }


@pytest.mark.parametrize("express", [True, False])
async def test_the_callers_trace_goes_on_either_way(spans, express):
    """Past aiohttp or through it, a turn continues its caller's trace."""
    async with stack(tuning={"express": express}, **ON) as s:
        agent, history = s.agent(headers={"traceparent": TRACEPARENT}), []
        await play(agent, history, user("[calls=0] One."))
        await play(agent, history, user("[calls=0] Two."))
    finished = spans.get_finished_spans()

    assert [told(span)[Attribute.MODE] for span in finished] == ["full", "delta"]
    assert {f"{span.context.trace_id:032x}" for span in finished} == {TRACE}
    assert all(told(span)[Attribute.OUTPUT_TOKENS] > 0 for span in finished)


async def test_a_fallback_carries_the_trace(spans):
    """A turn that turns to HTTP on the way does so within its trace."""
    async with stack(**ON) as s:
        s.sim.faults.arm(RefuseUpgrade(status=404, times=9))
        answer = await s.agent(headers={"traceparent": TRACEPARENT}).send([user("[calls=0] Hi.")])
        (seen,) = s.sim.journal.turns
    (span,) = spans.get_finished_spans()

    assert answer.mode == "http"
    assert seen.headers["traceparent"] == f"00-{TRACE}-{span.context.span_id:016x}-01"


async def test_without_tracing_the_callers_headers_pass_untouched():
    """Off, which is the default, a trace context is a header like any other."""
    async with http_only() as (port, peer):
        await talk(port, posted(f"traceparent: {TRACEPARENT}", "tracestate: a=1"))
    (request,) = peer.requests

    assert request.get("traceparent") == TRACEPARENT
    assert request.get("tracestate") == "a=1"


async def test_what_passes_through_makes_no_span(spans):
    """Only turns are spans."""
    async with http_only(**ON) as (port, peer):
        await talk(port, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")

    assert len(peer.requests) == 1
    assert spans.get_finished_spans() == ()


async def test_spans_reach_a_collector(monkeypatch):
    """As the SDK's own variables say, and at the latest when the proxy ends."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    got: asyncio.Queue[Request] = asyncio.Queue()

    async def collect(request: Request, reader: asyncio.StreamReader, writer: Any) -> None:
        request.body = await reader.readexactly(int(request.get("Content-Length") or 0))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        got.put_nowait(request)

    async with Peer(script=collect) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.port}")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "my-turnwire")
        async with stack(**ON) as s:
            await play(s.agent(), [], user(f"[calls=0] {WORDS}"))
        request = got.get_nowait()

    assert request.line == "POST /v1/traces HTTP/1.1"
    assert b"chat gpt-5.2" in request.body
    assert b"my-turnwire" in request.body
    assert WORDS.encode() not in request.body


def test_says_what_to_install(monkeypatch):
    """Without the extra, tracing that is asked for is one sentence."""
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.trace", None)

    with pytest.raises(ConfigError, match=r"turnwire\[otel\]"):
        open_tracing("https://api.openai.com/v1", "1")


@pytest.mark.parametrize(
    ("upstream", "provider", "port"),
    [
        ("https://api.openai.com/v1", "openai", 443),
        ("https://me.openai.azure.com/openai/v1", "azure.ai.openai", 443),
        ("https://api.x.ai/v1", "x_ai", 443),
        ("http://notopenai.com:8080/v1", "notopenai.com", 8080),
    ],
)
def test_names_the_provider(upstream, provider, port):
    """By the host that the conventions have a name for, else by the host itself."""
    common = tracing_module._of_upstream(upstream)

    assert (common[Attribute.PROVIDER], common[Attribute.SERVER_PORT]) == (provider, port)


USAGES = [
    (
        b'{"type":"response.incomplete","response":{"id":"r","model":"m","status":"incomplete",'
        b'"incomplete_details":{"reason":"max_output_tokens"},"usage":{"input_tokens":5,'
        b'"input_tokens_details":{"cached_tokens":4},"output_tokens":3,'
        b'"output_tokens_details":{"reasoning_tokens":2}}}}',
        Usage("m", "max_output_tokens", 5, 4, 3, 2),
    ),
    (b'{"response":{"status":"completed"}}', Usage(finish_reason="completed")),
    (b'{"response":{"usage":{"input_tokens":"many"}}}', Usage()),
    (b'{"response":null}', Usage()),
    (b"", Usage()),
    (b"\xff", Usage()),
]


@pytest.mark.parametrize(("message", "usage"), USAGES)
def test_reads_what_an_answer_cost(message, usage):
    """What is not said, or not readable, is not known; nothing raises."""
    assert read_usage(message) == usage
