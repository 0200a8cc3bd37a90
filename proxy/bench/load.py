"""
The two ends of every measurement: an upstream and clients that are faster than any proxy.

They are small programs in C, compiled at first use into a cache folder. Where there is no compiler
`fallback` does the same in Python on bare asyncio protocols, several times slower; the report says
which of the two it was, because with the fallback bursts measure the load as well.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy.bench.bodies import make_templates
from proxy.bench.children import (
    START_TIMEOUT_S,
    BenchFailed,
    Child,
    Role,
    python_command,
    python_environment,
)

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from proxy.bench.bodies import Parts

SOURCES = Path(__file__).parent / "c"
_COMPILE_TIMEOUT_S = 60
_TLS_OPTIONS = ("-DWITH_TLS", "-lssl", "-lcrypto")


@dataclass(frozen=True, slots=True)
class Programs:
    """The commands of the load programs, and what the report says of them."""

    upstream: tuple[str, ...]
    client: tuple[str, ...]
    description: str


def find_programs(*, use_c: bool = True, tls: bool = False) -> Programs:
    """
    Compile the programs in C if that is needed and possible, else take those in Python.

    With `tls` the upstream speaks it: in C where the headers of OpenSSL are installed.
    """
    compiler = shutil.which(os.environ.get("CC", "cc")) if use_c else None
    if compiler:
        try:
            folder = _compiled(compiler, _TLS_OPTIONS if tls else ())
        except (OSError, subprocess.SubprocessError):
            pass  # a compiler for another system, or no folder to write to
        else:
            upstream, client = str(folder / "upstream"), str(folder / "client")
            return Programs((upstream,), (client,), f"C, compiled with {compiler}")
    return Programs(
        tuple(python_command("proxy.bench.fallback", "upstream")),
        tuple(python_command("proxy.bench.fallback", "client")),
        f"Python (no C compiler{' or OpenSSL' * tls}): bursts measure the load as well",
    )


def _compiled(compiler: str, options: tuple[str, ...]) -> Path:
    """Return the folder with the programs; it is named after their sources and the options."""
    sources = sorted(SOURCES.glob("*.[ch]"))
    made_of = [source.read_bytes() for source in sources] + [" ".join(options).encode()]
    digest = hashlib.sha256(b"".join(made_of)).hexdigest()
    folder = _cache_folder() / f"load-{digest[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("upstream", "client"):
        if not (folder / name).exists():
            unfinished = folder / f"{name}.{os.getpid()}"
            source = str(SOURCES / f"{name}.c")
            command = [compiler, "-O2", "-o", str(unfinished), source, *options]
            subprocess.run(  # noqa: S603  the compiler, on sources of ours
                command, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S
            )
            unfinished.replace(folder / name)
    return folder


def _cache_folder() -> Path:
    chosen = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(chosen) if chosen else Path.home() / ".cache") / "turnwire"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir()) / f"turnwire-{os.getuid()}"
    return folder


@dataclass(frozen=True, slots=True)
class Bench:
    """
    What all measurements of a run share. `folder` is scratch space of this run.

    With `certificates` every upstream listens on a port behind TLS as well.
    """

    programs: Programs
    folder: Path
    realtime: bool = False
    certificates: Certificates | None = None

    def start(self, command: tuple[str, ...] | list[str], role: Role) -> Child:
        """Start a process of the benchmark."""
        errors = self.folder / f"{role.name.lower()}.log"
        env = python_environment()
        if self.certificates is not None:
            env["SSL_CERT_FILE"] = str(self.certificates.authority)
        return Child(command, role, errors, realtime=self.realtime, env=env)


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files: who vouches, and the upstream's key with its chain."""

    authority: Path
    upstream: Path


def make_certificates(folder: Path) -> Certificates:
    """Make an authority for this run, and a certificate of it. Raises ImportError."""
    import trustme  # noqa: PLC0415  nothing else needs it

    authority = trustme.CA()
    made = Certificates(folder / "authority.pem", folder / "upstream.pem")
    authority.cert_pem.write_to_path(made.authority)
    authority.issue_cert("127.0.0.1", "localhost").private_key_and_cert_chain_pem.write_to_path(
        made.upstream
    )
    return made


class Upstream:
    """
    The upstream. A context manager: entered, it listens on `port`.

    `tls_port` is 0 in a run without certificates.
    """

    def __init__(self, bench: Bench) -> None:
        templates = bench.folder / "templates"
        if not templates.exists():
            templates.write_bytes(make_templates())
        command = [*bench.programs.upstream, str(templates)]
        if bench.certificates is not None:
            command.append(str(bench.certificates.upstream))
        self._child = bench.start(command, Role.UPSTREAM)
        try:
            self.port = int(self._child.read_line(START_TIMEOUT_S))
            secured = bench.certificates is not None
            self.tls_port = int(self._child.read_line(START_TIMEOUT_S)) if secured else 0
        except BaseException:
            self._child.end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._child.end()

    @property
    def origin(self) -> str:
        """Where it listens, as a URL without a path."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def tls_origin(self) -> str:
        """Where it listens behind TLS."""
        assert self.tls_port, "the run has no certificates"
        return f"https://127.0.0.1:{self.tls_port}"

    def plan(self, events: int = 3, rate: int = 0) -> None:
        """Set what turns are like: how many events, how many a second (0: a burst)."""
        self._get(f"/plan?events={events}&rate={rate}")

    def stats(self) -> dict[str, int]:
        """Return what it has received: bytes of payload, turns, deltas, strays, upgrades."""
        found: dict[str, int] = self._get("/stats")
        if found["strays"] or found["overlaps"]:
            raise BenchFailed(f"the upstream saw a wrong previous_response_id: {found}")
        return found

    def _get(self, path: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException):
            raise self._child.failure("does not answer") from None
        finally:
            connection.close()


@dataclass(frozen=True, slots=True)
class Turns:
    """What clients saw of a few turns. Times are in microseconds, by rank: p50, p99, ..."""

    turns: int
    events: int
    deltas: int
    wall_s: float
    body_bytes: int
    turn_us: dict[str, float]
    first_us: dict[str, float]
    event_us: dict[str, float]


class Client:
    """Clients that replay their histories; see `c/client.c`. A context manager."""

    def __init__(
        self, bench: Bench, port: int, parts: Parts, *, streams: int = 1, streams_per_key: int = 16
    ) -> None:
        folder = bench.folder / f"parts-{len(parts.prefix)}{'-chat' if parts.is_chat else ''}"
        if not folder.exists():
            parts.write(folder)
        arguments = [str(port), str(streams), str(streams_per_key), str(folder)]
        arguments += ["chat"] if parts.is_chat else []
        self._child = bench.start([*bench.programs.client, *arguments], Role.CLIENT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._child.end()

    def begin(self, timeout_s: float = 60) -> Turns:
        """Let every stream begin a new conversation."""
        self._child.say("new")
        return self.result(timeout_s)

    def follow_up(self, turns: int, *, skip: int = 0, timeout_s: float = 60) -> Turns:
        """Play follow-up turns on every stream; `skip` events of each are not timed."""
        self.start_follow_up(turns, skip=skip)
        return self.result(timeout_s)

    def start_follow_up(self, turns: int, *, skip: int = 0) -> None:
        """Begin follow-up turns; `result` waits for their end."""
        self._child.say(f"turns {turns} {skip}")

    def result(self, timeout_s: float) -> Turns:
        """Return what became of the turns under way. Raises BenchFailed if they failed."""
        return Turns(**json.loads(self._child.read_line(timeout_s)))
