"""What moves events runs on both event loops: uvloop is the default, asyncio the spare."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Name the loops that each test of this folder is run on."""
    factories = {"asyncio": asyncio.new_event_loop}
    on_both = item.path.name in ("test_listener.py", "test_stream.py")
    if on_both and importlib.util.find_spec("uvloop"):
        factories["uvloop"] = importlib.import_module("uvloop").new_event_loop
    return factories
