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
    monkeypatch.setattr(app, "allow_descriptors", lambda: 0)

    assert app.run(Config(tuning=TuningConfig(malloc=switch))) == 0
    assert done == (["malloc", "serve"] if switch else ["serve"])


def test_descriptors_are_those_that_the_system_allows(monkeypatch):
    """The soft limit is raised to the hard one; what can't be raised is left as it is."""
    limits = [1024, 4096]

    def set_limits(_kind, wanted):
        if wanted[0] > 10_000:
            raise ValueError
        limits[:] = wanted

    monkeypatch.setattr(app.resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(app.resource, "setrlimit", set_limits)

    assert app.allow_descriptors() == 4096
    assert limits == [4096, 4096]
    limits[:] = [256, app.resource.RLIM_INFINITY]
    assert app.allow_descriptors() == 256
    monkeypatch.setattr(app, "resource", None)
    assert app.allow_descriptors() == 0
