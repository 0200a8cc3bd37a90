"""Server events: all of them, in order, adding up to the response."""

import pytest

from proxy.simulator.agent import DEFAULT_TOOLS, user
from proxy.simulator.answers import AnswerOptions, Context, answer
from proxy.simulator.events import CompletedOutput, ResponseWriter, Usage, with_ids
from proxy.simulator.streams import check_stream


def writer(prompt="go", options=None, **changes):
    """A writer for the answer to a prompt."""
    body = {"model": "gpt-5.2", "tools": list(DEFAULT_TOOLS), **changes}
    found = answer(Context.of(body, [user(prompt)]), options)
    output = with_ids(found.items, "resp_1")
    return ResponseWriter(body, "resp_1", 1, output, Usage(10, 0, found.tokens), found.incomplete)


def types_of(events):
    """The types in order, repeats of one type drawn together."""
    types = [event.type.removeprefix("response.") for event in events]
    return [kind for i, kind in enumerate(types) if i == 0 or types[i - 1] != kind]


REASONING = [
    "output_item.added",
    "reasoning_summary_part.added",
    "reasoning_summary_text.delta",
    "reasoning_summary_text.done",
    "reasoning_summary_part.done",
    "output_item.done",
]
MESSAGE = [
    "output_item.added",
    "content_part.added",
    "output_text.delta",
    "output_text.done",
    "content_part.done",
    "output_item.done",
]


def test_a_message_has_all_its_events():
    """From created to completed, each part opened and closed."""
    types = types_of(writer(tools=[]).events())
    assert types == ["created", "in_progress", *REASONING, *MESSAGE, "completed"]


@pytest.mark.parametrize(
    ("tool", "kind"),
    [
        (DEFAULT_TOOLS[0], "function_call_arguments"),
        (DEFAULT_TOOLS[2], "custom_tool_call_input"),
    ],
)
def test_a_call_has_all_its_events(tool, kind):
    """Arguments, or a custom tool's input, come in deltas."""
    call = ["output_item.added", f"{kind}.delta", f"{kind}.done", "output_item.done"]
    types = types_of(writer(tools=[tool]).events())
    assert types == ["created", "in_progress", *REASONING, *call, "completed"]


def test_events_are_numbered_and_add_up():
    """The strict reader finds the items that the writer was given."""
    written = writer()
    events = [event.body for event in written.events()]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response, items, error = check_stream(events)
    assert (response, items, error) == (written.final(), list(written.output), None)


def test_padding_can_be_declined():
    """Deltas carry obfuscation unless stream_options says no."""

    def padded(**changes):
        events = writer(**changes).events()
        return {"obfuscation" in e.body for e in events if e.type.endswith("_text.delta")}

    assert padded() == {True}
    assert padded(stream_options={"include_obfuscation": False}) == {False}


def test_the_response_echoes_the_request():
    """Settings come back as given, absent ones as the API's defaults."""
    response = writer(previous_response_id="resp_0", instructions="x", store=False).final()
    assert response["previous_response_id"] == "resp_0"
    assert response["instructions"] == "x"
    assert response["store"] is False
    assert response["tool_choice"] == "auto"
    assert response["usage"]["total_tokens"] == 10 + response["usage"]["output_tokens"]


def test_a_cut_answer_ends_incomplete():
    """The terminal event says so, with the reason."""
    last = writer("[calls=0][tokens=99] go", max_output_tokens=16).events()[-1]
    assert last.type == "response.incomplete"
    assert last.body["response"]["incomplete_details"] == {"reason": "max_output_tokens"}


def test_the_terminal_event_can_have_no_output():
    """As on the ChatGPT backend: items come in their own events only."""
    full = writer()
    bare = ResponseWriter(
        full.request,
        "resp_1",
        1,
        full.output,
        full.usage,
        completed_output=CompletedOutput.EMPTY,
    )
    assert bare.events()[-1].body["response"]["output"] == []
    assert bare.final()["output"] == list(full.output)


def test_tokens_are_those_of_the_answer():
    """The events bring as many tokens as the usage counts."""
    written = writer("[calls=0][tokens=50] go", AnswerOptions())
    assert sum(event.tokens or 0 for event in written.events()) == written.usage.output
