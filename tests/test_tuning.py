"""Tuning of the process: on by default, switched off by a setting, and never in the way."""

from __future__ import annotations

import platform

import pytest

from proxy import app
from proxy.config import Config, TuningConfig


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
def test_glibc_takes_the_values():
    """`mallopt` refuses what is out of its range."""
    assert app.keep_freed_memory()


def test_another_malloc_is_left_alone(monkeypatch):
    """Where the library is not glibc nothing is called."""
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(app, "ctypes", None)

    assert not app.keep_freed_memory()


@pytest.mark.parametrize("switch", [True, False])
def test_the_setting_decides(switch, monkeypatch):
    """It is done before serving, or not at all."""
    done = []

    async def serve(_config):
        done.append("serve")
        return 0

    monkeypatch.setattr(app, "keep_freed_memory", lambda: done.append("malloc"))
    monkeypatch.setattr(app.logging, "configure", lambda *_: None)
    monkeypatch.setattr(app, "serve", serve)

    assert app.run(Config(tuning=TuningConfig(malloc=switch))) == 0
    assert done == (["malloc", "serve"] if switch else ["serve"])
