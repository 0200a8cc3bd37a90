"""The probe of containers: what it makes of answers, and of none."""

from __future__ import annotations

import http.server
import socket
import threading

import pytest

from proxy.observe import probe
from proxy.observe.probe import Answer, ask, ask_until


class Listener(http.server.BaseHTTPRequestHandler):
    """Answers with the status that the path names."""

    def do_GET(self):
        """Answer."""
        status = int(self.path.lstrip("/"))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b"draining\n" if status == 503 else b"ok")

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def port():
    """Serve on a free port."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Listener) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_yes(port, host):
    """200 is a yes; a listener on every address is asked on loopback."""
    answer = ask(host, port, "/200", 5)

    assert (answer.ok, answer.text) == (True, "ok")


@pytest.mark.parametrize(("status", "text"), [(503, "draining"), (404, "ok"), (204, "")])
def test_anything_else_is_no(port, status, text):
    """Every other status is a no, with the words that came with it."""
    answer = ask("127.0.0.1", port, f"/{status}", 5)

    assert (answer.ok, answer.text) == (False, text)


def test_no_listener(closed_port):
    """A port that nobody listens on is a no with a reason."""
    answer = ask("127.0.0.1", closed_port, "/200", 5)

    assert not answer.ok
    assert f"port {closed_port}: connection refused" in answer.text


def test_silence():
    """Who accepts and says nothing is a no once the time is over."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        answer = ask("127.0.0.1", mute.getsockname()[1], "/200", 0.05)

    assert not answer.ok
    assert "timed out" in answer.text


def test_something_that_is_not_http():
    """Garbage is a no, not a traceback."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak():
            client, _ = server.accept()
            client.recv(1000)
            client.sendall(b"\x00\x01hello\r\n\r\n")
            client.close()

        speaker = threading.Thread(target=speak)
        speaker.start()
        answer = ask("127.0.0.1", server.getsockname()[1], "/200", 5)
        speaker.join()

    assert not answer.ok


def test_the_environments_proxy_is_not_asked(port, monkeypatch):
    """A proxy for the way out has no business between a container and itself."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")

    assert ask("127.0.0.1", port, "/200", 5).ok


@pytest.mark.parametrize(("wait_s", "ok", "times"), [(0.0, False, 1), (60.0, True, 3)])
def test_waiting(monkeypatch, wait_s, ok, times):
    """It goes on asking until the answer is yes, and not at all if it shall not wait."""
    answers = [Answer(ok=number == 3, text="") for number in range(1, 4)]
    asked = []

    def answer(*question):
        asked.append(question)
        return answers[len(asked) - 1]

    monkeypatch.setattr(probe, "ask", answer)
    monkeypatch.setattr(probe, "BETWEEN_QUESTIONS_S", 0)

    assert ask_until("127.0.0.1", 1, "/readyz", 5, wait_s).ok is ok
    assert asked == [("127.0.0.1", 1, "/readyz", 5)] * times


def test_waiting_has_an_end(closed_port):
    """Nobody there for as long as it may wait is a no."""
    assert not ask_until("127.0.0.1", closed_port, "/readyz", 5, 0.25).ok
