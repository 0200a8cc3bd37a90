"""
Row P1 behind another proxy: nginx and Turnwire never disagree about where a request ends.

nginx keeps its connections to Turnwire and puts everybody's requests on them. If the two read one
stream differently, what one client hides in its request becomes the next one's. So after each
hostile stream, an honest client asks, and upstream must have seen what nginx sends and no more.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from hostile.cases import CASES, SMUGGLED_TARGET, TEXT
from hostile.edge import Edge
from hostile.ledger import KEY, LAST, Line, answer_to
from proxy.bench.ports import port_to_serve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NGINX = shutil.which("nginx") or shutil.which("/usr/sbin/nginx")
CONFIG = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 64; }}
http {{
  access_log off; client_body_timeout 200ms; client_header_timeout 200ms; keepalive_timeout 5;
  client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream turnwire {{ server 127.0.0.1:{upstream}; keepalive 4; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://turnwire; proxy_http_version 1.1; proxy_request_buffering off;
      proxy_set_header Connection ""; proxy_set_header Host localhost;
    }}
  }}
}}
"""
BODY = b'{"model":"m","input":"mine"}'
ASK = (
    b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sk-honest\r\n"
    b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
)


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Edge, int]]:
    """A proxy behind nginx; the port is nginx's."""
    if NGINX is None:
        pytest.skip("nginx is not installed")
    folder: Path = tmp_path_factory.mktemp("nginx")
    with port_to_serve() as port, Edge() as edge:
        config = folder / "nginx.conf"
        config.write_text(CONFIG.format(folder=folder, upstream=edge.port, port=port))
        process = subprocess.Popen([NGINX, "-p", str(folder), "-c", str(config)])
        try:
            _wait_for(port)
            yield edge, port
        finally:
            process.terminate()
            process.wait(10)


def _wait_for(port: int) -> None:
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("nginx did not start")


@pytest.mark.parametrize("target", ["/v1/responses", "/v1/files"])
def test_nothing_is_smuggled_through_two_proxies(behind: tuple[Edge, int], target: str) -> None:
    """No stream leaves anything on a shared connection that becomes another's request."""
    edge, port = behind
    for case in CASES:
        edge.ledger.seen.clear()
        edge.run(Line(port).raw(case.stream(target), LAST))
        sent = [each for each in edge.ledger.seen if each.key == KEY]
        assert SMUGGLED_TARGET not in [each.target for each in edge.ledger.seen], case.name
        assert {(each.target, each.text) for each in sent} <= {(target, TEXT)}, case.name

        mine, _ = edge.exchange(ASK, LAST, port=port)
        assert (mine.status, mine.answer) == (200, answer_to("sk-honest", "mine")), case.name
