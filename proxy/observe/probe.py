"""
The question that containers ask: is it ready?

An image without a shell has no curl, and a health check that starts a program every few seconds
should start little: this asks the admin listener with the standard library alone, past any proxy
that the environment names.
"""

from __future__ import annotations

import http.client
import time
from dataclasses import dataclass
from typing import Final

BETWEEN_QUESTIONS_S: Final = 0.1

# A listener on every address is reached by the loopback of its kind.
_REACHED_AT: Final = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104  a name


@dataclass(frozen=True, slots=True)
class Answer:
    """What a probe said: whether all is well, and in a few words what was heard."""

    ok: bool
    text: str


def reached_at(host: str) -> str:
    """Return the address by which a listener on `host` is reached from this machine."""
    return _REACHED_AT.get(host, host)


def ask(host: str, port: int, path: str, timeout_s: float) -> Answer:
    """
    Ask the admin listener at `host` and `port` for `path`; never raises for what it meets.

    Any status but 200 is a no, and so is silence for `timeout_s`.
    """
    connection = http.client.HTTPConnection(reached_at(host), port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        text = reply.read(200).decode("utf-8", "replace").strip()
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return Answer(False, f"no answer from {host} port {port}: {reason.lower()}")
    finally:
        connection.close()
    return Answer(reply.status == http.client.OK, text)


def ask_until(host: str, port: int, path: str, timeout_s: float, wait_s: float) -> Answer:
    """Ask again and again until the answer is yes or `wait_s` have passed; the last answer."""
    deadline = time.monotonic() + wait_s
    while not (answer := ask(host, port, path, timeout_s)).ok and time.monotonic() < deadline:
        time.sleep(BETWEEN_QUESTIONS_S)
    return answer
