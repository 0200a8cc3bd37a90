"""
A network of its own: loopback and nothing else, for the run and all that it starts.

Clients have telemetry, update checks and model lists of their own. Drivers switch them off; where
the system has `unshare`, the kernel makes sure. The process namespace ends with the run, and with
it every server that a client left behind.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys

_MARK = "CLIENTS_ISOLATED"
_SIOCSIFFLAGS = 0x8914
_UP_AND_RUNNING = 0x1 | 0x40
_NAMESPACES = ("--net", "--pid", "--fork", "--kill-child", "--mount-proc")


def prefix() -> list[str] | None:
    """The command to put before another to isolate it, or None where the system has no such."""
    if shutil.which("unshare") is None:
        return None
    for user in ([], ["--map-root-user"]):
        command = ["unshare", *user, *_NAMESPACES, "--"]
        probe = subprocess.run([*command, "true"], capture_output=True, check=False)
        if probe.returncode == 0:
            return command
    return None


def is_isolated() -> bool:
    """Whether this process was started in a network of its own."""
    return os.environ.get(_MARK) == "1"


def run_isolated(arguments: list[str]) -> int:
    """Run this Python with arguments in a network of its own; return its exit status."""
    command = [*(prefix() or []), sys.executable, *arguments]
    return subprocess.run(command, env={**os.environ, _MARK: "1"}, check=False).returncode


def raise_loopback() -> bool:
    """Switch loopback on in a fresh network; False where there are other interfaces as well."""
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh", b"lo", _UP_AND_RUNNING)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)
    return True
