"""
A few real clients in front of Turnwire: the part of the conformance suite that runs with the tests.

They are installed from their registries at first, and come from the cache then.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clients import catalogue
from clients.harness import missing_tool

RUN = Path(__file__).parent / "run.py"


@pytest.mark.timeout(600)
def test_real_clients_have_deltas_and_notice_nothing():
    """Each ends as it does straight, in its own context, with a delta wherever one can be."""
    if why := next(filter(None, map(missing_tool, catalogue.select(["quick"]))), None):
        pytest.skip(why)
    done = subprocess.run(
        [sys.executable, str(RUN), "quick", "--output"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
