"""
What the checks of deploy/ share: every set of manifests, rendered once, and the tools.

A tool that is missing skips its checks, except in CI, where it fails them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DEPLOY = Path(__file__).parents[1]
ROOT = DEPLOY.parent
CHART = DEPLOY / "helm" / "turnwire"
VALUES = sorted((Path(__file__).parent / "values").glob("*.yaml"))
OVERLAYS = sorted(path.name for path in (DEPLOY / "kustomize" / "overlays").iterdir())
SETS = [f"helm:{path.stem}" for path in VALUES] + [f"kustomize:{name}" for name in OVERLAYS]

Manifest = dict[str, Any]


def missing(what: str) -> Any:
    """Skip the test for want of a tool; fail it in CI."""
    if os.environ.get("CI"):
        pytest.fail(f"{what} is not installed")
    pytest.skip(f"{what} is not installed: pip install -r deploy/tests/requirements.txt")


def module(name: str) -> Any:
    """Import a module that only these tests need."""
    try:
        return __import__(name)
    except ImportError:
        return missing(name)


def program(name: str) -> str:
    """Return the path of a program: the one that $NAME names, a wheel's, or the system's."""
    beside = Path(sys.executable).parent / name
    found = os.environ.get(name.upper()) or (str(beside) if beside.exists() else shutil.which(name))
    return found or missing(name)


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program; its output is in the failure."""
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )
    assert result.returncode == 0, f"{command}:\n{result.stdout}{result.stderr}"
    return result


@dataclass(frozen=True)
class Rendered:
    """A set of manifests, as a cluster would get it."""

    name: str
    manifests: list[Manifest]

    def of(self, kind: str) -> list[Manifest]:
        """Return those of a kind."""
        return [each for each in self.manifests if each["kind"] == kind]

    def pods(self) -> list[tuple[Manifest, Manifest]]:
        """Return every object that makes pods, and its pod template (or itself)."""
        pairs = [
            (each, each["spec"].get("template", {})) for each in self.manifests if "spec" in each
        ]
        makers = [(each, pod) for each, pod in pairs if "spec" in pod]
        return makers + [(each, each) for each in self.of("Pod")]

    def ours(self) -> list[tuple[Manifest, Manifest]]:
        """Return every pod spec that runs `turnwire serve`, and the container that does."""
        return [
            (pod["spec"], container)
            for _, pod in self.pods()
            for container in containers(pod["spec"])
            if container.get("args") == ["serve"]
        ]

    def environment(self, container: Manifest) -> dict[str, str]:
        """Return the environment that a container gets from its manifest and its ConfigMaps."""
        maps = {each["metadata"]["name"]: each["data"] for each in self.of("ConfigMap")}
        given: dict[str, str] = {}
        for source in container.get("envFrom", []):
            if "configMapRef" in source:
                given |= maps[source["configMapRef"]["name"]]
        return given | {each["name"]: each["value"] for each in container.get("env", [])}


def containers(spec: Manifest) -> list[Manifest]:
    """Return all containers of a pod, those of its start first."""
    return [*spec.get("initContainers", []), *spec["containers"]]


def render_chart(values: Manifest, name: str = "demo") -> list[Manifest]:
    """Render the chart as `helm template` does."""
    helm, yaml = module("helm_python"), module("yaml")
    with helm.Chart.load(str(CHART)) as chart:
        files = chart.render(values, name=name, namespace="agents")
    texts = [text for path, text in files.items() if path.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


_rendered: dict[str, Rendered] = {}


def rendered(name: str) -> Rendered:
    """Return a set of manifests by its name in `SETS`, rendered once."""
    if name not in _rendered:
        _rendered[name] = Rendered(name, _render(name))
    return _rendered[name]


def _render(name: str) -> list[Manifest]:
    yaml = module("yaml")
    source, _, which = name.partition(":")
    if source == "kustomize":
        overlay = DEPLOY / "kustomize" / "overlays" / which
        text = run(program("kubectl"), "kustomize", overlay).stdout
        return [each for each in yaml.safe_load_all(text) if each]
    values = yaml.safe_load((Path(__file__).parent / "values" / f"{which}.yaml").read_text())
    return render_chart(values, "a" * 53 if which == "long-names" else "demo")
