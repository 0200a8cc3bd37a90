"""The demo as people start it, and its parts: figures, screens and the plot."""

import io
import os
import signal
import subprocess
import sys
import textwrap
import urllib.request
from pathlib import Path

import pytest

from proxy.demo.results import Comparison, Run, Setting, TurnResult, quantile
from proxy.demo.screen import PlainScreen, TerminalScreen, open_screen
from proxy.simulator import PRESETS

ROOT = Path(__file__).resolve().parent.parent
INSTANT = ("--preset", "instant")
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


def environment() -> dict[str, str]:
    """The environment of a process that finds the package from any folder."""
    return os.environ | {"PYTHONPATH": str(ROOT)}


def run_demo(folder, *arguments, before=""):
    """Run the demo in a folder, without a terminal; `before` is Python code to run first."""
    code = f"{textwrap.dedent(before)}\nimport sys\nfrom proxy.cli import main\nsys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, "demo", *arguments],
        cwd=folder, env=environment(), capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip


def start_demo(folder, *arguments):
    """Start the demo in a folder, without a terminal."""
    return subprocess.Popen(
        [sys.executable, "-m", "proxy", "demo", *arguments],
        cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def row(output, name):
    """The figures of a row of the plain table, its runs of blanks made one."""
    (line,) = [line for line in output.splitlines() if line.startswith(name)]
    return " ".join(line.removeprefix(name).split())


# --- as a process ----------------------------------------------------------------------------


def test_the_demo_ends_with_a_table_and_a_png(tmp_path):
    """All follow-up turns are deltas, the answers are the same, and the default plot is there."""
    result = run_demo(tmp_path, *INSTANT)

    assert (result.returncode, result.stderr) == (0, "")
    assert "straight HTTP     turn  25 of 25" in result.stdout
    assert "through Turnwire  turn  25 of 25" in result.stdout
    assert row(result.stdout, "turns sent as a delta") == "- 96% (24 of 25)"
    assert row(result.stdout, "answers identical") == "yes"
    assert row(result.stdout, "end to end")
    assert (tmp_path / "turnwire-demo.png").read_bytes().startswith(PNG_SIGNATURE)


def test_the_plot_is_an_svg_if_its_name_says_so(tmp_path):
    """The suffix chooses the format, in either case."""
    result = run_demo(tmp_path, *INSTANT, "--calls", "2", "--plot", "plot.SVG")

    assert result.returncode == 0
    assert "Plot: plot.SVG" in result.stdout
    assert "<svg" in (tmp_path / "plot.SVG").read_text()


def test_the_output_says_what_it_is_not(tmp_path):
    """The default preset is named with its sources and constants, and so is compressed time."""
    result = run_demo(tmp_path, "--scale", "0.01", "--calls", "3")
    text = " ".join(result.stdout.split())

    assert result.returncode == 0
    assert "Latency preset: openai-post-2026-04 (all delays multiplied by 0.01" in text
    assert "not a measurement of OpenAI's service" in text
    assert "297 ms more for one that does not continue on a warm connection" in text
    assert " ".join(PRESETS["openai-post-2026-04"].source.split()) in text


def test_answers_that_differ_fail(tmp_path):
    """One answer that upstream cut short behind the proxy is found, and the status is 1."""
    result = run_demo(
        tmp_path, *INSTANT, "--calls", "4", "--keep",
        before="""
            import proxy.demo
            from proxy.simulator.faults import EndIncomplete
            from proxy.simulator.server import Simulator
            from proxy.simulator.validate import Transport

            class Faulty(Simulator):
                async def start(self, *arguments):
                    self.faults.arm(EndIncomplete(skip=2, transport=Transport.WS))
                    return await super().start(*arguments)

            proxy.demo.Simulator = Faulty
            """,
    )  # fmt: skip

    assert (result.returncode, result.stderr) == (1, "")
    assert row(result.stdout, "answers identical") == "no"
    assert "The answers differ, first in turn 3." in result.stdout
    assert "export" not in result.stdout


def test_a_failed_turn_is_one_sentence(tmp_path):
    """It names the turn, the way and the error."""
    result = run_demo(
        tmp_path, *INSTANT,
        before="""
            import proxy.demo
            from proxy.simulator.faults import ErrorReply
            from proxy.simulator.server import Simulator

            class Faulty(Simulator):
                async def start(self, *arguments):
                    self.faults.arm(ErrorReply(status=400, message="No.", skip=1))
                    return await super().start(*arguments)

            proxy.demo.Simulator = Faulty
            """,
    )  # fmt: skip

    assert result.returncode == 1
    assert result.stderr.startswith(
        "turnwire: the demo failed: turn 2, straight HTTP: status 400: {'message': 'No.'"
    )
    assert result.stderr.count("\n") == 1


def test_without_matplotlib_there_is_a_hint_in_place_of_the_plot(tmp_path):
    """The demo succeeds and tells how to get the plot."""
    result = run_demo(
        tmp_path, *INSTANT, "--calls", "1", before="import sys; sys.modules['matplotlib'] = None"
    )

    assert (result.returncode, result.stderr) == (0, "")
    assert "pip install 'turnwire[demo]'" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--preset", "swift"), "unknown preset swift; there are instant, "),
        (("--plot", "plot.pdf"), "--plot plot.pdf must end in .png or .svg"),
        (("--plot", "no/such/plot.png"), "--plot no/such/plot.png can't be written"),
    ],
)
def test_wrong_use_is_told_before_anything_runs(tmp_path, arguments, sentence):
    """One sentence, status 64, no output."""
    result = run_demo(tmp_path, *arguments)

    assert (result.returncode, result.stdout) == (64, "")
    assert result.stderr.startswith(f"turnwire: {sentence}")
    assert result.stderr.count("\n") == 1


def test_a_port_in_use_is_told_before_anything_runs(tmp_path, taken_port):
    """The address is named, in one sentence."""
    result = run_demo(tmp_path, "--keep", "--port", str(taken_port))

    assert (result.returncode, result.stdout) == (64, "")
    assert result.stderr.startswith(f"turnwire: can't listen on 127.0.0.1:{taken_port}")
    assert result.stderr.count("\n") == 1


@needs_signals
def test_keep_leaves_the_proxy_running_until_interrupted(tmp_path):
    """The export lines lead to a proxy that answers; SIGINT ends it with 130."""
    with start_demo(tmp_path, *INSTANT, "--calls", "1", "--keep") as process:
        exports = {}
        for line in process.stdout:
            if line.startswith("export "):
                name, _, value = line.removeprefix("export ").strip().partition("=")
                exports[name] = value
            if line.startswith("Metrics: "):
                break
        request = urllib.request.Request(
            exports["OPENAI_BASE_URL"] + "/models",
            headers={"Authorization": f"Bearer {exports['OPENAI_API_KEY']}"},
        )
        with urllib.request.urlopen(request, timeout=30) as reply:
            status = reply.status
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)

    assert (status, process.returncode) == (200, 130)
    assert err.splitlines()[-1] == "turnwire: interrupted; simulator and proxy have ended"
    assert "Traceback" not in err


@needs_signals
def test_an_interrupt_in_the_middle_is_one_sentence(tmp_path):
    """Ctrl-C during a run ends with 130 and without a traceback."""
    with start_demo(tmp_path, "--calls", "99") as process:
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)

    assert first.startswith("An agent with 99 tool calls")
    assert (process.returncode, err) == (
        130,
        "turnwire: interrupted; simulator and proxy have ended\n",
    )


# --- figures ---------------------------------------------------------------------------------


def a_run(answers, mode=None, seconds=1.0, size=1000):
    """A run with one turn for each answer, each of so many seconds."""
    turns = [
        TurnResult(seconds / 2, seconds, seconds * number, mode, answer)
        for number, answer in enumerate(answers, 1)
    ]
    return Run(turns, seconds * len(turns), size)


def compared(straight, via):
    """Two runs under the instant preset."""
    return Comparison(Setting("instant", PRESETS["instant"], 2, 100), straight, via)


@pytest.mark.parametrize(
    ("one", "other", "difference"),
    [("abc", "abc", None), ("abc", "abd", 3), ("abc", "ab", 3), ("ab", "abc", 3), ("xb", "ab", 1)],
)
def test_the_first_difference_is_found(one, other, difference):
    """Answers are compared turn by turn, and a missing turn is a difference."""
    comparison = compared(a_run(one), a_run(other))

    assert comparison.first_difference == difference
    assert comparison.is_identical is (difference is None)


def test_the_table_sets_both_runs_side_by_side():
    """Times, bytes, deltas and the change from one to the other."""
    rows = compared(a_run("abcd"), a_run("abcd", "delta", 0.5, 100)).rows()

    assert rows == [
        ("end to end", "4.00 s", "2.00 s", "-50%"),
        ("turn, median", "1000 ms", "500 ms", "-50%"),
        ("turn, p95", "1000 ms", "500 ms", "-50%"),
        ("first event, median", "500 ms", "250 ms", "-50%"),
        ("first event, p95", "500 ms", "250 ms", "-50%"),
        ("uploaded", "1.0 KB", "0.1 KB", "-90%"),
        ("turns sent as a delta", "-", "100% (4 of 4)", ""),
        ("answers identical", "", "yes", ""),
    ]


@pytest.mark.parametrize(("seconds", "word"), [(0.5, "50% less"), (1.5, "50% more")])
def test_the_verdict_says_which_way_it_went(seconds, word):
    """A slower run is called slower."""
    assert f"in {word} time" in compared(a_run("ab"), a_run("ab", seconds=seconds)).verdict()


@pytest.mark.parametrize(
    ("values", "fraction", "expected"),
    [([7.0], 0.95, 7.0), ([1.0, 3.0], 0.5, 2.0), ([float(n) for n in range(101)], 0.95, 95.0)],
)
def test_quantiles(values, fraction, expected):
    """Between two values it interpolates; one value is all its quantiles."""
    assert quantile(values, fraction) == pytest.approx(expected)


# --- screens ---------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        """It is one."""
        return True


def shown(screen, out):
    """What a screen prints of one progress and one table."""
    with screen.track(["first", "second"], 2) as advance:
        for name in ("first", "first", "second", "second"):
            advance(name)
    screen.table(["", "value"], [["a name", "12 s"]])
    screen.say("[bold] is not markup")
    return out.getvalue()


def test_a_terminal_shows_progress_and_a_table():
    """With rich: bars that end full, a table, and text that is not taken for markup."""
    out = Terminal()
    screen = open_screen(out)
    text = shown(screen, out)

    assert isinstance(screen, TerminalScreen)
    assert "2/2" in text
    assert "12 s" in text
    assert "[bold] is not markup" in text


def test_without_rich_a_terminal_shows_plain_lines(monkeypatch):
    """The same words, one line a step or so."""
    monkeypatch.setitem(sys.modules, "rich", None)
    out = Terminal()
    screen = open_screen(out)
    lines = shown(screen, out).splitlines()

    assert isinstance(screen, PlainScreen)
    assert lines[1].startswith("first   turn   2 of 2")
    assert lines[3].startswith("second  turn   2 of 2")
    assert lines[5:] == [
        "        value",
        "------  -----",
        "a name   12 s",
        "",
        "[bold] is not markup",
        "",
    ]
