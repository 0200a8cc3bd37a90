"""The digest: blind to how a client echoes, sharp for what a model would read otherwise."""

import pytest

from proxy.simulator.echoes import EchoStyle, echoed
from proxy.simulator.meaning import Trace, normal_form

USER = {"role": "user", "content": "Tidy up."}
REASONING = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAAB"}
MESSAGE = {
    "type": "message",
    "id": "msg_1",
    "status": "completed",
    "role": "assistant",
    "phase": "commentary",
    "content": [{"type": "output_text", "text": "Looking.", "annotations": [], "logprobs": []}],
}
CALL = {
    "type": "function_call",
    "id": "fc_1",
    "status": "completed",
    "call_id": "call_1",
    "name": "read",
    "arguments": '{"path":"Z\\u00fcrich","lines":[1,2.50],"deep":{"on":true}}',
}
CUSTOM = {
    "type": "custom_tool_call",
    "id": "ctc_1",
    "status": "completed",
    "call_id": "call_2",
    "name": "shell",
    "input": "ls",
}
ANSWER = [REASONING, MESSAGE, CALL, CUSTOM]
OUTPUTS = [
    {"type": "function_call_output", "call_id": "call_1", "output": "one"},
    {"type": "custom_tool_call_output", "call_id": "call_2", "output": "two"},
]
HISTORY = [USER, *ANSWER, *OUTPUTS]


def value(items):
    """The digest of some items."""
    return Trace().extended(items).value


@pytest.mark.parametrize("style", [style for style in EchoStyle if style is not EchoStyle.MIXED])
def test_an_echo_in_any_style_has_the_same_digest(style):
    """What real clients change about the model's items is not counted."""
    assert value([USER, *echoed(ANSWER, style), *OUTPUTS]) == value(HISTORY)


def test_a_context_that_grows_has_the_digest_of_the_whole():
    """A server that remembers, and one that is told everything, agree at every length."""
    trace = Trace()
    for length, item in enumerate(HISTORY, 1):
        trace = trace.extended([item])
        assert trace == Trace().extended(HISTORY[:length])


EQUAL = {
    "a string and one text part": (
        {"role": "user", "content": "a"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
    ),
    "several text parts of the model": (
        {**MESSAGE, "content": "ab"},
        {
            **MESSAGE,
            "content": [{"type": "output_text", "text": "a"}, {"type": "output_text", "text": "b"}],
        },
    ),
    "blank arguments and an empty object": (
        {**CALL, "arguments": " "},
        {**CALL, "arguments": "{}"},
    ),
    "spelling of a fraction": ({**CALL, "arguments": "[2e1]"}, {**CALL, "arguments": "[20.0]"}),
    "output as text and as a part": (
        {**OUTPUTS[0], "output": "x"},
        {**OUTPUTS[0], "id": "fco_1", "output": [{"type": "input_text", "text": "x"}]},
    ),
    "an unknown kind without its id": (
        {"type": "web_search_call", "id": "ws_1", "action": {"query": "q"}, "status": "completed"},
        {"type": "web_search_call", "action": {"query": "q"}, "created_by": None},
    ),
}


@pytest.mark.parametrize("pair", EQUAL.values(), ids=EQUAL)
def test_forms_of_one_meaning_are_equal(pair):
    """Each pair says the same to a model."""
    assert normal_form(pair[0]) == normal_form(pair[1])


DIFFERENT = {
    "text": (MESSAGE, {**MESSAGE, "content": "Looking"}),
    "role": (USER, {**USER, "role": "developer"}),
    "call id": (CALL, {**CALL, "call_id": "call_9"}),
    "tool": (CALL, {**CALL, "name": "write"}),
    "namespace": (CALL, {**CALL, "namespace": "files"}),
    "integer and fraction": ({**CALL, "arguments": "[1]"}, {**CALL, "arguments": "[1.0]"}),
    "big integers": (
        {**CALL, "arguments": "[9007199254740993]"},
        {**CALL, "arguments": "[9007199254740992]"},
    ),
    "long fractions": (
        {**CALL, "arguments": "[0.12345678901234567890123456789012345]"},
        {**CALL, "arguments": "[0.12345678901234567890123456789012346]"},
    ),
    "number and its text": ({**CALL, "arguments": "[1]"}, {**CALL, "arguments": '["1"]'}),
    "number and what marks it": (
        {**CALL, "arguments": "[2.5]"},
        {**CALL, "arguments": '["fraction 2.5"]'},
    ),
    "null in arguments": ({**CALL, "arguments": '{"a":null}'}, {**CALL, "arguments": "{}"}),
    "a doubled key": ({**CALL, "arguments": '{"a":1,"a":1}'}, {**CALL, "arguments": '{"a":1}'}),
    "broken arguments": ({**CALL, "arguments": "{"}, {**CALL, "arguments": "{ "}),
    "output": (OUTPUTS[0], {**OUTPUTS[0], "output": "one "}),
    "custom input": (CUSTOM, {**CUSTOM, "input": "ls "}),
    "an image": (
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:a"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:b"}]},
    ),
    "a refusal": (
        {**MESSAGE, "content": [{"type": "refusal", "refusal": "no"}]},
        {**MESSAGE, "content": [{"type": "refusal", "refusal": "No"}]},
    ),
    "parts of the user": (
        {"role": "user", "content": [{"type": "input_text", "text": t} for t in ("a", "bc")]},
        {"role": "user", "content": [{"type": "input_text", "text": t} for t in ("ab", "c")]},
    ),
}


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT)
def test_forms_of_different_meanings_differ(pair):
    """Each pair says something else to a model."""
    assert normal_form(pair[0]) != normal_form(pair[1])


TAMPERED = {
    "lost": [*HISTORY[:3], *HISTORY[4:]],
    "doubled": [*HISTORY[:4], HISTORY[3], *HISTORY[4:]],
    "doubled output": [*HISTORY, HISTORY[-1]],
    "outputs reordered": [*HISTORY[:5], HISTORY[6], HISTORY[5]],
    "user moved behind the answer": [*HISTORY[1:5], HISTORY[0], *HISTORY[5:]],
    "foreign item": [*HISTORY, {"role": "user", "content": "of someone else"}],
    "calls and outputs interleaved": [*HISTORY[:4], HISTORY[5], HISTORY[4], HISTORY[6]],
    "cut at the end": HISTORY[:-1],
}


@pytest.mark.parametrize("items", TAMPERED.values(), ids=TAMPERED)
def test_a_damaged_history_has_another_digest(items):
    """One item lost, doubled, moved or added is seen."""
    assert value(items) != value(HISTORY)


def test_two_runs_of_the_model_do_not_merge_unseen():
    """Moving an item of the model across a user message is seen."""
    second = {**MESSAGE, "content": "Found."}
    first = [USER, MESSAGE, USER, second]
    assert value(first) != value([USER, MESSAGE, second, USER])
