"""The image, and what runs it on one machine: compose, systemd, launchd."""

from __future__ import annotations

import fnmatch
import plistlib
import re
import shutil
import tomllib

import pytest

from deploy.tests.rendering import DEPLOY, ROOT, module, program, run
from proxy.config import MIB, Config, load

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_hadolint_has_nothing_to_say():
    """Without an exception."""
    assert "hadolint ignore" not in DOCKERFILE
    assert run(program("hadolint"), ROOT / "Dockerfile").stdout == ""


def test_the_image_is_that_of_the_project():
    """Its version is the package's, and all that it copies is there and let into the build."""
    lines = (ROOT / ".dockerignore").read_text().split()
    allowed = [line[1:] for line in lines if line.startswith("!")]
    copied = [
        word
        for line in re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
        for word in line.split()
    ]

    assert f"ARG VERSION={VERSION}\n" in DOCKERFILE
    assert len(copied) >= 6
    for name in copied:
        assert (ROOT / name).exists()
        assert any(fnmatch.fnmatchcase(name, pattern) for pattern in allowed), name


def test_both_stages_are_of_one_python_and_one_debian():
    """What the first compiles, the second runs: 3.13 is that of Debian 13."""
    build, runtime = re.findall(r"^ARG \w+_IMAGE=(\S+)$", DOCKERFILE, re.MULTILINE)

    assert build == "python:3.13-slim-trixie"
    assert runtime == "gcr.io/distroless/python3-debian13:nonroot"
    assert set(re.findall(r"python(3\.\d+)\b", DOCKERFILE)) == {"3.13"}


def test_the_image_needs_no_shell_and_no_root():
    """Every command of the last stage is a list, and the user is a number."""
    last = DOCKERFILE.rpartition("\nFROM ")[2]

    assert not re.search(r"^RUN\b", last, re.MULTILINE)
    assert "USER 65532:65532" in last
    for word in ("CMD", "ENTRYPOINT"):
        for command in re.findall(rf"\b{word} (.*)$", last, re.MULTILINE):
            assert command.startswith("[")


def test_compose_adds_up():
    """Published on loopback alone, read-only, and stopped later than it has drained."""
    yaml = module("yaml")
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    ours, agent = services["turnwire"], services["agent"]
    default = re.compile(r"\$\{\w+:-(.*)\}")
    environment = {name: default.sub(r"\1", value) for name, value in ours["environment"].items()}
    config = load({}, environment, None).config

    held = config.chains.max_bytes + 2 * config.limits.max_inflight_body_bytes
    assert int(ours["mem_limit"].removesuffix("m")) * MIB >= held + 256 * MIB
    assert ours["image"] == f"turnwire:{VERSION}"
    assert all(port.startswith("127.0.0.1:") for port in ours["ports"])
    assert (ours["read_only"], ours["cap_drop"], ours["user"]) == (True, ["ALL"], "65532:65532")
    assert int(ours["stop_grace_period"].removesuffix("s")) > config.shutdown.drain_timeout_s + 5
    assert (ROOT / "deploy" / ours["build"]["context"] / "Dockerfile").resolve().exists()
    assert agent["environment"]["OPENAI_BASE_URL"] == f"http://turnwire:{config.port}/v1"


def directives(name: str) -> dict[str, str]:
    """Return the directives of a systemd file; of those that repeat, the last."""
    lines = (DEPLOY / "systemd" / name).read_text().splitlines()
    pairs = [line.split("=", 1) for line in lines if "=" in line and not line.startswith("#")]
    return dict(pairs)


def test_the_unit_adds_up():
    """It waits longer than the drain, and does not restart what has a mistake in its settings."""
    unit = directives("turnwire.service")

    assert int(unit["TimeoutStopSec"]) > Config().shutdown.drain_timeout_s + 5
    assert unit["RestartPreventExitStatus"] == "64"
    assert unit["NoNewPrivileges"] == "yes"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here")
def test_systemd_takes_the_unit(tmp_path, monkeypatch):
    """`systemd-analyze verify` finds nothing, with the sandbox and without."""
    binary = tmp_path / ".local" / "bin" / "turnwire"
    binary.parent.mkdir(parents=True)
    binary.symlink_to("/bin/true")
    (tmp_path / "turnwire.service.d").mkdir()
    shutil.copy(DEPLOY / "systemd" / "turnwire.service", tmp_path)
    shutil.copy(DEPLOY / "systemd" / "sandbox.conf", tmp_path / "turnwire.service.d")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    for unit in (DEPLOY / "systemd" / "turnwire.service", tmp_path / "turnwire.service"):
        result = run("systemd-analyze", "--user", "verify", unit)
        assert (result.stdout, result.stderr) == ("", "")


def test_the_agent_of_launchd_adds_up():
    """It parses, waits longer than the drain, and is started again only if it failed."""
    agent = plistlib.loads((DEPLOY / "launchd" / "turnwire.plist").read_bytes())

    assert agent["ExitTimeOut"] > Config().shutdown.drain_timeout_s + 5
    assert agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["ProgramArguments"][:2] == ["/bin/sh", "-c"]
    run("/bin/sh", "-n", "-c", agent["ProgramArguments"][2])
