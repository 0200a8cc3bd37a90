"""How a stream ends whose upstream is lost on the way: as the operator likes, and never cleanly."""

from __future__ import annotations

import aiohttp
import pytest
from harness import stack

from proxy.simulator.faults import Break, End

BODY = {"model": "m", "input": "hi [tokens=60]", "store": False, "stream": True}


async def read_into(parts: list[bytes], reply: aiohttp.ClientResponse) -> None:
    """Read a body, and keep what came before it broke."""
    async for part in reply.content.iter_any():
        parts.append(part)  # noqa: PERF401  a comprehension would lose it all


@pytest.mark.parametrize(("choice", "errors"), [("error", 1), ("break", 0)])
@pytest.mark.parametrize("end", [End.ABORT, End.RESET, End.CLOSE])
async def test_a_lost_upstream_is_told_or_just_breaks_off(
    choice: str, errors: int, end: End
) -> None:
    """An error event for those who read one, or what a plain connection would have done."""
    async with stack(reply={"lost_upstream": choice}) as s, aiohttp.ClientSession() as session:
        s.sim.faults.arm(Break(end=end, after_events=5))
        auth = {"Authorization": "Bearer sk-a"}
        received: list[bytes] = []
        async with session.post(f"{s.base_url}/responses", json=BODY, headers=auth) as reply:
            with pytest.raises(aiohttp.ClientPayloadError):
                await read_into(received, reply)

    text = b"".join(received)
    assert text.count(b"event: error\n") == errors
    assert text.count(b"\n\n") == 5 + errors
