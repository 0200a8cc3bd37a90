"""Shadow mode's two pure parts: leases without connections, and the second opinion."""

from __future__ import annotations

import json

import pytest

from proxy.core.connection_state import LifePolicy
from proxy.core.leases import LeaseLimits, Want
from proxy.core.reasons import Reason
from proxy.core.shadow import Opinions, ShadowLease, ShadowPool, Verdict, read_request

WHO = "principal"


def pool(**limits: float) -> ShadowPool:
    """Return a pool with these limits."""
    return ShadowPool(LeaseLimits(**limits), LifePolicy())


def turn(shadow: ShadowPool, want: Want | None, response_id: str, now: float) -> ShadowLease:
    """Hold a lease for one turn, which ends well."""
    lease = shadow.acquire(WHO, want, now)
    assert isinstance(lease, ShadowLease)
    shadow.release(lease, reusable=True, response_id=response_id, now=now)
    return lease


def test_a_chain_finds_its_connection_again():
    """The connection of a turn holds its answer until the next turn there."""
    shadow = pool()
    first = turn(shadow, None, "r1", 0.0)
    want = Want(first.record.id, "r1")

    assert shadow.status(WHO, want, 1.0) is None
    assert turn(shadow, want, "r2", 1.0).holds_chain
    assert shadow.status(WHO, want, 2.0) is Reason.CHAIN_ADVANCED


def test_a_busy_chain_is_busy():
    """While a turn runs its connection is not to be had; another turn gets another one."""
    shadow = pool()
    want = Want(turn(shadow, None, "r1", 0.0).record.id, "r1")
    shadow.acquire(WHO, want, 1.0)

    assert shadow.status(WHO, Want(want.connection_id, "r1"), 1.0) is Reason.CHAIN_BUSY
    other = shadow.acquire(WHO, want, 1.0)
    assert isinstance(other, ShadowLease)
    assert not other.holds_chain


def test_time_retires_connections_as_it_does_real_ones():
    """Unused and old connections go, though nobody has a clock of his own here."""
    shadow = pool()
    want = Want(turn(shadow, None, "r1", 0.0).record.id, "r1")
    turn(shadow, None, "other", 301.0)

    assert shadow.status(WHO, want, 301.0) is Reason.CONNECTION_LOST


def test_a_limit_refuses_as_it_does_with_real_connections():
    """The reason is the one that a real turn would have been given."""
    shadow = pool(max_per_principal=1, spare_per_principal=0)
    assert isinstance(shadow.acquire(WHO, None, 0.0), ShadowLease)

    assert shadow.acquire(WHO, None, 0.0) is Reason.CONNECTION_CAP


ASK = {"role": "user", "content": "Go."}
SAY = {
    "type": "message",
    "id": "msg_1",
    "status": "completed",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "Going.", "annotations": [], "logprobs": []}],
}
CALL = {
    "type": "function_call",
    "id": "fc_1",
    "status": "completed",
    "call_id": "call_1",
    "name": "run",
    "arguments": '{"n": 1, "why": "so"}',
}
THINK = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "secret"}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "done"}
OUTPUT = [THINK, SAY, CALL]

# What a client makes of the answer, and the opinion on a delta that holds only the result.
ECHOES = {
    "as it was": ([ASK, *OUTPUT, RESULT], Verdict.RIGHT),
    "no reasoning": ([ASK, SAY, CALL, RESULT], Verdict.RIGHT),
    "another order": ([ASK, CALL, SAY, RESULT], Verdict.RIGHT),
    "plain text": ([ASK, {"role": "assistant", "content": "Going."}, CALL, RESULT], Verdict.RIGHT),
    "re-serialised": (
        [ASK, SAY, {**CALL, "id": None, "arguments": '{"why":"so","n":1}'}, RESULT],
        Verdict.RIGHT,
    ),
    "typed": ([{"type": "message", **ASK}, SAY, CALL, RESULT], Verdict.RIGHT),
    "text changed": (
        [ASK, {"role": "assistant", "content": "Going!"}, CALL, RESULT],
        Verdict.WRONG,
    ),
    "text dropped": ([ASK, CALL, RESULT], Verdict.WRONG),
    "call changed": ([ASK, SAY, {**CALL, "arguments": '{"n":2}'}, RESULT], Verdict.WRONG),
    "number changed": (
        [ASK, SAY, {**CALL, "arguments": '{"n":1.0,"why":"so"}'}, RESULT],
        Verdict.WRONG,
    ),
    "question changed": ([{**ASK, "content": "Stop."}, SAY, CALL, RESULT], Verdict.WRONG),
    "result changed": ([ASK, SAY, CALL, {**RESULT, "output": "failed"}], Verdict.WRONG),
    "one more": ([ASK, SAY, CALL, RESULT, ASK], Verdict.WRONG),
    "doubled": ([ASK, ASK, SAY, CALL, RESULT], Verdict.WRONG),
    "reference": ([ASK, {"id": "msg_1"}, CALL, RESULT], Verdict.UNCHECKED),
}


def body_of(items: list[dict[str, object]] | str) -> bytes:
    """Return a request's body with this input."""
    return json.dumps({"model": "m", "input": items}).encode()


def raw(items: list[dict[str, object]]) -> list[bytes]:
    """Return items as their bytes."""
    return [json.dumps(item).encode() for item in items]


@pytest.mark.parametrize(("items", "verdict"), ECHOES.values(), ids=list(ECHOES))
def test_judges_what_the_client_made_of_the_answer(items, verdict):
    """A delta is right if upstream's context and it say what the request says."""
    opinions = Opinions()
    opinions.note(WHO, "r1", read_request(body_of("Go.")), raw(OUTPUT))

    assert opinions.judge(WHO, "r1", read_request(body_of(items)), raw([RESULT])) is verdict


def test_knows_nothing_of_other_principals_and_of_what_it_forgot():
    """Without a note of the response in question there is no opinion."""
    opinions = Opinions(max_bytes=400)
    opinions.note(WHO, "r1", read_request(body_of("Go.")), raw([SAY]))
    request = read_request(body_of([ASK, SAY, ASK]))

    assert opinions.judge("other", "r1", request, raw([ASK])) is Verdict.UNCHECKED
    assert opinions.judge(WHO, "r1", request, raw([ASK])) is Verdict.RIGHT
    opinions.note(WHO, "r2", read_request(body_of("Go.")), raw([SAY]))
    assert opinions.judge(WHO, "r1", request, raw([ASK])) is Verdict.UNCHECKED


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"input":7}', b"{}", b'{"input":[7]}', b"\xff"])
def test_what_can_not_be_read_is_unchecked(body):
    """No body makes it raise."""
    opinions = Opinions()
    opinions.note(WHO, "r1", read_request(body_of("Go.")), raw([SAY]))
    opinions.note(WHO, "r2", read_request(body), raw([SAY]))

    assert opinions.judge(WHO, "r1", read_request(body), []) is Verdict.UNCHECKED
    assert opinions.judge(WHO, "r2", read_request(body_of("Go.")), []) is Verdict.UNCHECKED
