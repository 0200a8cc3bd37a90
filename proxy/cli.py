"""
The command line: it reads arguments, calls the part that does the work, and maps its end to an
exit status.

    0    done
    1    failed
    64   wrong usage or configuration (EX_USAGE of sysexits.h); one sentence on standard error
    130  interrupted (128 + SIGINT)

Each command parses its own arguments and imports what it needs when it runs: `turnwire --help`
loads neither pydantic nor aiohttp. Every setting is a flag of `serve` and `config`, but only the
few in `MAIN_SETTINGS` are in their help; `turnwire config` lists them all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import difflib
import errno
import gc
import importlib.metadata
import json
import os
import re
import signal
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from proxy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from proxy.config import Loaded
    from proxy.simulator.latency import LatencyModel
    from proxy.simulator.server import Simulator

OK, FAILED, BAD_USAGE, INTERRUPTED = 0, 1, 64, 130
MAIN_SETTINGS = (
    "upstream",
    "host",
    "port",
    "admin_host",
    "admin_port",
    "websocket.enabled",
    "log.level",
    "log.format",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (by default the process's arguments) names; return its status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()  # here, where a closed pipe can still be handled
    except ConfigError as error:
        return _complain(str(error), BAD_USAGE)
    except BrokenPipeError:
        _discard_stdout()
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


def _dispatch(arguments: list[str]) -> int:
    name, *rest = arguments or [""]
    if name in ("-h", "--help", "help"):
        _print(_help())
        return OK
    if name in ("-V", "--version"):
        name = "version"
    if name in COMMANDS:
        return _run(COMMANDS[name], rest)
    if not name:
        raise ConfigError("no command given; `turnwire --help` lists them")
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else "`turnwire --help` lists the commands"
    raise ConfigError(f"unknown command {name}; {hint}")


def _run(command: Command, arguments: list[str]) -> int:
    """Run a command; a listener that can't be opened is one sentence."""
    try:
        return command.run(arguments)
    except SystemExit as end:  # argparse, after it printed a help text
        return end.code if isinstance(end.code, int) else FAILED
    except OSError as error:
        problem = _listen_problem(error)
        if problem is None:
            raise
        return _complain(problem, FAILED)


# --- commands --------------------------------------------------------------------------------


def _serve(arguments: list[str]) -> int:
    """Load the configuration and run the proxy until it is told to end."""
    gc.disable()  # imports leave nothing to collect; the app enables it when it serves
    try:
        loaded = _loaded(*_parsed(_settings_parser("serve"), arguments))
        with _without("rich"):  # structlog would load it for tracebacks that we don't print
            from proxy.app import run  # noqa: PLC0415  start-up time of the other commands

        return run(loaded.config)
    finally:
        gc.enable()


@contextlib.contextmanager
def _without(module: str) -> Iterator[None]:
    """Let imports do without an optional module, if it is not loaded already."""
    if module in sys.modules:
        yield
        return
    # That None means "not there" is in the language reference, though not in the types.
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


def _config(arguments: list[str]) -> int:
    """Print the effective settings, or the reference of all settings."""
    parser = _settings_parser("config")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="as JSON, values in their base units")
    form.add_argument(
        "--markdown", action="store_true", help="the table of all settings and their defaults"
    )
    options, flags = _parsed(parser, arguments)
    if options.markdown:  # depends on no configuration, so it needs none that is good
        from proxy.config import reference_table  # noqa: PLC0415  start-up time

        _print(reference_table())
    elif options.json:
        _print(json.dumps(_as_json(_loaded(options, flags)), indent=2))
    else:
        _print(_as_toml(_loaded(options, flags)))
    return OK


def _simulate(arguments: list[str]) -> int:
    """Run the simulated upstream until it is told to end."""
    from proxy.simulator.latency import PRESETS  # noqa: PLC0415  start-up time

    parser = _parser("simulate")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument(
        "--port", type=_port, default=8790, help="port, 0 for a free one (%(default)s)"
    )
    _add_latency(parser, default="instant")
    parser.add_argument("--list-presets", action="store_true", help="describe the presets, and end")
    options = parser.parse_args(arguments)
    if options.list_presets:
        _print("\n\n".join(f"{name}\n  {model.source}" for name, model in PRESETS.items()))
        return OK
    model = PRESETS.get(options.preset)
    if model is None:
        raise ConfigError(f"unknown preset {options.preset}; there are {', '.join(PRESETS)}")
    return _serve_simulator(model.scaled(options.scale), options.host, options.port)


def _demo(arguments: list[str]) -> int:
    """Run the demo."""
    parser = _parser("demo")
    _add_latency(parser, default=None)
    parser.add_argument(
        "--calls", type=_positive_int, default=24, help="tool calls of the agent (%(default)s)"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="PATH", help="where to draw the result, .png or .svg"
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep proxy and simulator running until Ctrl-C"
    )
    parser.add_argument(
        "--port", type=_port, default=0, help="port of the proxy, 0 for a free one (%(default)s)"
    )
    options = parser.parse_args(arguments)
    from proxy.demo import main as run_demo  # noqa: PLC0415  start-up time

    return run_demo(options)


def _bench(arguments: list[str]) -> int:
    """Run the benchmark."""
    parser = _parser(
        "bench",
        "turn: whole turns; relay: events; chat: turns of Chat Completions beside those of"
        " Responses; tls: both behind TLS, and not; agent: over emulated networks.",
    )
    parser.add_argument(
        "part", nargs="?", default="all", choices=("turn", "relay", "chat", "tls", "agent", "all"),
        help="what to measure (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--rounds", type=_positive_int, help="how often, for the medians (5; 1 with --quick)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them, .png or .svg")
    parser.add_argument("--quick", action="store_true", help="only see whether it runs")
    parser.add_argument(
        "--gate", action="store_true", help="measure a few robust ratios; status 1 if one is broken"
    )
    parser.add_argument(
        "--realtime",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="real-time priority, each end on a core of its own, against noise; by default "
        "where that is allowed (root)",
    )
    parser.add_argument(
        "--python-load", action="store_true", help="do without the load programs in C"
    )
    _add_own_upstream(parser)
    options = parser.parse_args(arguments)
    if options.upstream is not None:
        if options.part != "agent":
            raise ConfigError("--upstream goes with `turnwire bench agent`, the part it is for")
        from proxy.bench.own import main as run_own  # noqa: PLC0415  start-up time

        return run_own(options)
    from proxy.bench.suite import main as run_bench  # noqa: PLC0415  start-up time

    return run_bench(options)


def _add_own_upstream(parser: _Parser) -> None:
    own = parser.add_argument_group(
        "your own upstream",
        "`bench agent --upstream URL`: one agent, straight and through Turnwire.",
    )
    own.add_argument("--upstream", metavar="URL", help="base URL; it asks before it spends tokens")
    own.add_argument("--model", help="the model, which is billed")
    own.add_argument(
        "--key-from",
        default="OPENAI_API_KEY",
        metavar="VARIABLE",
        help="the environment variable with the key (%(default)s)",
    )
    own.add_argument(
        "--calls", type=_positive_int, default=10, help="tool calls of the agent (%(default)s)"
    )
    own.add_argument(
        "--output-bytes", type=_positive_int, default=2000, help="of each tool (%(default)s)"
    )
    own.add_argument("--yes", action="store_true", help="spend the tokens without asking")


def _run_agent(arguments: list[str]) -> int:
    """Run a command with a proxy of its own."""
    options, command = _split_command(arguments)
    parser = _settings_parser("run")
    parser.usage = "turnwire run [options] -- COMMAND [arguments]"
    parsed, flags = _parsed(parser, options)
    if not command:
        raise ConfigError("no command to run; write it after --: turnwire run -- COMMAND")
    # The agent has the terminal, and nobody was promised a port.
    quiet = {"--port": "0", "--admin-port": "0", "--log-level": "error"}
    loaded = _loaded(parsed, quiet | flags)
    from proxy.launcher import CommandFailed, run  # noqa: PLC0415  start-up time

    try:
        return run(loaded.config, command)
    except CommandFailed as failed:
        return _complain(str(failed), failed.status)


def _split_command(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Separate our own options from the command that follows `--`."""
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    return arguments[:place], arguments[place + 1 :]


def _env(arguments: list[str]) -> int:
    """Print the lines that point an agent here."""
    from proxy.agents import RECIPES, instructions  # noqa: PLC0415  start-up time

    parser = _parser("env")
    parser.add_argument(
        "--for", dest="agent", default="openai", metavar="AGENT", help=", ".join(RECIPES)
    )
    parser.add_argument(
        "--base-url",
        default="http://127.0.0.1:8787/v1",
        help="where the proxy listens (%(default)s)",
    )
    options = parser.parse_args(arguments)
    _print(instructions(options.agent, options.base_url))
    return OK


def _health(arguments: list[str]) -> int:
    """Ask a running proxy how it is; the health check of a container."""
    parser = _settings_parser("health")
    parser.add_argument(
        "--live", action="store_true", help="ask whether it answers at all, also while it drains"
    )
    parser.add_argument(
        "--timeout", type=_positive_float, default=3.0, metavar="S", help="seconds (%(default)s)"
    )
    parser.add_argument(
        "--wait", type=_positive_float, default=0.0, metavar="S", help="ask until it is, so long"
    )
    options, flags = _parsed(parser, arguments)
    config = _loaded(options, flags).config
    from proxy.observe.probe import ask_until  # noqa: PLC0415  start-up time

    path = "/livez" if options.live else "/readyz"
    where = config.admin_host, config.admin_port
    answer = ask_until(*where, path, options.timeout, options.wait)
    if not answer.ok:
        return _complain(answer.text, FAILED)
    _print(answer.text)
    return OK


def _top(arguments: list[str]) -> int:
    """Show what a running proxy does, in the terminal."""
    parser = _settings_parser("top")
    parser.add_argument("--once", action="store_true", help="print it one time, and end")
    parser.add_argument(
        "--interval", type=_positive_float, default=1.0, metavar="S", help="seconds (%(default)s)"
    )
    options, flags = _parsed(parser, arguments)
    config = _loaded(options, flags).config
    from proxy.top import main as show  # noqa: PLC0415  start-up time

    return show(
        config.admin_host, config.admin_port, once=options.once, interval_s=options.interval
    )


def _doctor(arguments: list[str]) -> int:
    """Look at all that has to be in order."""
    parser = _settings_parser("doctor")
    parser.add_argument("--json", action="store_true", help="as JSON, for scripts")
    parser.add_argument(
        "--key-from",
        default="OPENAI_API_KEY",
        metavar="VARIABLE",
        help="the environment variable with the key to ask with (%(default)s)",
    )
    parser.add_argument("--model", help="the model to ask about (one that upstream lists)")
    options, flags = _parsed(parser, arguments)
    from proxy.doctor import main as examine  # noqa: PLC0415  start-up time

    return examine(
        lambda: _loaded(options, flags),
        key_variable=options.key_from,
        model=options.model,
        json_wanted=options.json,
    )


def _version(arguments: list[str]) -> int:
    """Print the version."""
    _parser("version").parse_args(arguments)
    _print(f"turnwire {version()}")
    return OK


def version() -> str:
    """The installed version, or 0+unknown when run from a source tree that is not installed."""
    try:
        return importlib.metadata.version("turnwire")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


@dataclass(frozen=True, slots=True)
class Command:
    """A command: `summary` is its line in the help; `run` takes its arguments."""

    summary: str
    run: Callable[[list[str]], int]


COMMANDS = {
    "serve": Command("run the proxy", _serve),
    "run": Command("run an agent with a proxy of its own, which ends with it", _run_agent),
    "top": Command("show what a running proxy does and saves; the page shows the same", _top),
    "health": Command("ask a running proxy whether it takes work", _health),
    "env": Command("print the lines that point an agent at the proxy", _env),
    "doctor": Command(
        "look at all that has to be in order, with a remedy for what is not", _doctor
    ),
    "config": Command("show every setting, and where its value comes from", _config),
    "demo": Command("time an agent with and without the proxy, offline", _demo),
    "bench": Command("measure the proxy against others, side by side", _bench),
    "simulate": Command("run a simulated upstream, to try things without a key", _simulate),
    "version": Command("print the version", _version),
}


def _help() -> str:
    """One screen: 24 lines of 80 columns."""
    commands = "\n".join(f"  {name:<10} {command.summary}" for name, command in COMMANDS.items())
    return f"""\
usage: turnwire COMMAND [options]

A local reverse proxy that gives stateless Responses API agents the latency of
WebSocket mode.

commands:
{commands}

Start it, and point an agent at it:
  turnwire serve
  export OPENAI_BASE_URL=http://127.0.0.1:8787/v1

`turnwire COMMAND --help` says more about each. Exit status: 0 done, 1 failed,
64 wrong usage or configuration, 130 interrupted."""


# --- parsing ---------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are ConfigErrors: one sentence, no usage text."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")


def _parser(command: str, epilog: str | None = None) -> _Parser:
    summary = COMMANDS[command].summary
    return _Parser(
        prog=f"turnwire {command}",
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
        allow_abbrev=False,
    )


def _settings_parser(command: str) -> _Parser:
    """Make a parser that has every setting as a flag; the rarer ones are not in its help."""
    from proxy.config import FILE_VARIABLE, settings, written  # noqa: PLC0415  start-up time

    parser = _parser(
        command,
        "Every key that `turnwire config` prints is a flag too: ping_interval_s of [websocket] "
        "is --websocket-ping-interval-s, or TURNWIRE_WEBSOCKET_PING_INTERVAL_S in the "
        "environment. A flag wins over the environment, which wins over the file.",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help=f"a TOML file of settings ({FILE_VARIABLE})"
    )
    for key, setting in settings().items():
        meaning = f"{setting.description} ({written(key, setting.default)})".replace("%", "%%")
        parser.add_argument(
            setting.flag,
            dest=key,
            metavar=key.rpartition(".")[2].upper(),
            default=argparse.SUPPRESS,
            help=meaning if key in MAIN_SETTINGS else argparse.SUPPRESS,
            nargs="?" if setting.is_switch else None,
            const="true" if setting.is_switch else None,
        )
    return parser


def _parsed(parser: _Parser, arguments: list[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """Separate the settings among the flags; an unknown flag is kept for `load` to refuse."""
    from proxy.config import settings  # noqa: PLC0415  start-up time

    options, unknown = parser.parse_known_args(arguments)
    if unknown and not unknown[0].startswith("--"):
        parser.error(f"unexpected argument {unknown[0]}")
    given = {key: text for key, text in vars(options).items() if key in settings()}
    flags = {settings()[key].flag: text for key, text in given.items()}
    return options, flags | {flag.partition("=")[0]: "" for flag in unknown[:1]}


def _loaded(options: argparse.Namespace, flags: dict[str, str]) -> Loaded:
    """Load the configuration that flags, environment and file ask for. Raises ConfigError."""
    from proxy.config import load  # noqa: PLC0415  start-up time

    return load(flags, os.environ, options.config)


def _add_latency(parser: _Parser, default: str | None) -> None:
    shown = f" ({default})" if default else ""
    parser.add_argument(
        "--preset", default=default, help=f"latency model of the simulated upstream{shown}"
    )
    parser.add_argument(
        "--scale",
        type=_positive_float,
        default=1.0,
        help="multiply all its delays by this (%(default)s)",
    )


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError("must be a number from 0 to 65535")
    return int(text)


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError("must be a whole number above 0")
    return int(text)


def _positive_float(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?|\.\d+", text) or float(text) == 0:
        raise argparse.ArgumentTypeError("must be a number above 0")
    return float(text)


# --- output ----------------------------------------------------------------------------------


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _complain(sentence: str, status: int) -> int:
    sys.stderr.write(f"turnwire: {sentence}\n")
    return status


def _discard_stdout() -> None:
    """Let the interpreter's own flush at exit go nowhere: the reader of the pipe is gone."""
    with contextlib.suppress(OSError, ValueError):  # standard output need not be a real file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _as_json(loaded: Loaded) -> dict[str, dict[str, object]]:
    from proxy.config import value_of  # noqa: PLC0415  start-up time

    return {
        key: {"value": value_of(loaded.config, key), "origin": origin}
        for key, origin in loaded.origins.items()
    }


def _as_toml(loaded: Loaded) -> str:
    """Write the effective settings as a file that `--config` takes; origins are comments."""
    from proxy.config import value_of  # noqa: PLC0415  start-up time

    lines: list[str] = []
    current = ""
    for key, origin in loaded.origins.items():
        section, _, name = key.rpartition(".")
        if section != current:
            lines += ["", f"[{section}]"]
            current = section
        value = value_of(loaded.config, key)
        if key == "websocket.url" and value is None:
            lines.append(f'# {name} = "{loaded.config.websocket_url}"  # follows from upstream')
        else:
            lines.append(f"{name} = {_toml_value(key, value)}  # {origin}")
    return "\n".join(lines)


def _toml_value(key: str, value: object) -> str:
    from proxy.config import written  # noqa: PLC0415  start-up time

    if isinstance(value, tuple):
        return json.dumps(list(value), ensure_ascii=False)
    text = written(key, value)
    is_bare = isinstance(value, bool | int | float) and not text.endswith("B")
    return text if is_bare else json.dumps(text, ensure_ascii=False)


# --- listeners -------------------------------------------------------------------------------

_BIND_PROBLEMS = {
    errno.EADDRINUSE: "the port is in use",
    errno.EACCES: "no permission to listen there",
    errno.EADDRNOTAVAIL: "no interface of this machine has that address",
}


def _listen_problem(error: OSError) -> str | None:
    """Say why a listener can't be opened, or None if the error is about something else."""
    if isinstance(error, socket.gaierror):
        return f"a host name can't be resolved: {error.strerror}"
    if error.errno not in _BIND_PROBLEMS:
        return None
    # asyncio and uvloop name the address only in the text: "... on address ('127.0.0.1', 80)".
    address = re.search(r"\('([^']+)', (\d+)", str(error))
    where = f"{address[1]} port {address[2]}" if address else "one of the addresses"
    return (
        f"can't listen on {where}: {_BIND_PROBLEMS[error.errno]}; "
        "--host and --port choose another, for the admin listener --admin-host and --admin-port"
    )


def _serve_simulator(model: LatencyModel, host: str, port: int) -> int:
    """Serve until SIGINT or SIGTERM; one line tells the base URL once the port is open."""
    from proxy.simulator.server import SimulatorOptions, serve  # noqa: PLC0415  start-up time

    def announce(simulator: Simulator) -> None:
        _print(f"simulated upstream at {simulator.base_url}")
        sys.stdout.flush()

    work = serve(SimulatorOptions(latency=model), host, port, on_ready=announce)
    asyncio.run(_until_terminated(work))
    return OK


async def _until_terminated(work: Coroutine[object, object, None]) -> None:
    """Await `work`; SIGTERM ends it in good order, also as process 1 of a container."""
    task = asyncio.current_task()
    assert task is not None
    terminated = False

    def terminate() -> None:
        nonlocal terminated
        terminated = True
        task.cancel()

    with contextlib.suppress(NotImplementedError):  # no signal handlers on Windows
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
    try:
        await work
    except asyncio.CancelledError:
        if not terminated:  # by SIGINT, which asyncio.run() makes a KeyboardInterrupt
            raise
