"""
A headless Chromium for tests, by the protocol of its developer tools and nothing else.

`find` tells where one is installed (the environment variable CHROMIUM names another); tests that
need one are skipped where there is none. A `Tab` keeps what went wrong in its page: exceptions,
errors on the console, refused or failed requests.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from websockets.asyncio.client import ClientConnection

NAMES = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome-headless-shell",
)
DEADLINE_S = 20.0


def find() -> str | None:
    """Return the path of a Chromium, None if there is none."""
    named = os.environ.get("CHROMIUM")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """One page. `troubles` is what went wrong in it."""

    def __init__(self, connection: ClientConnection) -> None:
        self.troubles: list[str] = []
        self._connection = connection
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def listen(self) -> None:
        """Take what the browser says, until it ends."""
        with contextlib.suppress(ConnectionClosed):
            async for message in self._connection:
                said = json.loads(message)
                if (waiting := self._waiting.pop(said.get("id", 0), None)) is not None:
                    waiting.set_result(said)
                else:
                    self._note(said["method"], said["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.troubles.append(json.dumps(params["exceptionDetails"])[:500])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.troubles.append(json.dumps(params["args"])[:500])
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.troubles.append(params["entry"]["text"])
            case "Network.loadingFailed" if not params.get("canceled"):
                self.troubles.append(params["errorText"])

    async def command(self, method: str, **params: Any) -> dict[str, Any]:
        """Tell the browser something; return its answer."""
        number = next(self._ids)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
        async with asyncio.timeout(DEADLINE_S):
            said = await self._waiting[number]
        assert "error" not in said, said
        return said["result"]

    async def open(self, url: str) -> None:
        """Go to a page, with everything that can go wrong on it being told."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.command(f"{domain}.enable")
        await self.command("Page.navigate", url=url)
        await self.wait_for(f"location.href === '{url}' && document.readyState === 'complete'")

    async def look(self, *, width: int, dark: bool, height: int = 900) -> None:
        """Give the page a width, and the scheme of colours that its reader wants."""
        await self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 500,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.command("Emulation.setEmulatedMedia", features=[scheme])

    async def ask(self, expression: str) -> Any:
        """Evaluate JavaScript in the page; return its value."""
        said = await self.command(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    async def wait_for(self, expression: str) -> Any:
        """Wait until an expression is true in the page; return its value."""
        async with asyncio.timeout(DEADLINE_S):
            while not (value := await self.ask(expression)):  # noqa: ASYNC110  has no event
                await asyncio.sleep(0.05)
        return value

    async def press(self, key: str, code: int) -> None:
        """Press a key, as a person would."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.command(
                "Input.dispatchKeyEvent",
                type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text,
            )  # fmt: skip

    async def screenshot(self, path: Path) -> None:
        """Write a picture of what is in view."""
        said = await self.command("Page.captureScreenshot")
        path.write_bytes(base64.b64decode(said["data"]))  # noqa: ASYNC240  nothing else runs


@contextlib.asynccontextmanager
async def tab(chromium: str) -> AsyncIterator[Tab]:
    """Run a browser with one empty page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--disable-background-networking", "--hide-scrollbars",
            "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            async with asyncio.timeout(DEADLINE_S):
                url = await _page_of(Path(profile))
            async with connect(url, max_size=None, proxy=None, close_timeout=0.2) as connection:
                page = Tab(connection)
                listening = asyncio.get_running_loop().create_task(page.listen())
                yield page
                listening.cancel()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all its helpers
            await process.wait()


async def _page_of(profile: Path) -> str:
    """Return where the tools of the browser's first page listen; it says so in its profile."""
    told = profile / "DevToolsActivePort"
    while not (told.exists() and len(lines := told.read_text().split()) == 2):  # noqa: ASYNC110  a file
        await asyncio.sleep(0.02)
    port, path = lines
    url = f"ws://127.0.0.1:{port}{path}"
    async with connect(url, max_size=None, proxy=None, close_timeout=0.2) as browser:
        await browser.send('{"id":1,"method":"Target.getTargets"}')
        targets = json.loads(await browser.recv())["result"]["targetInfos"]
    page = next(target for target in targets if target["type"] == "page")
    return f"ws://127.0.0.1:{port}/devtools/page/{page['targetId']}"
