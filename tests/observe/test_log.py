"""Logs: redaction, no content, and measure."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from aiohttp import web
from aiohttp.http_exceptions import BadStatusLine

from proxy.core.reasons import Mode, Reason
from proxy.errors import UpstreamUnreachable
from proxy.observe.facts import TurnFacts
from proxy.observe.log import Throttle, configure, get_logger, log_turn, redact

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Lines = Callable[[], list[dict[str, Any]]]

CANARY = "canary-4711"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """What is logged during a test; the logging of the test run is put back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    configure("debug", "json", stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.fixture
def lines(stream: io.StringIO) -> Lines:
    """The lines logged so far, parsed."""
    return lambda: [json.loads(line) for line in stream.getvalue().splitlines()]


SECRETS = [
    "Bearer abcdef123456",
    "bearer  sk-proj-abc_DEF-123",
    "Basic dXNlcjpwYXNz",
    "sk-abcdefgh12345678",
    "sk-proj-AbC_123-xyz",
    "sess-abcdefgh",
    "xai-abcdef012345",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln",
]


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("frame", ["{}", "sent {} away", '{{"k": "{}"}}', "b'{}'"])
def test_credentials_in_strings_are_redacted(secret: str, frame: str) -> None:
    """Whatever looks like a key or token goes; the words around it stay."""
    before, after = frame.format("|").split("|")
    assert redact(frame.format(secret)) == f"{before}[redacted]{after}"


@pytest.mark.parametrize(
    "text",
    [
        "{'Authorization': 'k1234', 'Accept': '*/*'}",
        "((b'authorization', b'k1234'),)",
        "Cookie: a=b; session=k1234\r\nAccept: x",
        'api-key: "k1234"',
        r"{\"x-api-key\": \"k1234\"}",
    ],
)
def test_credential_headers_are_redacted(text: str) -> None:
    """A header that carries a credential is redacted whatever its value looks like."""
    assert "k1234" not in redact(text)


def test_a_urls_userinfo_is_redacted() -> None:
    """The password of a proxy URL goes, its host stays."""
    assert redact("via http://u:p@proxy:3128/") == "via http://[redacted]@proxy:3128/"


@pytest.mark.parametrize(
    "text", ["the task is done", "a basic fact", "risk-based", "http://host/a@b", "max_tokens=5"]
)
def test_plain_words_stay(text: str) -> None:
    """Redaction does not eat what is no secret."""
    assert redact(text) == text


def test_values_under_secret_names_are_redacted(lines: Lines) -> None:
    """The name is enough; numbers are no credentials."""
    get_logger().info("x", api_key="short", Authorization=b"y", input_tokens=7, token_count=8)
    (line,) = lines()
    assert line["api_key"] == line["Authorization"] == "[redacted]"
    assert (line["input_tokens"], line["token_count"]) == (7, 8)


def test_content_does_not_get_through(lines: Lines) -> None:
    """Long strings are cut, and containers under unknown names only show their type."""
    body = {"input": CANARY}
    get_logger().info("x", note="n" * 500, body=body, raw=b"abc", items=[CANARY], fields=["id"])
    (line,) = lines()
    assert line["note"] == "n" * 200 + "... (500 characters)"
    assert (line["body"], line["raw"], line["items"]) == ("<dict>", "<bytes>", "<list>")
    assert line["fields"] == ["id"]


def test_bound_facts_are_on_every_line(lines: Lines) -> None:
    """A logger carries what it was bound to, and each line its time and level."""
    log = get_logger(turn="t1")
    log.info("a")
    log.bind(connection=3).warning("b", state="idle")
    first, second = lines()
    assert (first["event"], first["level"], first["turn"]) == ("a", "info", "t1")
    assert (second["event"], second["connection"], second["state"]) == ("b", 3, "idle")
    assert "timestamp" in first


def facts(**changes: Any) -> TurnFacts:
    """Make the facts of a turn that was a delta, but for the changes."""
    given: dict[str, Any] = {
        "turn_id": "t1",
        "principal": "the key of all of somebody's chains",
        "label": "0a1b2c3d",
        "mode": Mode.DELTA,
        "reason": Reason.CONTINUED,
        "status": 200,
        "bytes_in": 1000,
        "bytes_up": 10,
        "ended_at": 5.0,
        "duration_s": 0.09999,
        "first_event_s": 0.0123456,
        "overhead_s": 0.0001,
        "model": "m",
        "connection": 4,
        "previous": "resp_0",
        "response": "resp_1",
    }
    return TurnFacts(**(given | changes))


def test_the_line_of_a_turn(lines: Lines) -> None:
    """A turn leaves one line with what an operator needs of its facts."""
    log_turn(get_logger(), facts())
    (line,) = lines()
    del line["timestamp"]
    assert line == {
        "event": "turn",
        "level": "info",
        "logger": "turnwire",
        "turn": "t1",
        "principal": "0a1b2c3d",
        "mode": "delta",
        "reason": "continued",
        "bytes_in": 1000,
        "bytes_up": 10,
        "first_event_ms": 12.3,
        "duration_ms": 100.0,
        "status": 200,
        "model": "m",
        "resends": 0,
        "connection": 4,
    }


@pytest.mark.parametrize(
    "model", ["m", "", 'm\u00e9\ud83d"\n', "Bearer abcdef123456", "x" * 300, None]
)
@pytest.mark.parametrize("connection", [4, None])
@pytest.mark.parametrize("first_event_s", [0.00126, None])
def test_the_short_way_of_a_turns_line_is_the_long_way(
    stream: io.StringIO, model: str | None, first_event_s: float | None, connection: int | None
) -> None:
    """The line written by hand is the processors' own, byte for byte but for the time."""
    told = facts(
        mode=Mode.FULL,
        reason=Reason.CHAIN_BUSY,
        status=499,
        bytes_in=0,
        bytes_up=10**9,
        duration_s=1e6,
        first_event_s=first_event_s,
        model=model,
        resends=(Reason.UPSTREAM_CLOSED,),
        connection=connection,
    )
    for logger in (get_logger(), get_logger(turn="t1")):
        log_turn(logger, told)

    short, long = (line.rpartition(', "timestamp": ')[0] for line in stream.getvalue().splitlines())
    assert short == long
    assert short.count("t1") == 1


@pytest.mark.parametrize(("level", "fmt"), [("warning", "json"), ("error", "json")])
def test_turns_are_not_told_above_info(stream: io.StringIO, level: str, fmt: str) -> None:
    """The short way obeys the level."""
    del stream  # only there to put things back
    configure(level, fmt, shown := io.StringIO())
    log_turn(get_logger(), facts())

    assert not shown.getvalue()


def test_exceptions_name_types_and_places_only(stream: io.StringIO, lines: Lines) -> None:
    """Messages of foreign exceptions may quote content: they are left out, causes included."""
    try:
        try:
            json.loads(f"{{{CANARY}")
            int(CANARY)
        except ValueError as error:
            raise KeyError(CANARY) from error
    except KeyError:
        get_logger().exception("broken", detail=ValueError(CANARY))
        logging.getLogger("library").exception("broken too")
    assert CANARY not in stream.getvalue()
    for line in lines():
        assert line["exception"].startswith("KeyError\n")
        assert "caused by JSONDecodeError" in line["exception"]
        assert "test_log.py" in line["exception"]
    assert lines()[0]["detail"] == "ValueError"


def test_our_own_messages_are_told(lines: Lines) -> None:
    """Errors of ours and of the operating system say what happened."""
    for error in (UpstreamUnreachable("no way"), ConnectionRefusedError(111, "refused")):
        get_logger().error("failed", cause=error)
    assert [line["cause"] for line in lines()] == [
        "UpstreamUnreachable: no way",
        "ConnectionRefusedError: refused",
    ]


def test_library_logs_take_the_same_way(stream: io.StringIO, lines: Lines) -> None:
    """Records of the standard library are redacted and rendered alike."""
    logging.getLogger("library").warning("sent %s", "Bearer abcdef123456")
    (line,) = lines()
    assert (line["event"], line["logger"], line["level"]) == (
        "sent [redacted]",
        "library",
        "warning",
    )
    logging.getLogger("websockets.client").debug("> TEXT '%s'", CANARY)
    assert CANARY not in stream.getvalue()


@pytest.mark.parametrize(("level", "shown"), [("info", False), ("debug", True)])
def test_libraries_are_quiet_unless_asked(level: str, shown: bool) -> None:
    """At info, aiohttp and websockets only warn."""
    root = logging.getLogger()
    handlers, before = root.handlers[:], root.level
    stream = io.StringIO()
    try:
        configure(level, "json", stream)
        logging.getLogger("websockets.client").info("connection open")
        assert bool(stream.getvalue()) is shown
    finally:
        root.handlers[:] = handlers
        root.setLevel(before)
        structlog.reset_defaults()


def test_the_level_is_obeyed_and_an_unknown_one_is_an_error(stream: io.StringIO) -> None:
    """Below the level nothing is written."""
    configure("warning", "json", stream)
    get_logger().info("quiet")
    assert stream.getvalue() == ""
    with pytest.raises(KeyError):
        configure("loud", "json", stream)


def test_the_console_is_for_people(stream: io.StringIO) -> None:
    """`console` gives readable lines, `auto` gives JSON where there is no terminal."""
    configure("info", "console", stream)
    get_logger().info("ready", address="127.0.0.1:8787", secret="hush")
    assert "ready" in stream.getvalue()
    assert "hush" not in stream.getvalue()
    configure("info", "auto", stream)
    get_logger().info("again")
    assert json.loads(stream.getvalue().splitlines()[-1])["event"] == "again"


def test_asyncio_reports_without_reprs(lines: Lines) -> None:
    """The loop's report of a lost exception quotes the task; only its first line stays."""
    loop = asyncio.new_event_loop()
    loop.call_exception_handler({"message": "lost", "exception": ValueError(CANARY), "x": CANARY})
    loop.close()
    (line,) = lines()
    assert line["event"] == "lost"
    assert line["exception"].startswith("ValueError")
    assert CANARY not in json.dumps(line)


async def test_malformed_requests_are_short_warnings(stream: io.StringIO, lines: Lines) -> None:
    """A request that is not HTTP leaves a warning without traceback or quotation."""

    async def handle(request: web.BaseRequest) -> web.Response:
        return web.Response()

    loop = asyncio.get_running_loop()
    server = await loop.create_server(web.Server(handle, access_log=None), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for raw in (b"GET / HTTP/9.9\r\n\r\n", f"GET / HTTP/1.1\r\nbad {CANARY}\r\n\r\n".encode()):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw)
        assert b" 400 " in await reader.read()
        writer.close()
    server.close()
    for line in lines():
        assert (line["event"], line["level"]) == ("malformed request", "warning")
        assert "exception" not in line
    assert len(lines()) == 2
    assert CANARY not in stream.getvalue()


def test_floods_of_warnings_are_bounded(stream: io.StringIO, lines: Lines) -> None:
    """Ten thousand malformed requests a second leave a few lines, whoever logs them."""
    configure("info", "json", stream, clock=lambda: 0.0)
    server_log = logging.getLogger("aiohttp.server")
    for number in range(10_000):
        server_log.error("Error handling request", exc_info=BadStatusLine(f"{number}"))
        get_logger().warning("refused", status=413)
    assert len(lines()) <= 100
    assert {line["event"] for line in lines()} >= {"malformed request", "refused"}


def test_a_throttle_counts_what_it_holds_back() -> None:
    """Names are independent, a second later it starts anew and tells the number."""
    now = 0.0
    throttle = Throttle(2, clock=lambda: now)
    assert [throttle.allow("a") for _ in range(4)] == [0, 0, None, None]
    assert throttle.allow("b") == 0
    now = 1.0
    assert [throttle.allow("a") for _ in range(3)] == [2, 0, None]


def test_a_throttle_remembers_a_bounded_number_of_names() -> None:
    """Names without number share one allowance."""
    throttle = Throttle(1, clock=lambda: 0.0)
    passed = [name for name in map(str, range(5000)) if throttle.allow(name) is not None]
    assert len(passed) <= 1001


def test_what_was_held_back_is_told(stream: io.StringIO, lines: Lines) -> None:
    """The first line after a flood says how many were left out."""
    now = 0.0
    configure("info", "json", stream, clock=lambda: now)
    for _ in range(25):
        get_logger().warning("again")
        logging.getLogger("library").warning("library %s", 1)
    now = 2.0
    get_logger().warning("again")
    logging.getLogger("library").warning("library %s", 1)
    ours, theirs = lines()[-2:]
    assert ours["suppressed"] == 5
    assert theirs["event"] == "library 1 (and 5 more before)"
