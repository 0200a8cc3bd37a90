"""What Turnwire is made of, and what `deploy/SECURITY.md` says of it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import aiohttp
import pytest
import websockets
from packaging.requirements import Requirement
from packaging.version import Version

from proxy.downstream.deadlines import READS_STRICTLY

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SECURITY = (ROOT / "deploy" / "SECURITY.md").read_text()
# Older ones have holes that matter here: request smuggling and bombs; serving under uvloop;
# closing a descriptor twice, the second time somebody else's.
FLOORS = {"aiohttp": "3.14.5", "websockets": "17.0.1", "uvloop": "0.23"}


@pytest.mark.parametrize("name", FLOORS)
def test_floors_that_matter_do_not_sink(name: str):
    """No version below the floor may be installed, and the floor itself may."""
    (wanted,) = [each for each in map(Requirement, PROJECT["dependencies"]) if each.name == name]
    (floor,) = [each for each in wanted.specifier if each.operator == ">="]

    assert Version(floor.version) >= Version(FLOORS[name])


def test_what_runs_here_is_what_is_promised():
    """The tests run with versions that the floors allow, and with the strict parser."""
    assert Version(aiohttp.__version__) >= Version(FLOORS["aiohttp"])
    assert Version(websockets.__version__) >= Version(FLOORS["websockets"])
    assert READS_STRICTLY


def test_every_promise_names_its_proof():
    """No row of the table of promises is without a test."""
    table = SECURITY.split("## What is promised")[1].split("Not promised")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and "---" not in line][1:]

    assert len(rows) >= 15
    for row in rows:
        promise, against, proofs = (cell.strip() for cell in row.strip("| ").split(" | "))
        assert promise
        assert against in ("upstream", "downstream", "both")
        assert "`tests/" in proofs, promise


@pytest.mark.parametrize("proof", sorted(set(re.findall(r"`(tests/\S+?::\w+)`", SECURITY))))
def test_every_test_that_is_named_exists(proof: str):
    """A proof that was renamed or removed is missed here."""
    path, _, name = proof.partition("::")
    text = (ROOT / path).read_text(encoding="utf-8")

    assert re.search(rf"^(async )?def {name}\(", text, re.MULTILINE)


@pytest.mark.parametrize("path", re.findall(r"`((?:deploy|tests)/[\w./-]+\.\w+)`", SECURITY))
def test_every_file_that_is_named_exists(path: str):
    """Names of files are true."""
    assert (ROOT / path).is_file()
