"""
Asks a URL again and again, until its standard input ends; then writes how long each answer took.

A program of its own: what measures a busy process must not be busy with something else.

    python poller.py URL SECONDS_BETWEEN
"""

from __future__ import annotations

import http.client
import json
import select
import sys
import time
from urllib.parse import urlsplit


def main(url: str, every_s: str) -> None:
    """Ask until told to end."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    took: list[float] = []
    while not select.select([sys.stdin], [], [], float(every_s))[0]:
        began = time.monotonic()
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
        connection.request("GET", parts.path)
        status = connection.getresponse().status
        connection.close()
        took.append(time.monotonic() - began if status == 200 else float("inf"))
    print(json.dumps(took))  # noqa: T201  that is what it is for


if __name__ == "__main__":
    main(*sys.argv[1:])
