"""The locks from which the image is built: complete, with hashes, and in step with the project."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WANTED = {
    "requirements.lock": [
        *PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"]["otel"],
    ],
    "requirements-build.lock": PROJECT["build-system"]["requires"],
}
A_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}\b")


def locked(name: str) -> dict[str, tuple[Requirement, int]]:
    """Return what a lock pins, by name, each with its number of hashes."""
    text = (ROOT / name).read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    pins = {}
    for line in lines:
        requirement = Requirement(line.partition("--hash")[0])
        pins[canonicalize_name(requirement.name)] = requirement, len(A_HASH.findall(line))
    return pins


@pytest.mark.parametrize("name", WANTED)
def test_every_direct_dependency_is_pinned_as_the_project_wants_it(name):
    """A floor that was raised in pyproject.toml must be raised in the lock too."""
    pins = locked(name)

    for wanted in map(Requirement, WANTED[name]):
        pin, _ = pins[canonicalize_name(wanted.name)]
        (version,) = pin.specifier
        assert wanted.specifier.contains(version.version), f"{wanted} is not {pin}"
        assert (wanted.marker is None) == (pin.marker is None)


@pytest.mark.parametrize("name", WANTED)
def test_every_pin_is_exact_and_has_hashes(name):
    """No range, no address, and at least one hash each: pip refuses anything else."""
    for pin, hashes in locked(name).values():
        (version,) = pin.specifier
        assert (version.operator, pin.url) == ("==", None)
        assert "*" not in version.version
        assert hashes >= 1, f"{pin} has no hash"
