"""
The description of the admin listener (`deploy/admin-openapi.json`) and what it describes.

Every route is described and every described route is there; replies have the statuses, types and
shapes that the description says. With the extra `fuzz` installed, schemathesis asks in all the ways
it can think of.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hostile.edge import Edge
from hostile.ledger import LAST, Reply

from proxy.observe.admin import State, build_admin_app
from proxy.observe.page import add_page

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
DESCRIPTION = json.loads((ROOT / "deploy" / "admin-openapi.json").read_text())
PATHS = DESCRIPTION["paths"]
TYPES = {
    "array": list,
    "integer": int,
    "null": type(None),
    "number": int | float,
    "object": dict,
    "string": str,
}


@pytest.fixture(scope="module")
def edge() -> Iterator[Edge]:
    """A proxy that has answered a few turns, so that there is something to show."""
    with Edge() as running:
        body = b'{"model":"gpt-5.2","input":"hi"}'
        head = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer sk-a\r\n"
        running.ask((head + b"Content-Length: %d\r\n\r\n" % len(body) + body) * 3, LAST)
        yield running


def ask(edge: Edge, path: str, *fields: str, method: str = "GET") -> Reply:
    """Ask the admin listener."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *fields, "", ""]
    (reply,) = edge.exchange("\r\n".join(lines).encode(), methods=[method], port=edge.admin_port)
    return reply


def resolved(schema: Any) -> Any:
    """Follow a reference within the description."""
    while "$ref" in schema:
        found = DESCRIPTION
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        schema = found
    return schema


def check(value: Any, schema: Any, where: str = "$") -> None:
    """Check a value against what is used of JSON Schema in the description."""
    schema = resolved(schema)
    if "const" in schema or "enum" in schema:
        assert value in schema.get("enum", [schema.get("const")]), f"{where}: {value!r}"
    if "type" in schema:
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        fits = any(isinstance(value, TYPES[kind]) for kind in kinds) and value is not True
        assert fits, f"{where}: {value!r} is not {kinds}"
    if "minimum" in schema and value is not None:
        assert value >= schema["minimum"], where
    if isinstance(value, dict):
        assert set(schema.get("required", ())) <= set(value), f"{where}: {sorted(value)}"
        for name, part in value.items():
            check(part, schema.get("properties", {}).get(name, {}), f"{where}.{name}")
    if isinstance(value, list):
        for number, part in enumerate(value):
            check(part, schema.get("items", {}), f"{where}[{number}]")


def check_reply(reply: Reply, path: str) -> None:
    """Check a reply to GET against the description of its path."""
    described = PATHS[path]["get"]["responses"][str(reply.status)]
    kind = (reply.get("content-type") or "").partition(";")[0]
    assert kind in described["content"], kind
    for name, header in described.get("headers", {}).items():
        check(reply.get(name.lower()), header["schema"], name)
    body = reply.body.decode()
    schema = described["content"][kind]["schema"]
    check(json.loads(body) if kind == "application/json" else body, schema)


def test_every_route_is_described_and_there(edge: Edge) -> None:
    """No route is left out, and none is made up."""
    app = build_admin_app(edge.proxy.metrics, edge.proxy.health)
    add_page(app, edge.proxy.live)

    assert {resource.canonical for resource in app.router.resources()} == set(PATHS)


@pytest.mark.parametrize("query", ["", "?verbose", "?verbose=1&x=%00"])
@pytest.mark.parametrize("path", PATHS)
def test_replies_are_as_described(edge: Edge, path: str, query: str) -> None:
    """Status, type, headers and shape, whatever is asked besides."""
    reply = ask(edge, path + query)

    assert reply.status == 200
    check_reply(reply, path)
    assert ask(edge, path, method="HEAD").status == 200


@pytest.mark.parametrize("state", [State.STARTING, State.DRAINING])
@pytest.mark.parametrize("path", [path for path in PATHS if path.endswith("z")])
def test_probes_are_as_described_in_any_state(edge: Edge, path: str, state: State) -> None:
    """A probe that says no says so in the way that is described."""
    edge.proxy.health.state = state
    try:
        check_reply(ask(edge, path), path)
    finally:
        edge.proxy.health.state = State.READY


@pytest.mark.parametrize("field", ["Origin: http://evil.example", "X-Host: evil"])
@pytest.mark.parametrize("path", PATHS)
def test_other_origins_get_nothing(edge: Edge, path: str, field: str) -> None:
    """A page of elsewhere sees no page of ours; what only looks like that does."""
    reply = ask(edge, path, field)

    assert reply.status == (403 if "Origin" in field else 200)
    check_reply(reply, path)
    assert reply.get("access-control-allow-origin") is None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"])
def test_nothing_can_be_changed(edge: Edge, path: str, method: str) -> None:
    """Everything is read-only."""
    reply = ask(edge, path, method=method)

    assert reply.status == 405
    assert reply.get("allow") == "GET,HEAD"


def test_schemathesis_finds_nothing(edge: Edge) -> None:
    """Every operation, in all the ways that the description allows and does not allow."""
    schemathesis = pytest.importorskip("schemathesis")
    schema = schemathesis.openapi.from_dict(DESCRIPTION)
    url = f"http://127.0.0.1:{edge.admin_port}"
    found = []
    with edge.serving_aside():
        for operation in schema.get_all_operations():
            found.append(operation.ok().label)
            _ask_in_all_ways(operation.ok(), url)

    assert len(found) == len(PATHS)


def _ask_in_all_ways(operation: Any, url: str) -> None:
    from hypothesis import HealthCheck, given, settings

    @settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def run(case: Any) -> None:
        case.call_and_validate(base_url=url)

    run()
