"""What moves events runs on both event loops: uvloop is the default, asyncio the spare."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

ON_UVLOOP = ("test_client.py", "test_listener.py", "test_stream.py")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Name the loops that each test of this folder is run on."""
    factories = {"asyncio": asyncio.new_event_loop}
    if importlib.util.find_spec("uvloop") and item.path.name in ON_UVLOOP:
        uvloop = {"uvloop": importlib.import_module("uvloop").new_event_loop}
        # What clients do to us on the spare loop, the tests of the whole show by the thousand.
        return uvloop if item.path.name == "test_client.py" else factories | uvloop
    return factories
