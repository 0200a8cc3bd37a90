"""
Logs: one line a fact, and no line with a secret or with content.

Everything that logs in this process, structlog loggers and the loggers of libraries alike, ends
in one handler, and what protects people sits there, at the sink:

* Redaction. A value under a name that smells of credentials, and whatever looks like a key or a
  token inside any string, becomes `[redacted]`.
* No content. Names in `FACTS` hold facts of ours and pass whole. Strings under other names are
  cut at 200 characters, and containers under other names are replaced by their type: a body
  passed by mistake is not a log line. Of exceptions the type and the place are logged; the
  message only if it is one of our own or of the operating system, for messages of parsers quote
  what they parsed. The websockets library is never let down to DEBUG, where it prints frames.
* Measure. Warnings and errors of one name are limited to some lines a second, so that nobody can
  fill a disk with malformed requests. What was left out is counted on the next line.
* Patience. Whoever reads the log may be slow, and nobody waits for it (`lines`).

`configure` may be called again: the last call counts.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TextIO, cast

import structlog
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError
from websockets.exceptions import WebSocketException

from proxy.errors import TurnwireError
from proxy.observe.lines import LineWriter

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

    from proxy.observe.facts import TurnFacts

REDACTED: Final = "[redacted]"
MAX_STRING_CHARS: Final = 200
MAX_EXCEPTION_CHARS: Final = 4000
LINES_PER_S: Final = 20  # of one event name, from WARNING up
MAX_EVENT_NAMES: Final = 1000

# Names whose values are facts of ours: numbers, members of enums, hashes, ids, fixed sentences.
FACTS: Final = frozenset(
    {
        "address",
        "bytes_in",
        "bytes_up",
        "chain",
        "connection",
        "duration_ms",
        "event",
        "exception",
        "field",
        "fields",
        "first_event_ms",
        "level",
        "logger",
        "mode",
        "model",
        "principal",
        "reason",
        "resends",
        "response",
        "setting",
        "state",
        "status",
        "suppressed",
        "timestamp",
        "turn",
        "upstream",
        "verdict",
        "version",
    }
)

# Values under these names are made by this process, and never come from outside.
MADE_HERE: Final = frozenset(
    {"level", "logger", "mode", "principal", "reason", "timestamp", "turn"}
)

_SECRET_NAME = re.compile(
    r"authorization|api[-_]?key|secret|passw|cookie|credential|bearer|token(?!s)", re.IGNORECASE
)
_SECRETS: Final = (
    (re.compile(r"(?i)\b(?:bearer|basic)\s+[\w.~+/=-]{6,}"), REDACTED),
    (
        re.compile(
            r"(?i)\b(?:proxy-)?(?:authorization|(?:x-)?api-key|(?:set-)?cookie)\\*['\"]?\s*[:=,]"
            r"\s*b?\\*['\"]?[^'\"\r\n\\]+"
        ),
        REDACTED,
    ),
    (re.compile(r"\b(?:sk|pk|rk|sess|ek|xai|gsk|ghp|gho|hf)[-_][\w-]{6,}"), REDACTED),
    (re.compile(r"\beyJ[\w-]{8,}(?:\.[\w-]*){0,2}"), REDACTED),  # a JWT
    (re.compile(r"(?<=://)[^/\s@]+@"), REDACTED + "@"),  # a URL's userinfo
)

_LEVELS: Final = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def configure(
    level: str,
    fmt: str,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """
    Send all logs of the process to `stream` (the process's stderr by default).

    `level` is debug, info, warning or error; `fmt` is json, console, or auto: console on a
    terminal. `clock` is what floods are measured by. Raises KeyError for another level.
    """
    stream = stream or sys.stderr
    number = _LEVELS[level]
    is_console = fmt == "console" or (fmt == "auto" and stream.isatty())
    renderer: Processor = (
        structlog.dev.ConsoleRenderer(colors=stream.isatty())
        if is_console
        else structlog.processors.JSONRenderer()
    )
    throttle = Throttle(LINES_PER_S, clock)
    finish: list[Processor] = [redact_event, renderer]
    writer = _Current.writer = LineWriter(stream, _notice_of(is_console=is_console))
    handler = logging.StreamHandler(writer)
    handler.addFilter(_quieten)
    handler.addFilter(_Limit(throttle))
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_describing(),
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *finish],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    library_level = logging.INFO if number == logging.DEBUG else logging.WARNING
    for name in ("aiohttp", "asyncio", "websockets"):
        logging.getLogger(name).setLevel(max(number, library_level))
    # Our own lines don't take the way through the standard library's logging, which would cost
    # more than all that a turn is otherwise told of.
    wrapper = structlog.make_filtering_bound_logger(number)
    if not is_console and number <= logging.INFO:
        wrapper = type("_JSONLogger", (wrapper,), {"write_line": _write_line})
    structlog.configure(
        processors=[*_describing(), _limiting(throttle), *finish],
        logger_factory=lambda *names: _LineLogger(names[0] if names else "turnwire", writer),
        wrapper_class=wrapper,
        cache_logger_on_first_use=False,
    )


def _describing() -> list[Processor]:
    return [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _tell_exception,
    ]


class _Current:
    """The writer of the last `configure`."""

    writer: LineWriter | None = None


def lines_dropped() -> int:
    """Return how many lines were dropped, since nobody took them for long."""
    return _Current.writer.dropped if _Current.writer else 0


def _notice_of(*, is_console: bool) -> Callable[[int], str]:
    def notice(dropped: int) -> str:
        if is_console:
            return f"{_now()} [warning  ] log_lines_dropped              dropped={dropped}\n"
        facts = {"dropped": dropped, "event": "log_lines_dropped", "level": "warning"}
        return json.dumps({**facts, "logger": "turnwire", "timestamp": _now()}) + "\n"

    return notice


class _LineLogger:
    """Writes finished lines. structlog calls it by the name of the level."""

    def __init__(self, name: str, writer: LineWriter) -> None:
        self.name = name
        self._writer = writer

    def info(self, line: str) -> None:
        """Write one line."""
        self._writer.write(line + "\n")

    debug = warning = error = critical = exception = info


def _write_line(bound: Any, line: str) -> None:
    """Write a finished line, past all processors: a method of loggers that write JSON at INFO."""
    bound._logger.info(line)  # noqa: SLF001  open to wrapper classes, says structlog


def get_logger(**bound: object) -> FilteringBoundLogger:
    """Give a logger, as configured now, that adds the bound facts to each of its lines."""
    return cast("FilteringBoundLogger", structlog.get_logger("turnwire").bind(**bound))


def log_turn(logger: FilteringBoundLogger, facts: TurnFacts) -> None:
    """
    Log the one line that a turn leaves: what an operator needs of its facts.

    It is the one line on the way of every turn, and of all that is in it only `model` comes from
    outside. So where lines are JSON it is written by hand, as the processors would write it.
    """
    first_event_ms, duration_ms = _ms(facts.first_event_s), _ms(facts.duration_s)
    write_line = getattr(logger, "write_line", None)
    if write_line is None or structlog.get_context(logger):
        logger.info(
            "turn",
            turn=facts.turn_id,
            principal=facts.label,
            mode=str(facts.mode),
            reason=str(facts.reason),
            status=facts.status,
            bytes_in=facts.bytes_in,
            bytes_up=facts.bytes_up,
            first_event_ms=first_event_ms,
            duration_ms=duration_ms,
            model=None if facts.model is None else _model_name(facts.model),
            resends=len(facts.resends),
            connection=facts.connection,
        )
        return
    write_line(
        f'{{"turn": "{facts.turn_id}", "principal": "{facts.label}", "mode": "{facts.mode}", '
        f'"reason": "{facts.reason}", "status": {facts.status}, "bytes_in": {facts.bytes_in}, '
        f'"bytes_up": {facts.bytes_up}, "first_event_ms": {_number(first_event_ms)}, '
        f'"duration_ms": {duration_ms!r}, "model": {_model_text(facts.model)}, '
        f'"resends": {len(facts.resends)}, "connection": {_number(facts.connection)}, '
        f'"event": "turn", "level": "info", "logger": "turnwire", "timestamp": "{_now()}"}}'
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


def _number(number: float | None) -> str:
    return "null" if number is None else repr(number)


@lru_cache(maxsize=64)
def _model_text(model: str | None) -> str:
    return "null" if model is None else json.dumps(_model_name(model))


def _now() -> str:
    second, micros = divmod(time.time_ns() // 1000, 1_000_000)
    return f"{_second(second)}.{micros:06d}Z"


@lru_cache(maxsize=2)
def _second(second: int) -> str:
    return datetime.fromtimestamp(second, tz=UTC).strftime("%Y-%m-%dT%H:%M:%S")


@lru_cache(maxsize=64)
def _model_name(model: str) -> str:
    return redact(model[:MAX_STRING_CHARS])


def redact(text: str) -> str:
    """Replace whatever looks like a credential inside a string."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


# Names are few, and come from our own code mostly: what is thought of each is remembered.
_safe_name = lru_cache(maxsize=512)(redact)


@lru_cache(maxsize=512)
def _names_a_secret(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None


def redact_event(
    _logger: WrappedLogger, _method: str, event: EventDict
) -> MutableMapping[str, Any]:
    """Make an event fit to be seen: the last processor before the renderer."""
    return {_safe_name(str(name)): _presentable(str(name), value) for name, value in event.items()}


def _presentable(name: str, value: object) -> object:
    if value is None or isinstance(value, bool | int | float):
        return value
    if name in MADE_HERE and isinstance(value, str):
        return value
    if _names_a_secret(name):
        return REDACTED
    if isinstance(value, str):
        limit = MAX_EXCEPTION_CHARS if name == "exception" else MAX_STRING_CHARS
        is_free = name not in FACTS or name in ("event", "exception")
        return _cut(redact(value), limit) if is_free else redact(value)
    if name in FACTS and isinstance(value, list | tuple | set | frozenset):
        return [_presentable(name, element) for element in value]
    if isinstance(value, BaseException):
        return _describe(value)
    return f"<{type(value).__name__}>"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"


def _tell_exception(
    _logger: WrappedLogger, _method: str, event: EventDict
) -> MutableMapping[str, Any]:
    """Replace `exc_info` by a text that names types and places, and quotes nothing."""
    exc_info = event.pop("exc_info", None)
    event.pop("stack_info", None)
    if exc_info is True:
        exc_info = sys.exc_info()
    error = exc_info[1] if isinstance(exc_info, tuple) else exc_info
    if isinstance(error, BaseException):
        event["exception"] = _trace(error)
    return event


def _trace(error: BaseException) -> str:
    """Describe an exception and its causes, the outermost first."""
    lines: list[str] = []
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        lines.append(("caused by " if lines else "") + _describe(current))
        frames = traceback.extract_tb(current.__traceback__, limit=-6)
        lines += [f"  {frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames)]
        if isinstance(current, BaseExceptionGroup):
            lines += [f"  holds {_describe(inner)}" for inner in current.exceptions]
        hidden = None if current.__suppress_context__ else current.__context__
        current = current.__cause__ or hidden
    return "\n".join(lines)


def _describe(error: BaseException) -> str:
    """Name an exception; its message only if that can't quote what a client sent."""
    name = type(error).__qualname__
    if isinstance(error, TurnwireError | WebSocketException):
        return f"{name}: {_cut(redact(str(error)), MAX_STRING_CHARS)}"
    if isinstance(error, OSError) and error.strerror:
        return f"{name}: {_cut(redact(str(error.strerror)), MAX_STRING_CHARS)}"
    return name


class Throttle:
    """
    Lets a number of things of one name pass a second, and counts the rest.

    `allow` gives None for no, else how many were held back since the last yes.
    """

    def __init__(self, per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._clock = clock
        self._windows: dict[str, tuple[float, int, int]] = {}  # start, passed, held back

    def allow(self, name: str) -> int | None:
        """Ask whether one more of this name may pass now."""
        if name not in self._windows and len(self._windows) >= MAX_EVENT_NAMES:
            name = ""
        now = self._clock()
        start, passed, held = self._windows.get(name, (now, 0, 0))
        if now - start >= 1.0:
            start, passed = now, 0
        if passed >= self._per_s:
            self._windows[name] = (start, passed, held + 1)
            return None
        self._windows[name] = (start, passed + 1, 0)
        return held


def _limiting(throttle: Throttle) -> Processor:
    """Make the processor that applies a throttle to warnings and errors of our own."""

    def limit(_logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        if method in ("debug", "info"):
            return event
        held = throttle.allow(str(event.get("event")))
        if held is None:
            raise structlog.DropEvent
        if held:
            event["suppressed"] = held
        return event

    return limit


class _Limit(logging.Filter):
    """Applies a throttle to the warnings and errors of libraries."""

    def __init__(self, throttle: Throttle) -> None:
        super().__init__()
        self._throttle = throttle

    def filter(self, record: logging.LogRecord) -> bool:
        """Decide on one record; what was held back is told on the next that passes."""
        if record.levelno < logging.WARNING:
            return True
        held = self._throttle.allow(str(record.msg))
        if held:
            record.msg, record.args = f"{record.getMessage()} (and {held} more before)", ()
        return held is not None


def _quieten(record: logging.LogRecord) -> bool:
    """
    Take from libraries' records what may quote content.

    A malformed request becomes one short warning (aiohttp logs a traceback for each). Of what
    asyncio reports the first line stays: the others hold reprs of whatever was involved.
    """
    if record.name == "asyncio":
        record.msg, record.args = record.getMessage().partition("\n")[0], ()
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError | RequestPayloadError):
        record.msg, record.args = "malformed request", ()
        record.exc_info, record.exc_text = None, None
        record.levelno, record.levelname = logging.WARNING, "WARNING"
    return True
