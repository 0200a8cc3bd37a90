"""README.md says what the program says: generated tables, and commands that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proxy import config

README = Path(__file__).parents[1] / "README.md"


def section(name: str) -> str:
    """Return what stands between the markers of `name`; skip the test if README has none."""
    text = README.read_text(encoding="utf-8") if README.exists() else ""
    match = re.search(f"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", text, re.DOTALL)
    if match is None:
        pytest.skip(f"README.md has no {name} markers")
    return match[1].strip()


def test_the_settings_are_those_of_the_program():
    """The table of settings is what `turnwire config --markdown` prints."""
    assert section("settings") == config.reference_table()


def test_the_metrics_are_those_of_the_program():
    """The table of metrics is made from the metrics themselves."""
    table = section("metrics")
    from proxy.observe import metrics

    assert table == metrics.reference_table().strip()
