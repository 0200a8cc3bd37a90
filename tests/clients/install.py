"""
Pinned installs of clients, one directory each, in a cache that outlives the run.

`CLIENTS_CACHE_DIR` says where; otherwise it is the user's cache directory. npm clients share
one Node, itself an npm package, since most need a newer one than systems have. Each pip client has
a virtual environment of its own. A file with the pinned packages marks a finished install: other
pins, another install.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from clients.rows import Client, Ecosystem

if TYPE_CHECKING:
    from collections.abc import Iterable

NODE = Client("node24", "Node.js", ("node@24",), Ecosystem.NPM)
INSTALL_TIMEOUT_S = 900
_DONE = "installed.txt"


class InstallFailed(Exception):
    """A client could not be installed; the message ends with what the installer said."""


def cache_dir() -> Path:
    """Where clients are installed."""
    given = os.environ.get("CLIENTS_CACHE_DIR")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "turnwire" / "clients"


def directory(client: Client) -> Path:
    """Where this client is, or will be."""
    return cache_dir() / client.ecosystem.value / client.name


def node_bin() -> Path:
    """The directory of the `node` that runs npm clients."""
    return directory(NODE) / "node_modules" / ".bin"


def is_installed(client: Client) -> bool:
    """Whether the client is there with these very pins."""
    done = directory(client) / _DONE
    return done.is_file() and done.read_text(encoding="utf-8") == _pins(client)


def can_install(ecosystem: Ecosystem) -> bool:
    """Whether this machine has the tool that installs from the ecosystem's registry."""
    return ecosystem is Ecosystem.PIP or shutil.which("npm") is not None


def needed(clients: Iterable[Client]) -> list[Client]:
    """The clients that are missing, with Node before all npm clients; each once."""
    wanted = dict.fromkeys(clients)
    if any(client.ecosystem is Ecosystem.NPM for client in wanted):
        wanted = {NODE: None, **wanted}
    return [client for client in wanted if not is_installed(client)]


def install(client: Client) -> None:
    """
    Install a client, in place of what is there. Raises InstallFailed.

    One at a time, whoever installs: two who miss the same client get it once.
    """
    target = directory(client)
    target.mkdir(parents=True, exist_ok=True)
    with (cache_dir() / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_installed(client):
            return
        (target / _DONE).unlink(missing_ok=True)
        if client.ecosystem is Ecosystem.NPM:
            _install_npm(client, target)
        else:
            _install_pip(client, target)
        (target / _DONE).write_text(_pins(client), encoding="utf-8")


def _pins(client: Client) -> str:
    return "\n".join((*client.packages, ""))


def _install_npm(client: Client, target: Path) -> None:
    manifest = target / "package.json"
    manifest.write_text('{"private":true,"type":"module"}\n', encoding="utf-8")
    options = ["--no-audit", "--no-fund", "--loglevel=error", "--engine-strict=false"]
    _run(["npm", "install", *options, *client.packages], target)


def _install_pip(client: Client, target: Path) -> None:
    python = _python_for(client)
    _run([python, "-m", "venv", "--clear", str(target / "venv")], target)
    pip = [str(target / "venv" / "bin" / "python"), "-m", "pip", "install", "-q"]
    _run([*pip, "--disable-pip-version-check", *client.packages], target)


def _python_for(client: Client) -> str:
    if sys.version_info >= client.python:
        return sys.executable
    for minor in range(client.python[1], 20):
        found = shutil.which(f"python3.{minor}")
        if found and not subprocess.run([found, "-V"], capture_output=True, check=False).returncode:
            return found
    raise InstallFailed(f"needs Python {client.python[0]}.{client.python[1]}")


def _run(command: list[str], directory: Path) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=INSTALL_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallFailed(f"{command[0]}: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-500:]
        raise InstallFailed(f"{' '.join(command[:3])}: exit status {done.returncode}: {said}")
