"""
The load balancers' configurations: they name the same headers, and their programs take them.

Whether they keep conversations together is measured by `deploy.gateways.roll`, which takes too long
for every change.
"""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest

from deploy.gateways.roll import REPLICAS, balancers
from deploy.tests.rendering import DEPLOY, module, run

if TYPE_CHECKING:
    from pathlib import Path

HEADERS = [
    "x-session-affinity",
    "thread-id",
    "session-id",
    "session_id",
    "x-session-id",
    "conversation_id",
    "x-litellm-session-id",
]
CHECKS = {
    "nginx": ["-t", "-p", "{folder}/", "-c"],
    "haproxy": ["-c", "-f"],
    "envoy": ["--mode", "validate", "-c"],
}


def in_order(found: list[str]) -> list[str]:
    """Return names once each, in the order in which they first came."""
    return list(dict.fromkeys(found))


def test_all_take_the_same_headers_in_the_same_order():
    """What is the first header of a conversation does not depend on the load balancer."""
    text = {
        name: (DEPLOY / "gateways" / each.file).read_text() for name, each in balancers().items()
    }
    nginx = re.findall(r"\$http_(\w+)", text["nginx"].partition("upstream")[0])
    # nginx has one name for session-id and session_id, which it looks for in that order.
    plain = [name.replace("-", "_") for name in HEADERS]

    assert in_order([each for each in nginx if each != "authorization"]) == in_order(plain)
    assert in_order(re.findall(r"req\.hdr\(([\w-]+)\)", text["haproxy"]))[:-1] == HEADERS
    assert re.findall(r"header_name: ([\w-]+)", text["envoy"])[:-1] == HEADERS
    gateway = module("yaml").safe_load_all((DEPLOY / "gateways/envoy-gateway.yaml").read_text())
    policy = next(each for each in gateway if each["kind"] == "BackendTrafficPolicy")
    named = policy["spec"]["loadBalancer"]["consistentHash"]["headers"]
    assert [each["name"] for each in named] == [*HEADERS, "authorization"]


def test_the_manual_tells_of_every_header():
    """Each is in the table of what clients send."""
    manual = (DEPLOY / "README.md").read_text()

    assert all(f"`{name}`" in manual for name in HEADERS)


@pytest.mark.parametrize("name", CHECKS)
def test_its_program_takes_it(name: str, tmp_path: Path):
    """With the addresses of this machine; where the program is installed."""
    balancer = balancers()[name]
    program = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    text = balancer.configuration()
    file = tmp_path / balancer.file
    file.write_text(text)

    assert "turnwire-0" not in text.replace("server turnwire-0 ", "")
    assert text.count("127.0.0.1") >= REPLICAS
    if program is None:
        pytest.skip(f"{name} is not installed")
    arguments = [each.format(folder=tmp_path) for each in CHECKS[name]]
    run(program, *arguments, file)
