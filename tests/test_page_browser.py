"""
The page in a real browser: live, without an error, at the widths of a desk and of a phone.

Skipped where no Chromium is installed (`apt-get install chromium-headless-shell`, or the path of
one in the environment variable CHROMIUM). With PAGE_SCREENSHOTS=FOLDER the pictures are written
there, for people to look at.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

import browser
import pytest
from harness import play, stack

from proxy.simulator.agent import Transcript, user
from proxy.simulator.faults import Break, End, ErrorReply

if TYPE_CHECKING:
    from browser import Tab
    from harness import Stack

    from proxy.simulator.agent import Agent

CHROMIUM = browser.find()
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: apt-get install chromium-headless-shell"
)
PICTURES = os.environ.get("PAGE_SCREENSHOTS")
ROWS = "document.querySelectorAll('#rows > details').length"
TILES = "[...document.querySelectorAll('.tiles .value')].map((tile) => tile.textContent)"
SUMS = "document.getElementById('tiles').textContent"
ACTIVE = "document.activeElement.id || document.activeElement.className"
WORDS = "a secret prompt"
TAB_KEY, ENTER_KEY = 9, 13


async def ask(agent: Agent, transcript: Transcript, text: str) -> None:
    """Ask something, and answer the tool calls until there are none."""
    transcript.history.append(user(text))
    await agent.advance(transcript)


async def traffic(s: Stack) -> None:
    """Hold a few conversations, in which some things go wrong."""
    for number in range(3):
        agent, transcript = s.agent(model=f"gpt-5.{number}"), Transcript()
        await ask(agent, transcript, f"[calls=3] {WORDS} {'and more ' * 300}")
        if number == 1:
            s.sim.faults.arm(Break(end=End.CLOSE, code=1012))
        await ask(agent, transcript, f"[calls=1] {WORDS}")
    s.sim.faults.arm(ErrorReply(status=429, code="rate_limit_exceeded"))
    await agent.send([*transcript.history, user("[calls=0] Refused.")])


DRAWN = """
[...document.querySelectorAll(".plot canvas")].map((canvas) => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const fits = canvas.clientWidth <= canvas.closest(".chart").clientWidth;
  return fits && pixels.some((value) => value > 0);
})
"""
SETTLED = "new Promise((then) => requestAnimationFrame(() => setTimeout(then, 300)))"


async def check_width(tab: Tab, width: int) -> None:
    """Nothing is wider than the window, and each chart has drawn something that fits its place."""
    assert await tab.ask("document.documentElement.scrollWidth") <= width
    assert await tab.ask(DRAWN) == [True] * 4


async def test_the_page_lives():
    """It shows what was, what happens while it is looked at, and why a turn went in full."""
    async with stack(tolerates=["closing transport"]) as s, browser.tab(CHROMIUM) as tab:
        await tab.look(width=1280, dark=False)
        await tab.open(f"{s.proxy.admin_url}/")
        await tab.wait_for("!document.getElementById('empty').hidden")
        assert s.base_url in await tab.ask("document.getElementById('empty').textContent")

        await traffic(s)
        await tab.wait_for(f"{ROWS} === 3")
        assert await tab.ask("document.getElementById('empty').hidden")
        saved, share, *_ = await tab.ask(TILES)
        assert saved.endswith("kB")
        assert share.endswith("%")
        assert "answered 429" in await tab.ask("document.getElementById('troubles').textContent")

        await tab.ask(
            "document.querySelectorAll('#rows > details').forEach((row) => row.open = true)"
        )
        await tab.wait_for("document.querySelectorAll('ol.turns li').length > 9")
        told = await tab.ask("document.getElementById('rows').textContent")
        assert "no known history is a beginning of this one" in told
        assert "the connection closed before the first event" in told
        assert await tab.ask("document.querySelectorAll('#connections tbody tr').length") >= 3

        for width, dark in itertools.product((1280, 390), (False, True)):
            await tab.look(width=width, dark=dark)
            await tab.ask(
                "new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn, 300)))"
            )
            await check_width(tab, width)
            if PICTURES:
                height = await tab.ask("document.documentElement.scrollHeight")
                await tab.look(width=width, dark=dark, height=height)
                await tab.ask(SETTLED)
                name = f"page-{width}-{'dark' if dark else 'light'}.png"
                await tab.screenshot(Path(PICTURES) / name)

        agent, history = s.agent(model="gpt-6"), []
        await play(agent, history, user("[calls=0] One more."))
        await tab.wait_for(f"{ROWS} === 4")
        text = await tab.ask("document.documentElement.outerHTML")
        assert WORDS not in text
        assert "sk-agent" not in text
        assert tab.troubles == []


async def test_the_page_is_used_by_keyboard():
    """Each thing that can be done is reached with the Tab key and done with Enter."""
    async with stack() as s, browser.tab(CHROMIUM) as tab:
        for number in range(14):
            await play(s.agent(), [], user(f"[calls=0] {number}."))
        await tab.look(width=1280, dark=True)
        await tab.open(f"{s.proxy.admin_url}/")
        await tab.wait_for(f"{ROWS} === 12")

        reached = []
        for _ in range(6):
            await tab.press("Tab", TAB_KEY)
            reached.append(await tab.ask(f"{ACTIVE} || document.activeElement.tagName"))
        assert reached == ["skip", "pause", "SUMMARY", "only-full", "SUMMARY", "SUMMARY"]
        await tab.press("Enter", ENTER_KEY)
        await tab.wait_for("document.querySelectorAll('#rows > details')[1].open")
        await tab.ask("document.getElementById('all').focus()")
        await tab.press("Enter", ENTER_KEY)
        await tab.wait_for(f"{ROWS} === 14")

        await tab.ask("document.getElementById('pause').focus()")
        await tab.press("Enter", ENTER_KEY)
        await tab.wait_for("document.getElementById('state').textContent.includes('paused')")
        await play(s.agent(), [], user("[calls=0] While it is paused."))
        before = await tab.ask(SUMS)
        await tab.press("Enter", ENTER_KEY)
        await tab.wait_for(f"{ROWS} === 15")
        assert await tab.ask(SUMS) != before
        assert tab.troubles == []


async def test_the_page_says_when_the_process_is_gone():
    """A page without its process does not look as if all were well."""
    async with browser.tab(CHROMIUM) as tab:
        async with stack() as s:
            await tab.look(width=390, dark=False)
            await tab.open(f"{s.proxy.admin_url}/")
            await tab.wait_for("document.getElementById('state').textContent === 'ready'")
        await tab.wait_for("document.getElementById('state').className.includes('bad')")
