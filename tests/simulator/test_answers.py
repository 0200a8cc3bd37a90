"""Answers: a pure function of the context, in the manner of an agent's tool loop."""

import json

import pytest

from proxy.simulator.agent import DEFAULT_TOOLS, Agent, user
from proxy.simulator.answers import (
    AnswerOptions,
    Context,
    answer,
    is_genuine,
    visible_text,
    with_encrypted,
)
from proxy.simulator.meaning import CALL_OUTPUTS, item_type

BODY = {"model": "gpt-5.2", "instructions": "Be kind.", "tools": list(DEFAULT_TOOLS)}


def answer_to(items, options=None, **changes):
    """The answer to some items under the usual settings."""
    return answer(Context.of({**BODY, **changes}, items), options)


def play(prompt, options=None, **changes):
    """All answers of a tool loop, calls answered, until one has no calls."""
    agent, items, answers = Agent(""), [user(prompt)], []
    while True:
        answers.append(answer_to(items, options, **changes))
        outputs = agent.answer_calls(answers[-1].items)
        if not outputs:
            return answers
        items = [*items, *answers[-1].items, *outputs]


def calls_of(found):
    """The tool calls of an answer."""
    return [item for item in found.items if item_type(item) in CALL_OUTPUTS]


def test_equal_contexts_have_equal_answers():
    """Nothing but the context decides."""
    assert play("go") == play("go")


@pytest.mark.parametrize(
    "change",
    [
        {"model": "gpt-6"},
        {"instructions": "Be terse."},
        {"tools": list(DEFAULT_TOOLS[:2])},
        {"reasoning": {"effort": "high"}},
        {"temperature": 0.5},
    ],
    ids=str,
)
def test_settings_are_part_of_the_context(change):
    """Another model, other instructions or other tools: another answer."""
    assert answer_to([user("go")], **change) != answer_to([user("go")])


@pytest.mark.parametrize("change", [{"stream": True}, {"store": False}, {"user": "u"}], ids=str)
def test_delivery_is_not_part_of_the_context(change):
    """How the answer is delivered or kept does not change it."""
    assert answer_to([user("go")], **change) == answer_to([user("go")])


@pytest.mark.parametrize("wanted", [0, 1, 5, 24])
def test_a_marker_sets_the_number_of_calls(wanted):
    """`[calls=N]` gives exactly N calls, two of them at once now and then."""
    assert sum(len(calls_of(each)) for each in play(f"[calls={wanted}] go")) == wanted


def test_without_a_marker_there_are_as_many_rounds_as_set():
    """Three rounds of calls, the third with two at once, then the final message."""
    counts = [len(calls_of(found)) for found in play("go")]
    assert counts == [1, 1, 2, 0]


def test_a_second_prompt_starts_a_new_loop():
    """Calls are counted from the last user message on."""
    items = [user("[calls=0] a"), *answer_to([user("[calls=0] a")]).items, user("[calls=1] b")]
    assert len(calls_of(answer_to(items))) == 1


def test_call_ids_never_repeat_in_a_loop():
    """Each call id derives from its own context."""
    ids = [call["call_id"] for found in play("[calls=24] go") for call in calls_of(found)]
    assert len(set(ids)) == 24


def test_a_marker_sets_the_length_of_the_text():
    """`[tokens=N]` gives about N tokens of text."""
    found = answer_to([user("[calls=0][tokens=400] go")])
    assert 380 <= found.tokens <= 440


def test_no_tools_or_no_choice_mean_a_message():
    """Without tools, and with tool_choice none, the answer is final at once."""
    for change in ({"tools": []}, {"tool_choice": "none"}):
        (last,) = [item for item in answer_to([user("go")], **change).items if "role" in item]
        assert last["phase"] == "final_answer"


def test_a_named_tool_is_called():
    """A tool_choice that names a tool gets that tool."""
    choice = {"type": "function", "name": "search"}
    assert [c["name"] for c in calls_of(answer_to([user("go")], tool_choice=choice))] == ["search"]


def test_parallel_calls_can_be_declined():
    """With parallel_tool_calls false, there is one call a round."""
    counts = [len(calls_of(found)) for found in play("go", parallel_tool_calls=False)]
    assert counts == [1, 1, 1, 0]


def test_tools_are_found_in_namespaces_and_items():
    """Tools inside `additional_tools` items and namespaces are called with their namespace."""
    space = {"type": "namespace", "name": "files", "tools": [{"type": "custom", "name": "exec"}]}
    items = [{"type": "additional_tools", "role": "developer", "tools": [space]}, user("go")]
    (call,) = calls_of(answer_to(items, tools=None))
    assert (call["name"], call["namespace"]) == ("exec", "files")


@pytest.mark.parametrize("odd", [False, True])
def test_arguments_fit_the_schema(odd):
    """Required members are there, enums and bounds kept, in whatever spelling."""
    tools = list(DEFAULT_TOOLS[:1])
    for found in play("[calls=12] go", AnswerOptions(odd_arguments=odd), tools=tools):
        for call in calls_of(found):
            value = json.loads(call["arguments"])
            assert set(value) == {"path", "first_line", "encoding"}
            assert 1 <= value["first_line"] <= 9999
            assert value["encoding"] in {"utf-8", "latin-1"}


def test_odd_arguments_are_spelt_otherwise():
    """Some of them do not survive being parsed and written compactly."""
    found = play("[calls=24] go", AnswerOptions(odd_arguments=True), tools=list(DEFAULT_TOOLS[:2]))
    texts = [call["arguments"] for each in found for call in calls_of(each)]
    compact = [json.dumps(json.loads(text), separators=(",", ":")) for text in texts]
    assert texts != compact


def test_a_schema_for_the_text_is_followed():
    """text.format json_schema gives JSON that fits."""
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"$ref": "#/$defs/n"}},
        "required": ["ok", "n"],
        "$defs": {"n": {"anyOf": [{"type": "integer", "minimum": 5}, {"type": "null"}]}},
    }
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    value = json.loads(visible_text(answer_to([user("go")], tools=[], text=form).items[-1]))
    assert isinstance(value["ok"], bool)
    assert value["n"] >= 5


def test_the_output_limit_cuts_the_message():
    """max_output_tokens ends the answer early and says why."""
    found = answer_to([user("[calls=0][tokens=400] go")], max_output_tokens=16)
    assert found.incomplete == "max_output_tokens"
    assert found.items[-1]["status"] == "incomplete"
    assert len(visible_text(found.items[-1]).split()) <= 16


def test_a_call_beyond_the_limit_is_left_out():
    """A call that does not fit is not half made."""
    tool = {
        "type": "function",
        "name": "f",
        "parameters": {"properties": {"a": {"const": "x y " * 99}}},
    }
    found = answer_to([user("go")], tools=[tool], max_output_tokens=16)
    assert (found.incomplete, calls_of(found)) == ("max_output_tokens", [])


def test_encrypted_reasoning_certifies_itself():
    """A blob that was made here is known again; any other is not."""
    (reasoning, *_) = answer_to([user("go")]).items
    blob = reasoning["encrypted_content"]
    assert is_genuine(blob)
    for bad in (
        blob[:-6] + "AAAAAA",
        blob[:40],
        "gAAAAAB",
        "x",
        "",
        None,
        3,
        blob[:9] + "!" + blob[10:],
    ):
        assert not is_genuine(bad)


def test_encrypted_content_can_be_left_out():
    """Reasoning stays, its encrypted content goes."""
    (reasoning, *_) = with_encrypted(answer_to([user("go")]).items, wanted=False)
    assert "encrypted_content" not in reasoning
    assert reasoning["summary"]
