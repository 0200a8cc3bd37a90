"""Refusals: what the API does not take, in its own words."""

import pytest

from proxy.simulator.validate import (
    Ledger,
    Transport,
    check_fields,
    check_reasoning_is_followed,
    input_items,
    parse,
)
from proxy.simulator.wire import ApiError

OK = {"model": "gpt-5.2", "input": "hi"}
CALL = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "x"}
HTTP, WS = Transport.HTTP, Transport.WS

REFUSED = [
    ({**OK, "surprise": 1}, HTTP, "unknown_parameter", "surprise"),
    ({**OK, "type": "response.create"}, HTTP, "unknown_parameter", "type"),
    ({**OK, "generate": False}, HTTP, "unknown_parameter", "generate"),
    ({**OK, "stream_id": "a"}, HTTP, "unknown_parameter", "stream_id"),
    ({**OK, "stream_id": "a"}, WS, "unknown_parameter", "stream_id"),
    ({**OK, "background": True}, WS, None, "background"),
    ({"input": "hi"}, HTTP, "missing_required_parameter", "model"),
    ({**OK, "model": ""}, HTTP, "missing_required_parameter", "model"),
    (
        {**OK, "previous_response_id": "resp_1", "conversation": "conv_1"},
        HTTP,
        "mutually_exclusive_parameters",
        None,
    ),
    ({**OK, "max_output_tokens": 15}, HTTP, "integer_below_min_value", "max_output_tokens"),
    ({**OK, "stream_options": {}}, HTTP, None, "stream_options"),
]


@pytest.mark.parametrize(("body", "transport", "code", "param"), REFUSED)
def test_fields_are_refused(body, transport, code, param):
    """A field that is unknown, missing or contradictory is a 400 that names it."""
    with pytest.raises(ApiError) as caught:
        check_fields(body, transport)
    problem = caught.value.problem
    assert (problem.status, problem.code, problem.param) == (400, code, param)


@pytest.mark.parametrize(
    ("body", "transport"),
    [
        (OK, HTTP),
        ({**OK, "background": True}, HTTP),
        ({**OK, "type": "response.create", "generate": False, "stream": True}, WS),
        ({**OK, "stream": True, "stream_options": {"include_obfuscation": False}}, HTTP),
        ({**OK, "client_metadata": {"turn": "1"}}, HTTP),
    ],
)
def test_fields_are_taken(body, transport):
    """What each transport takes is not refused."""
    check_fields(body, transport)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"a":NaN}', b"[" * 100_000])
def test_what_is_no_object_is_refused(raw):
    """A body that is no JSON object is a 400, whatever it is."""
    with pytest.raises(ApiError):
        parse(raw)


@pytest.mark.parametrize(
    ("given", "code", "param"),
    [
        ({}, "missing_required_parameter", "input"),
        ({"input": 3}, "invalid_type", "input"),
        ({"input": ["x"]}, "invalid_type", "input[0]"),
        ({"input": [{"type": "riddle"}]}, "invalid_value", "input[0].type"),
        ({"input": [{"role": "king", "content": ""}]}, "invalid_value", "input[0].role"),
        ({"input": [{"type": "function_call"}]}, "missing_required_parameter", "input[0].call_id"),
        ({"input": [{}]}, "missing_required_parameter", "input[0].id"),
        (
            {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "made up"}]},
            "invalid_encrypted_content",
            None,
        ),
    ],
)
def test_items_are_refused(given, code, param):
    """An item of no known kind or shape is a 400 that says where it stands."""
    with pytest.raises(ApiError) as caught:
        input_items(given)
    assert (caught.value.problem.code, caught.value.problem.param) == (code, param)


def test_input_may_be_text_or_absent():
    """A string is a user message; nothing is enough where a response is continued."""
    assert input_items({"input": "hi"}) == [{"role": "user", "content": "hi"}]
    assert input_items({"previous_response_id": "resp_1"}) == []


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([CALL], "No tool output found for function call call_1."),
        ([OUTPUT], "No tool call found for function call output with call_id call_1."),
        ([OUTPUT, CALL], "No tool call found for function call output with call_id call_1."),
        (
            [{**CALL, "type": "custom_tool_call", "input": ""}],
            "No tool output found for custom tool call call_1.",
        ),
        (
            [CALL, {**OUTPUT, "type": "custom_tool_call_output"}],
            "No tool call found for custom tool call output with call_id call_1.",
        ),
        (
            [{"id": "msg_1", "role": "user", "content": "a"}] * 2,
            "Duplicate item found with id msg_1. Remove duplicate items from your input.",
        ),
    ],
)
def test_a_context_that_does_not_pair_is_refused(items, message):
    """Calls and outputs pair, ids are there once."""
    with pytest.raises(ApiError, match="^" + message.replace(".", r"\.")):
        Ledger().extended(items).check_settled()


def test_pairing_spans_what_is_remembered():
    """An output may answer a call of a remembered response, and must if it is open."""
    remembered = Ledger().extended([CALL])
    remembered.extended([OUTPUT]).check_settled()
    with pytest.raises(ApiError):
        remembered.extended([{"role": "user", "content": "never mind"}]).check_settled()


def test_reasoning_must_be_followed_where_that_is_checked():
    """A reasoning item without anything after it is an orphan."""
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": []}
    check_reasoning_is_followed([reasoning, CALL, OUTPUT])
    for orphaned in ([reasoning], [reasoning, {"role": "user", "content": "x"}]):
        with pytest.raises(ApiError, match="without its required following item"):
            check_reasoning_is_followed(orphaned)
