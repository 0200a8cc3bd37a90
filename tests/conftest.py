"""What all tests need of the process they run in."""

from __future__ import annotations

import logging
import signal
from typing import TYPE_CHECKING

import pytest
import structlog

if TYPE_CHECKING:
    from collections.abc import Iterator

# A shell starts what it runs in the background with SIGINT ignored, and every program started from
# there ignores it as well; the tests of Ctrl-C need programs that do not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _unchanged_log() -> Iterator[None]:
    """Put the log's settings back, which are the process's: commands set them to their own."""
    settings, root = structlog.get_config(), logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    structlog.configure(**settings)
    root.setLevel(level)
    root.handlers[:] = handlers
