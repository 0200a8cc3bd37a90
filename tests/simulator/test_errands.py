"""Errands: what a real agent is told to do, so that nothing comes of it."""

import json

import pytest

from proxy.simulator import AnswerOptions, Calls
from proxy.simulator.agent import user
from proxy.simulator.answers import Context, answer
from proxy.simulator.meaning import CALL_OUTPUTS, item_type

REAL = AnswerOptions(rounds=2, parallel_every=2, calls=Calls.HARMLESS, marker="DONE")


def tool(name, required=(), **properties):
    """A function tool whose parameters have these schemas."""
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "name": name, "parameters": schema}


TEXT = {"type": "string"}
SHELL = tool("bash", ["command"], command=TEXT, workdir=TEXT, background={"type": "boolean"})
READ = tool("read", ["filePath"], filePath=TEXT)
WRITE = tool("write", ["path", "content"], path=TEXT, content=TEXT)
TASK = tool("task", ["prompt", "subagent_type"], prompt=TEXT, subagent_type=TEXT)


def calls(items, tools, options=REAL):
    """The calls in the answer to some items."""
    found = answer(Context.of({"model": "m", "tools": tools}, items), options)
    return [item for item in found.items if item_type(item) in CALL_OUTPUTS]


def answered(made):
    """The calls with their outputs."""
    return [
        *made,
        *({"type": "function_call_output", "call_id": c["call_id"], "output": "x"} for c in made),
    ]


def test_a_command_is_echoed_and_a_file_is_read():
    """The first round runs a harmless command, the second one also reads a file."""
    tools = [WRITE, READ, SHELL]
    first = calls([user("go")], tools)
    second = calls([user("go"), *answered(first)], tools)

    assert [call["name"] for call in (*first, *second)] == ["bash", "bash", "read"]
    assert json.loads(first[0]["arguments"])["command"].startswith("echo ")
    assert json.loads(second[1]["arguments"]) == {"filePath": "hello.txt"}


def test_only_required_arguments_are_given():
    """An optional argument could ask for a directory that is not there."""
    (call,) = calls([user("go")], [SHELL])

    assert set(json.loads(call["arguments"])) == {"command"}


@pytest.mark.parametrize("kind", ["array", ["array", "null"]], ids=str)
def test_a_command_may_be_a_list(kind):
    """Older agents take the words of a command."""
    shell = tool("shell", ["command"], command={"type": kind, "items": TEXT})
    (call,) = calls([user("go")], [shell])

    assert json.loads(call["arguments"])["command"][:2] == ["bash", "-lc"]


def test_a_custom_tool_is_given_a_script():
    """A tool that takes plain text is given text that it can run."""
    (call,) = calls([user("go")], [{"type": "custom", "name": "exec"}])

    assert "tools.exec_command" in call["input"]


def test_somebodys_own_functions_are_called():
    """Where no tool is known, any is called."""
    (call,) = calls([user("go")], [tool("get_weather", ["city"], city=TEXT)])

    assert call["name"] == "get_weather"


def test_two_sub_agents_are_given_their_tasks_once():
    """The first round delegates; neither later rounds nor the sub-agents do."""
    options = AnswerOptions(calls=Calls.DELEGATED)
    tools = [SHELL, TASK]
    first = calls([user("go")], tools, options)
    later = calls([user("go"), *answered(first)], tools, options)
    task = json.loads(first[0]["arguments"])["prompt"]

    assert [call["name"] for call in first] == ["task", "task"]
    assert first[0]["arguments"] != first[1]["arguments"]
    assert [call["name"] for call in later] == ["bash"]
    assert [call["name"] for call in calls([user(task)], tools, options)] == ["bash"]


def test_the_final_message_counts_what_it_has_seen():
    """It begins with the marker, the number of prompts and that of outputs."""
    first = calls([user("go")], [SHELL])
    second = calls([user("go"), *answered(first)], [SHELL])
    items = [user("go"), *answered(first), *answered(second)]
    final = answer(Context.of({"model": "m", "tools": [SHELL]}, items), REAL).items[-1]

    assert final["content"][0]["text"].startswith("DONE-1-3 [")


def test_side_requests_are_not_marked():
    """A request without tools, such as one for a title, has no marker in its answer."""
    final = answer(Context.of({"model": "m"}, [user("go")]), REAL).items[-1]

    assert "DONE" not in final["content"][0]["text"]


def test_odd_spellings_change_with_the_context():
    """Arguments mean what they say, in several spellings."""
    options = AnswerOptions(calls=Calls.HARMLESS, odd_arguments=True)
    texts = [calls([user(f"go {i}")], [SHELL], options)[0]["arguments"] for i in range(30)]
    styles = {(text.startswith('{"command":'), "\\u00fc" in text, "\n" in text) for text in texts}

    assert len(styles) == 3
    assert all("Z\u00fcrich" in json.loads(text)["command"] for text in texts)
