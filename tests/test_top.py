"""`turnwire top`: the page's data in a terminal."""

from __future__ import annotations

import asyncio
import io
import re

import pytest
from harness import play, stack

from proxy import top
from proxy.core.reasons import Mode, Reason
from proxy.observe.facts import ConnectionFacts, TurnFacts, Would
from proxy.observe.live import Live
from proxy.simulator.agent import user
from proxy.top.view import draw

NOW = 1_796_104_800.0
FULL, DELTA, HTTP = Mode.FULL, Mode.DELTA, Mode.HTTP
TURNS = [
    (1, FULL, Reason.NEW_CONVERSATION, 1000, 1010),
    (1, DELTA, Reason.CONTINUED, 2_000_000, 500),
    (1, FULL, Reason.CHANGED_TOOLS, 3000, 3010),
    (2, HTTP, Reason.COOLING_DOWN, 500, 500),
]


def live(mode: str = "live") -> Live:
    """Return what a process shows after `TURNS`."""
    about = {"version": "1.2", "mode": mode, "upstream": "https://api.example/v1"}
    made = Live(about, lambda: 0.0, lambda: NOW)
    made.in_flight = lambda: 3
    for conversation, how, reason, bytes_in, bytes_up in TURNS:
        made.turn_finished(
            TurnFacts(
                "t", "who", "12345678", how, reason, 200, bytes_in, bytes_up, 0.0, 1.0,
                first_event_s=0.25, overhead_s=0.001, model=f"model-{conversation}",
                previous=f"r{conversation}", response=f"r{conversation}",
                would=Would(DELTA, Reason.CONTINUED, 9, "right") if mode == "shadow" else None,
            )
        )  # fmt: skip
    return made


def test_says_what_the_page_says():
    """Sums, steps, conversations with the reason of the last full send, connections, troubles."""
    shown = live()
    shown.connections = lambda: [ConnectionFacts(7, "idle", "12345678", 61, 2900, 5)]
    text = "\n".join(draw(shown.snapshot(), width=120, height=None))

    assert "Turnwire 1.2  ready, for 0 s  https://api.example/v1" in text
    assert re.search(r"saved +2\.0 MB  100% of 2\.0 MB from agents", text)
    assert re.search(r"deltas +25%  1 of 4 turns; 2 in full, 1 over HTTP, 3 now", text)
    assert re.search(r"from agents +\u2588\n", text)
    assert re.search(rf"1 model-1 +3 +1 +100%  F=F +{Reason.CHANGED_TOOLS.text}", text)
    assert re.search(rf"2 model-2 +1 +0 +0%  H +{Reason.COOLING_DOWN.text}", text)
    assert re.search(r"7 +idle +5 +1 min +48 min", text)
    assert re.search(rf"1 fallback +{Reason.COOLING_DOWN.text}", text)


def test_says_that_it_is_shadow_mode():
    """The sums are then those that would have been, with the verdicts."""
    text = "\n".join(draw(live("shadow").snapshot(), width=120, height=None))

    assert "what would have been" in text
    assert "4 right" in text


@pytest.mark.parametrize(("width", "height"), [(40, 10), (80, 24), (200, 60)])
def test_fits_the_terminal(width, height):
    """No line is too long and no screen too low, colours not counted."""
    lines = draw(live().snapshot(), width=width, height=height, colour=True)

    assert len(lines) <= height
    assert max(len(re.sub("\x1b\\[[0-9;]*m", "", line)) for line in lines) <= width


class Terminal(io.StringIO):
    """Output that says it is a terminal."""

    def isatty(self) -> bool:
        """Say so."""
        return True


async def test_shows_a_running_proxy(capsys, monkeypatch):
    """Once on request; on a terminal until Ctrl-C, after which the screen is given back."""
    async with stack() as s:
        await play(s.agent(), [], user("[calls=0] A secret prompt."))
        port = int(s.proxy.admin_url.rpartition(":")[2])
        show = top.main
        once = await asyncio.to_thread(show, "127.0.0.1", port, once=True, interval_s=1)
        printed = capsys.readouterr().out

        rests = iter([None, KeyboardInterrupt])

        def rest(_seconds: float) -> None:
            if (stop := next(rests)) is not None:
                raise stop

        monkeypatch.setattr(top.time, "sleep", rest)
        terminal = Terminal()
        ended = await asyncio.to_thread(
            show, "127.0.0.1", port, once=False, interval_s=1, out=terminal
        )

    assert (once, ended) == (0, 0)
    assert ended == 0
    assert "0 of 1 turns" in printed
    assert "secret" not in printed
    assert terminal.getvalue().count("Turnwire") == 2
    assert terminal.getvalue().startswith("\x1b[?1049h")
    assert terminal.getvalue().endswith("\x1b[?1049l\x1b[?25h")


async def test_says_that_none_is_running(capsys, closed_port):
    """Status 1 and one sentence."""
    assert top.main("127.0.0.1", closed_port, once=True, interval_s=1) == 1
    assert "is it running?" in capsys.readouterr().err
