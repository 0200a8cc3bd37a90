"""
The demo: one agent twice, straight to a simulated API and then through Turnwire.

Everything runs in this process, on loopback, without a key: two fresh simulators, one with a
proxy before it, and a stateless agent that replays its whole history at every turn. What differs
between the two runs is the proxy and nothing else, so the table shows what it changes, under the
latency model that the preset names. It is a simulation, and the output says so.

    results   what a run yields, and the table made of two of them (pure)
    runs      the agent's conversation, timed turn by turn
    screen    live progress and tables, on a terminal or as plain text
    plot      the picture
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.app import Turnwire, loop_factory
from proxy.config import Config
from proxy.demo import plot
from proxy.demo.results import Comparison, Setting, Way
from proxy.demo.runs import OUTPUT_BYTES, TurnFailed, play
from proxy.demo.screen import Screen, open_screen
from proxy.errors import ConfigError
from proxy.observe import log
from proxy.simulator import PRESETS, Simulator, SimulatorOptions

if TYPE_CHECKING:
    import argparse

DEFAULT_PRESET = "openai-post-2026-04"
DEFAULT_PLOT = Path("turnwire-demo.png")
API_KEY = "sk-simulated"
OK, FAILED, INTERRUPTED = 0, 1, 130
_DRAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for. `plot` is None where the default can't be written either."""

    setting: Setting
    plot: Path | None
    keep: bool
    port: int


def main(arguments: argparse.Namespace) -> int:
    """
    Run the demo; return the exit status: 1 if the answers differ or a turn failed, 130 on Ctrl-C.

    `arguments` has `preset` (None for the default), `scale`, `calls`, `plot` (None for the
    default), `keep` and `port` (0 for a free one). Raises ConfigError.
    """
    options = _options(arguments)
    log.configure("error", "auto")  # the table is what this prints; turns are logged by `--keep`
    try:
        with asyncio.Runner(loop_factory=loop_factory(Config())) as runner:
            return runner.run(_demonstrate(options, open_screen(sys.stdout)))
    except TurnFailed as failure:
        sys.stderr.write(f"turnwire: the demo failed: {failure}\n")
        return FAILED
    except KeyboardInterrupt:
        sys.stderr.write("turnwire: interrupted; simulator and proxy have ended\n")
        return INTERRUPTED


def _options(arguments: argparse.Namespace) -> Options:
    """Check what can be checked before half a minute has passed. Raises ConfigError."""
    name = arguments.preset or DEFAULT_PRESET
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name}; there are {', '.join(PRESETS)}")
    setting = Setting(
        preset=name,
        latency=PRESETS[name].scaled(arguments.scale),
        calls=arguments.calls,
        output_bytes=OUTPUT_BYTES,
    )
    path = arguments.plot or DEFAULT_PLOT
    if path.suffix.lower() not in plot.SUFFIXES:
        raise ConfigError(f"--plot {path} must end in {' or '.join(plot.SUFFIXES)}")
    is_writable = os.access(path if path.exists() else path.parent, os.W_OK) and not path.is_dir()
    if not is_writable and arguments.plot:
        raise ConfigError(f"--plot {path} can't be written")
    return Options(setting, path if is_writable else None, arguments.keep, arguments.port)


async def _demonstrate(options: Options, screen: Screen) -> int:
    """Both runs one after the other, then the result. Raises TurnFailed."""
    setting = options.setting
    async with contextlib.AsyncExitStack() as stack:
        # All listeners first: a port in use is to be known before the first run, not after it.
        simulation = SimulatorOptions(latency=setting.latency)
        alone = await stack.enter_async_context(Simulator(simulation))
        behind = await stack.enter_async_context(Simulator(simulation))
        proxy = await stack.enter_async_context(Turnwire(_proxy_config(options, behind)))
        screen.say(setting.heading())
        with screen.track([way.value for way in Way], setting.turns) as advance:
            straight = await play(Way.STRAIGHT, alone.base_url, alone.journal, setting, advance)
            via = await play(Way.VIA, proxy.base_url, behind.journal, setting, advance)
        comparison = Comparison(setting, straight, via)
        _show(comparison, options.plot, screen)
        if not comparison.is_identical:
            return FAILED
        if options.keep:
            await _keep(proxy, behind, screen)
        return OK


def _proxy_config(options: Options, behind: Simulator) -> Config:
    return Config.model_validate(
        {
            "upstream": behind.base_url,
            "port": options.port,
            "admin_port": 0,
            "shutdown": {"drain_timeout_s": _DRAIN_S},
        }
    )


def _show(comparison: Comparison, path: Path | None, screen: Screen) -> None:
    screen.table(comparison.columns(), comparison.rows())
    screen.say(comparison.verdict())
    screen.say(comparison.setting.small_print())
    screen.say(_draw(comparison, path))


def _draw(comparison: Comparison, path: Path | None) -> str:
    """Draw the plot; return the sentence that says what became of it."""
    if path is None:
        return f"No plot: {DEFAULT_PLOT} can't be written here; --plot names another file."
    try:
        plot.write(comparison, path)
    except ImportError:
        return "No plot: matplotlib is missing; pip install 'turnwire[demo]' brings it."
    except OSError as error:
        return f"No plot: {path} can't be written ({error.strerror or error})."
    return f"Plot: {path}"


async def _keep(proxy: Turnwire, behind: Simulator, screen: Screen) -> None:
    """Tell how to use what is running, and leave it running until interrupted."""
    screen.say(
        f"Proxy and simulator keep running until Ctrl-C. Point an agent at the proxy:\n\n"
        f"export OPENAI_BASE_URL={proxy.base_url}\n"
        f"export OPENAI_API_KEY={API_KEY}\n\n"
        f"Straight to the simulator, to compare: {behind.base_url}\n"
        f"Metrics: {proxy.admin_url}/metrics"
    )
    log.configure("info", "auto")
    await asyncio.Event().wait()
