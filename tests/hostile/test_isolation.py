"""
Rows X1 to X3, X8 and X9: nobody else's answers, connections, upstreams or caches.

What upstream is connected to is read off the interpreter's audit events, below every library.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from harness import play, serving, stack
from wire import Peer, reply

from hostile.ledger import KEY, LAST, Ledger, Line, Reply, Seen, answer_to, parse_replies
from proxy.simulator.agent import user

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.app import Turnwire

BODY = {"model": "m", "store": False, "input": "ping"}
ADDRESSES: list[Any] | None = None


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if ADDRESSES is not None and event in ("socket.connect", "socket.getaddrinfo"):
        ADDRESSES.append(arguments[1][:2] if event == "socket.connect" else arguments[:2])


sys.addaudithook(_listen)  # for good: a hook can't be removed


@contextlib.contextmanager
def addresses() -> Iterator[list[Any]]:
    """Collect what names are looked up and what addresses are connected to meanwhile."""
    global ADDRESSES  # noqa: PLW0603  the hook's own switch
    found: list[Any] = []
    ADDRESSES = found
    try:
        yield found
    finally:
        ADDRESSES = None


def port_of(proxy: Turnwire) -> int:
    """Return the port of a proxy's data listener."""
    return int(proxy.base_url.split(":")[2].split("/")[0])


def spelled(
    target: str = "/v1/responses", body: object = None, *fields: str, host: str = "localhost"
) -> bytes:
    """Spell a request with a key, a POST if it has a body."""
    data = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(data)}"]
    lines += [f"Authorization: Bearer {KEY}", *fields, "", ""]
    return "\r\n".join(lines).encode() + data


async def ask(proxy: Turnwire, raw: bytes) -> Reply:
    """Send one request; return its reply."""
    return parse_replies(await Line(port_of(proxy)).raw(raw, LAST))[0]


# --- X3: the upstream is the configuration's alone ------------------------------------------------

EVIL = "evil.example"
QUIET = ["Error handling request"]
BEND = {
    "Host": spelled("/v1/files", BODY, host=EVIL),
    "Host of a turn": spelled(body=BODY, host=EVIL),
    "absolute form": spelled(f"http://{EVIL}/v1/files", BODY),
    "absolute form of a turn": spelled(f"http://{EVIL}/v1/responses", BODY),
    "another scheme": spelled(f"ftp://{EVIL}/v1/files", BODY),
    "two slashes": spelled(f"//{EVIL}/v1/files", BODY),
    "slashes and dots": spelled(f"/v1/..//{EVIL}/%2e%2e/x", BODY),
    "a user in the target": spelled(f"/v1@{EVIL}/files", BODY),
    "backslashes": spelled(f"/\\{EVIL}\\v1", BODY),
    "X-Forwarded-Host": spelled(
        "/v1/files", BODY, f"X-Forwarded-Host: {EVIL}", f"X-Original-URL: http://{EVIL}/"
    ),
    "fields of the body": spelled(
        body=BODY | {"base_url": f"http://{EVIL}", "api_base": f"http://{EVIL}", "user": EVIL}
    ),
    "fields of the header": spelled(
        "/v1/files", BODY, f"OpenAI-Base-URL: http://{EVIL}", f"X-Upstream: http://{EVIL}"
    ),
    "the query": spelled(f"/v1/responses?base_url=http://{EVIL}", BODY),
    "a tunnel": spelled(
        f"http://{EVIL}/v1/realtime", None, "Upgrade: websocket", "Connection: upgrade"
    ),
    "CONNECT": f"CONNECT {EVIL}:443 HTTP/1.1\r\nHost: {EVIL}\r\n\r\n".encode(),
}


@pytest.mark.parametrize("name", BEND)
async def test_no_request_chooses_where_it_goes(name: str):
    """Whatever names another host, only the configured one is looked up and connected to."""
    async with Ledger() as ledger:
        allowed = {"allowed_hosts": [EVIL]}
        async with serving(ledger.url, tolerates=QUIET, security=allowed) as (
            proxy,
            _,
        ):
            with addresses() as found:
                await ask(proxy, BEND[name])

        ports = {port_of(proxy), int(ledger.url.split(":")[2].split("/")[0])}
        assert {host for host, _ in found} == {"127.0.0.1"}
        assert {int(port) for _, port in found} <= ports


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("target", ["/v1/responses", "/v1/files"])
async def test_no_redirect_is_followed_with_credentials(status: int, target: str):
    """Neither the handshake nor the relay goes where upstream points; the client is told."""
    moved = reply(b"", f"Location: http://{EVIL}/v1", status=f"{status} Moved")
    async with (
        Peer(answer=moved) as peer,
        serving(f"http://127.0.0.1:{peer.port}/v1") as (proxy, _),
    ):
        with addresses() as found:
            got = await ask(proxy, spelled(target, BODY))

        assert got.status == status
        assert {(host, port) for host, port in found} <= {
            ("127.0.0.1", port_of(proxy)),
            ("127.0.0.1", peer.port),
        }


# --- X1, X2: one connection, one set of credentials -----------------------------------------------


async def test_many_keys_in_a_small_pool_never_meet():
    """Ten keys, two connections each at most, clients that leave: no answer is another's."""
    connections = {"max_per_principal": 2, "handshakes_per_s": 1000, "handshake_burst": 10_000}
    chance = random.Random(5)
    leaving = ["Cannot write to closing transport"]  # of the simulator: its client has left
    async with stack(connections=connections, tolerates=leaving) as s:

        async def talk(key: str) -> None:
            agent, history = s.agent(api_key=key), [user(f"[calls=0] I am {key}.")]
            for number in range(4):
                leaves = chance.random() < 0.3
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.001 if leaves else None):
                        await agent.send(history)
                got = await play(agent, history, user(f"[calls=0] And {number}?"))
                s.check_contexts([got], key)

        async with asyncio.TaskGroup() as group:
            for number in range(10):
                group.create_task(talk(f"sk-key-{number}"))
                group.create_task(talk(f"sk-key-{number}"))
        s.check_isolation()


@pytest.mark.parametrize("name", ["OpenAI-Organization", "OpenAI-Project", "Cookie", "api-key"])
async def test_other_credentials_are_another_conversation(name: str):
    """A header of identity that changes in mid-conversation: a new connection, and all of it."""
    async with stack() as s:
        agent, history = s.agent(), []
        await play(agent, history, user("[calls=0] Hello."))
        same = await play(agent, history, user("[calls=0] Again."))
        agent.headers = {name: "another"}
        other = await play(agent, history, user("[calls=0] And now?"))

        assert (same.mode, other.mode) == ("delta", "full")
        one, two = s.seen_for(same), s.seen_for(other)
        assert one.connection != two.connection
        s.check_contexts([other])


async def test_a_new_key_shares_nothing_with_the_old_one():
    """The key is rotated: the next turn is sent in full on a connection of the new key."""
    async with stack() as s:
        old, new = s.agent(api_key="sk-old"), s.agent(api_key="sk-new")
        history: list[Any] = []
        await play(old, history, user("[calls=0] Hello."))
        before = await play(old, history, user("[calls=0] Again."))
        after = await play(new, history, user("[calls=0] And now?"))

        assert (before.mode, after.mode) == ("delta", "full")
        s.check_contexts([after], "sk-new")
        s.check_isolation()


# --- X8: what is another's is as if it were not ---------------------------------------------------


@pytest.mark.parametrize("store", [True, False])
async def test_anothers_response_is_as_unknown_as_one_that_never_was(store: bool):
    """Naming another key's response gets the very reply of naming one that was made up."""
    async with stack() as s:
        mine = s.agent(api_key="sk-mine", settings={"store": store})
        got = await mine.send([user("[calls=0] A secret.")])
        assert got.response is not None
        theirs = s.agent(api_key="sk-theirs")

        async def guess(ident: str) -> Any:
            theirs.settings = {"store": store, "previous_response_id": ident}
            return await theirs.send([user("[calls=0] Go on.")])

        real, made_up = await guess(got.response["id"]), await guess("resp_" + "0" * 48)

        def told(answer: Any) -> tuple[Any, ...]:
            error = json.dumps(answer.error)
            return (
                answer.status,
                answer.mode,
                answer.reason,
                error.replace(got.response["id"], "ID").replace("resp_" + "0" * 48, "ID"),
            )

        assert told(real) == told(made_up)
        assert real.status == 400


# --- X9: nothing is for a cache -------------------------------------------------------------------


async def test_what_we_answer_is_for_no_cache():
    """Turns in every form and every refusal forbid to be kept; relayed replies say upstream's."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    asked = {
        "turn": spelled(body=BODY),
        "stream": spelled(body=BODY | {"stream": True}),
        "chat": spelled("/v1/chat/completions", chat),
        "corrupt": spelled("/v1/responses", BODY, "Content-Encoding: gzip"),
        "expectation": spelled("/v1/responses", BODY, "Expect: magic"),
        "host": spelled(host=EVIL),
        "no HTTP": b"GARBAGE\r\n\r\n",
    }
    async with Ledger() as ledger, serving(ledger.url, tolerates=QUIET) as (proxy, _):
        for name, raw in asked.items():
            got = await ask(proxy, raw)
            assert got.get("cache-control") == "private, no-store", name
        relayed = await ask(proxy, spelled("/v1/models"))
        assert relayed.get("cache-control") is None  # the ledger says nothing of caches
        async with aiohttp.ClientSession() as session:
            for path in ("/metrics", "/livez", "/live", "/", "/nothing"):
                async with session.get(proxy.admin_url + path) as page:
                    assert page.headers["Cache-Control"] == "no-store", path


async def test_keys_on_one_connection_do_not_mix():
    """A proxy before us may carry everybody's requests on one connection: each has its own key."""
    body = b'{"model":"m","store":false,"stream":%b,"input":"text %d"}'
    raw, wanted = b"", []
    for number in range(40):
        key, text = f"sk-{number % 7}", f"text {number}"
        data = body % (b"true" if number % 3 else b"false", number)
        head = f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        raw += f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        wanted.append(Seen("POST", "/v1/responses", text, key))
    async with Ledger() as ledger, serving(ledger.url) as (proxy, _):
        replies = parse_replies(await Line(port_of(proxy)).raw(raw, LAST))

        assert ledger.seen[:-1] == wanted
        assert [each.answer for each in replies[:-1]] == [
            answer_to(each.key, each.text) for each in wanted
        ]
