"""The command line: help, usage, what commands print, and exit statuses."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from proxy.cli import COMMANDS, main, version
from proxy.config import Config, load, reference_table, settings
from proxy.observe.probe import Answer

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch):
    """Take the machine's own TURNWIRE_ variables out of the tests."""
    for name in list(os.environ):
        if name.startswith("TURNWIRE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def app(monkeypatch):
    """Stand in for `proxy.app`; `configs` is what it was run with, `end` how it ends."""
    module = ModuleType("proxy.app")
    module.configs = []
    module.end = lambda: 0

    def run(config):
        module.configs.append(config)
        return module.end()

    module.run = run
    monkeypatch.setitem(sys.modules, "proxy.app", module)
    return module


def run_python(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """Run `python -m proxy` as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "proxy", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, **options,
    )  # fmt: skip


# --- help and usage --------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--help", "-h", "help"])
def test_help_fits_one_screen(capsys, flag):
    """The help names every command in at most 24 lines of 80 columns."""
    assert main([flag]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) < 80
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(capsys, command):
    """`--help` after a command describes it and ends well."""
    assert main([command, "--help"]) == 0
    assert f"usage: turnwire {command}" in capsys.readouterr().out


def test_the_help_of_serve_shows_the_main_flags_only(capsys):
    """The main flags are there, the rest is said to exist."""
    main(["serve", "--help"])

    text = capsys.readouterr().out
    for flag in ("--upstream", "--host", "--port", "--admin-port", "--config", "--log-level"):
        assert flag in text
    assert "--resends-budget-ratio" not in text
    assert "turnwire config" in text


BAD_USAGE = [
    ([], "no command given; `turnwire --help` lists them"),
    (["srve"], "unknown command srve; did you mean serve?"),
    (["zzz"], "unknown command zzz; `turnwire --help` lists the commands"),
    (["serve", "--prot", "1"], "unknown flag --prot; did you mean --port?"),
    (["serve", "--prot=1"], "unknown flag --prot; did you mean --port?"),
    (["serve", "--por", "1"], "unknown flag --por; did you mean --port?"),
    (["serve", "now"], "unexpected argument now (see `turnwire serve --help`)"),
    (["serve", "-x"], "unexpected argument -x (see `turnwire serve --help`)"),
    (["serve", "--port"], "argument --port: expected one argument (see `turnwire serve --help`)"),
    (["serve", "--port", "x"], 'port = "x" must be a valid integer (flag --port)'),
    (["config", "--config", "/none"], "file /none can't be read: no such file or directory"),
    (["version", "now"], "unrecognized arguments: now (see `turnwire version --help`)"),
    (["simulate", "--port", "70000"], "argument --port: must be a number from 0 to 65535"),
    (["simulate", "--preset", "x"], "unknown preset x; there are instant, "),
    (["simulate", "--scale", "0"], "argument --scale: must be a number above 0"),
    (["demo", "--calls", "0"], "argument --calls: must be a whole number above 0"),
]


@pytest.mark.parametrize(("arguments", "expected"), BAD_USAGE)
def test_bad_usage_is_one_sentence_and_64(capsys, arguments, expected):
    """Nothing is printed but one line on standard error."""
    assert main(arguments) == 64

    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"turnwire: {expected}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["version"], ["--version"], ["-V"]])
def test_the_version_is_told(capsys, arguments):
    """The version is that of the installed package."""
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"turnwire {version()}\n"


# --- config ----------------------------------------------------------------------------------


def test_config_prints_a_file_that_it_takes(capsys, tmp_path, monkeypatch):
    """What `config` prints is TOML with the effective values, whose origins are comments."""
    monkeypatch.setenv("TURNWIRE_CHAINS_MAX_BYTES", "1GiB")
    assert main(["config", "--port", "9", "--security-allowed-hosts", "a,b"]) == 0

    text = capsys.readouterr().out
    assert "\nport = 9  # flag --port\n" in text
    assert '\nmax_bytes = "1GiB"  # environment TURNWIRE_CHAINS_MAX_BYTES\n' in text
    assert '\nallowed_hosts = ["a", "b"]  # flag --security-allowed-hosts\n' in text
    assert '\n# url = "wss://api.openai.com/v1/responses"  # follows from upstream\n' in text
    file = tmp_path / "turnwire.toml"
    file.write_text(text, encoding="utf-8")
    again = load({}, {}, file).config
    assert (
        again == load({"--port": "9", "--security-allowed-hosts": "a,b"}, os.environ, None).config
    )
    assert len(tomllib.loads(text)) > 10


def test_config_prints_json(capsys):
    """`--json` has the value, in base units, and the origin of every key."""
    assert main(["config", "--json", "--websocket-max-event-bytes", "1MiB"]) == 0

    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == list(settings())
    assert shown["websocket.max_event_bytes"] == {
        "value": 1 << 20,
        "origin": "flag --websocket-max-event-bytes",
    }


def test_config_prints_the_reference(capsys, monkeypatch):
    """`--markdown` prints the reference, for which no configuration needs to be good."""
    monkeypatch.setenv("TURNWIRE_PORT", "x")

    assert main(["config", "--markdown"]) == 0
    assert capsys.readouterr().out == reference_table() + "\n"


# --- serve -----------------------------------------------------------------------------------


def test_serve_runs_the_app_with_the_configuration(app, tmp_path, monkeypatch):
    """Flags, environment and file end up in the one Config that the app is given."""
    file = tmp_path / "t.toml"
    file.write_text("[log]\nlevel = 'debug'\n", encoding="utf-8")
    monkeypatch.setenv("TURNWIRE_ADMIN_PORT", "0")
    app.end = lambda: 1

    assert main(["serve", "--config", str(file), "--port=0", "--websocket-enabled", "no"]) == 1
    expected = {"port": 0, "admin_port": 0, "log": {"level": "debug"}}
    assert app.configs == [Config.model_validate(expected | {"websocket": {"enabled": False}})]


def test_a_bare_switch_is_true(app, monkeypatch):
    """A flag of a setting that is true or false needs no value."""
    monkeypatch.setenv("TURNWIRE_WEBSOCKET_ENABLED", "false")

    assert main(["serve", "--websocket-enabled"]) == 0
    assert app.configs == [Config()]


def test_a_port_in_use_is_one_sentence(app, capsys, taken_port):
    """The address is named, and how to choose another."""

    async def nothing(reader, writer):
        """Answer nothing."""

    app.end = lambda: asyncio.run(asyncio.start_server(nothing, "127.0.0.1", taken_port))

    assert main(["serve"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(
        f"turnwire: can't listen on 127.0.0.1 port {taken_port}: the port is in use; --host"
    )
    assert err.count("\n") == 1


def test_a_host_that_does_not_exist_is_one_sentence(app, capsys):
    """A name that can't be resolved is told, without a traceback."""

    def end():
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    app.end = end

    assert main(["serve"]) == 1
    assert capsys.readouterr().err == (
        "turnwire: a host name can't be resolved: Name or service not known\n"
    )


def test_other_failures_are_not_hidden(app):
    """An error that is nobody's mistake in using us keeps its traceback."""

    def end():
        raise OSError("disk on fire")

    app.end = end

    with pytest.raises(OSError, match="disk on fire"):
        main(["serve"])


def test_an_interrupt_is_130(app):
    """Ctrl-C ends with the status that shells expect."""

    def end():
        raise KeyboardInterrupt

    app.end = end

    assert main(["serve"]) == 130


# --- demo ------------------------------------------------------------------------------------


def test_demo_is_given_its_options(monkeypatch):
    """The demo receives what was asked for as a namespace; its status is the process's."""
    module = ModuleType("proxy.demo")
    given = []
    module.main = lambda options: given.append(vars(options)) or 1
    monkeypatch.setitem(sys.modules, "proxy.demo", module)

    assert main(["demo"]) == 1
    assert main(["demo", "--calls", "3", "--scale", ".5", "--plot", "x.png", "--preset=p"]) == 1
    assert given == [
        {"preset": None, "scale": 1.0, "calls": 24, "plot": None, "keep": False, "port": 0},
        {"preset": "p", "scale": 0.5, "calls": 3, "plot": Path("x.png"), "keep": False, "port": 0},
    ]


def test_health_asks_the_admin_listener(monkeypatch, capsys):
    """It finds the listener as `serve` does: by flags, environment and file; status 0 or 1."""
    asked = []

    def ask(*question):
        asked.append(question)
        return Answer(ok=question[2] == "/livez", text="draining")

    monkeypatch.setattr("proxy.observe.probe.ask_until", ask)
    monkeypatch.setenv("TURNWIRE_ADMIN_PORT", "9000")

    assert main(["health"]) == 1
    flags = ["--live", "--admin-host", "::", "--timeout", "0.5", "--wait", "30"]
    assert main(["health", *flags]) == 0
    assert asked == [("127.0.0.1", 9000, "/readyz", 3.0, 0.0), ("::", 9000, "/livez", 0.5, 30.0)]
    assert capsys.readouterr() == ("draining\n", "turnwire: draining\n")


# --- as a process ----------------------------------------------------------------------------


def test_python_m_proxy_is_turnwire():
    """`python -m proxy --help` prints the help, without a heavy import on the way."""
    watch = (
        "import sys; from proxy.cli import main; main(['--help']); "
        "print(sorted({'pydantic', 'aiohttp', 'websockets', 'uvloop'} & set(sys.modules)))"
    )
    result = run_python("--help")
    watched = subprocess.run(
        [sys.executable, "-c", watch], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("usage: turnwire COMMAND")
    assert watched.stdout.splitlines()[-1] == "[]"


def test_the_app_loads_without_what_it_does_not_need():
    """`turnwire serve` loads no terminal library, which others may load later all the same."""
    watch = (
        "import gc, sys\nfrom proxy import cli\n"
        "with cli._without('rich'):\n    import proxy.app\n"
        "print('rich' in sys.modules)\nimport rich\n"
        "proxy.app.run = lambda config: gc.isenabled()\n"
        "print(cli.main(['serve']), gc.isenabled())"
    )
    result = subprocess.run(
        [sys.executable, "-c", watch], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert result.stdout == "False\nFalse True\n"


def test_a_bad_configuration_never_shows_a_traceback():
    """The process ends with 64 and one sentence."""
    result = run_python("serve", env=os.environ | {"TURNWIRE_LOG_LEVEL": "loud"})

    assert (result.returncode, result.stdout) == (64, "")
    assert result.stderr == (
        "turnwire: log.level = \"loud\" must be 'debug', 'info', 'warning' or 'error' "
        "(environment TURNWIRE_LOG_LEVEL)\n"
    )


def test_a_closed_pipe_is_quiet():
    """When the reader of the output has gone, there is no traceback about it."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        result = subprocess.run(
            [sys.executable, "-m", "proxy", "config", "--markdown"],
            cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip

    assert (result.returncode, result.stderr) == (1, "")


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_the_simulator_serves_until_told_to_end(number, status):
    """It prints one line with its base URL, answers, and ends with a status that says why."""
    process = subprocess.Popen(
        [sys.executable, "-m", "proxy", "simulate", "--port", "0"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        line = process.stdout.readline()
        port = int(line.removesuffix("/v1\n").rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)):
            process.send_signal(number)
        out, err = process.communicate(timeout=60)

    assert line.startswith("simulated upstream at http://127.0.0.1:")
    assert (process.returncode, out, err) == (status, "", "")


def test_the_simulator_tells_that_its_port_is_in_use(capsys, taken_port):
    """The same sentence as for the proxy."""
    assert main(["simulate", "--port", str(taken_port)]) == 1
    assert f"can't listen on 127.0.0.1 port {taken_port}" in capsys.readouterr().err


def test_the_presets_are_listed(capsys):
    """`--list-presets` prints the names and where the figures come from."""
    assert main(["simulate", "--list-presets"]) == 0
    assert capsys.readouterr().out.startswith("instant\n  ")
