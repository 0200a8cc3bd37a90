"""
`turnwire top`: the page of the admin listener, in a terminal.

It reads the same data (`/live`) once a second and draws them anew; nothing is kept here. On
something that is no terminal, and with `--once`, it prints them one time. The drawing is in `view`
and is pure.
"""

from __future__ import annotations

import http.client
import json
import shutil
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from proxy.observe.probe import reached_at
from proxy.top.view import draw

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TextIO

OK, FAILED = 0, 1
_TIMEOUT_S: Final = 3.0
_TOP_LEFT: Final = "\x1b[H"
_REST_OF_LINE: Final = "\x1b[K"
_REST_OF_SCREEN: Final = "\x1b[J"
_OWN_SCREEN: Final = "\x1b[?1049h\x1b[?25l"
_FORMER_SCREEN: Final = "\x1b[?1049l\x1b[?25h"


def main(host: str, port: int, *, once: bool, interval_s: float, out: TextIO | None = None) -> int:
    """
    Show what the Turnwire says whose admin listener is at `host` and `port`, until Ctrl-C.

    Returns 1 if there is none. `out` is by default the standard output.
    """
    out = out or sys.stdout
    told = fetch(host, port)
    if isinstance(told, str):
        sys.stderr.write(f"turnwire: {told}; is it running?\n")
        return FAILED
    if once or not out.isatty():
        out.write("\n".join(draw(told, width=100, height=None)) + "\n")
        return OK
    out.write(_OWN_SCREEN)
    try:
        while True:
            _paint(out, told)
            time.sleep(interval_s)
            told = fetch(host, port)
    except KeyboardInterrupt:
        return OK
    finally:
        out.write(_FORMER_SCREEN)
        out.flush()


def _paint(
    out: TextIO,
    told: dict[str, Any] | str,
    size: Callable[[], tuple[int, int]] = shutil.get_terminal_size,
) -> None:
    """Draw over what is there, so that nothing flickers."""
    width, height = size()
    lines = [told] if isinstance(told, str) else draw(told, width=width, height=height, colour=True)
    text = f"{_REST_OF_LINE}\n".join(lines)
    out.write(f"{_TOP_LEFT}{text}{_REST_OF_LINE}{_REST_OF_SCREEN}")
    out.flush()


def fetch(host: str, port: int) -> dict[str, Any] | str:
    """Return what the page is told, or why there is nothing to be had."""
    connection = http.client.HTTPConnection(reached_at(host), port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/live", headers={"Accept": "application/json"})
        reply = connection.getresponse()
        body = reply.read()
        told = json.loads(body) if reply.status == http.client.OK else None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        return f"no answer from {host} port {port}: {reason.lower()}"
    finally:
        connection.close()
    if not isinstance(told, dict):
        return f"{host} port {port} does not answer as a Turnwire does"
    return told
