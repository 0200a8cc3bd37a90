"""
What becomes of every field of a Chat Completions request: the written table.

A request is translated to the Responses API as a whole or not at all. Each field and each form of
a message has a row here that says how it is translated, or why a request that has it goes over
HTTP as it is. `Untranslatable` names rows of this table and nothing else, so that a field's name
may be a log value and a metric label whatever a client sends.

Compared with the request type of openai-python by a test, which fails when the SDK gains a field
that has no row.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Fate(enum.Enum):
    """What becomes of a field."""

    TRANSLATED = "translated"
    NEUTRAL = "left out where it says what is true anyway, else over HTTP"
    DROPPED = "left out"
    REFUSED = "over HTTP"


@dataclass(frozen=True, slots=True)
class FieldRow:
    """A field (of a message where the name begins with `messages.`), its fate and how, or why."""

    name: str
    fate: Fate
    text: str


_T, _N, _D, _R = Fate.TRANSLATED, Fate.NEUTRAL, Fate.DROPPED, Fate.REFUSED
_SAME = "unchanged"
_NONE = "the Responses API has no such thing"

FIELDS = (
    FieldRow("messages", _T, "`input`, message by message"),
    FieldRow("model", _T, _SAME),
    FieldRow("stream", _T, "how the reply is written; a WebSocket always streams"),
    FieldRow("stream_options", _T, "its parts; without `stream` the API refuses it"),
    FieldRow("stream_options.include_usage", _T, "whether a chunk with the usage ends the reply"),
    FieldRow("stream_options.include_obfuscation", _T, "`stream_options.include_obfuscation`"),
    FieldRow("tools", _T, "one level flatter; `strict: false` where `strict` is absent"),
    FieldRow("tools.function", _T, "a function tool: name, description, parameters, strict"),
    FieldRow("tools.custom", _T, "a custom tool: name, description, format"),
    FieldRow("tool_choice", _T, "a word unchanged; an object one level flatter"),
    FieldRow("parallel_tool_calls", _T, _SAME),
    FieldRow("max_completion_tokens", _T, "`max_output_tokens`, which must be 16 or more"),
    FieldRow("max_tokens", _T, "`max_output_tokens`; not together with the former"),
    FieldRow("response_format", _T, "`text.format`; a JSON schema one level flatter"),
    FieldRow("verbosity", _T, "`text.verbosity`"),
    FieldRow("reasoning_effort", _T, "`reasoning.effort`"),
    FieldRow("temperature", _T, _SAME),
    FieldRow("top_p", _T, _SAME),
    FieldRow("metadata", _T, _SAME),
    FieldRow("user", _T, _SAME),
    FieldRow("safety_identifier", _T, _SAME),
    FieldRow("service_tier", _T, _SAME),
    FieldRow("prompt_cache_key", _T, _SAME),
    FieldRow("prompt_cache_options", _T, _SAME),
    FieldRow("prompt_cache_retention", _T, _SAME),
    FieldRow("store", _N, "absent means no here: `store: false`. Stored completions are elsewhere"),
    FieldRow("n", _N, "1 is the only number of answers there is"),
    FieldRow("frequency_penalty", _N, f"0; {_NONE}"),
    FieldRow("presence_penalty", _N, f"0; {_NONE}"),
    FieldRow("logit_bias", _N, f"an empty one; {_NONE}"),
    FieldRow("logprobs", _N, "`false`; chunks can't be given those of the Responses API"),
    FieldRow("modalities", _N, '`["text"]`; there is no audio'),
    FieldRow("top_logprobs", _R, "as `logprobs`"),
    FieldRow("stop", _R, f"{_NONE}, and a cut answer would not be what upstream remembers"),
    FieldRow("seed", _R, _NONE),
    FieldRow("audio", _R, "there is no audio"),
    FieldRow("prediction", _R, _NONE),
    FieldRow("moderation", _R, "its results have another shape"),
    FieldRow("web_search_options", _R, "a tool there, with results that chunks can't carry"),
    FieldRow("functions", _R, "replaced by `tools` long ago"),
    FieldRow("function_call", _R, "replaced by `tool_choice` long ago"),
    FieldRow("input", _R, "beside `messages`; without them the body is one of the Responses API"),
    FieldRow("other", _R, "a field that is not known"),
    FieldRow("messages.role", _T, "unchanged, but for `tool`; the legacy `function` is refused"),
    FieldRow("messages.content", _T, "a string, or a list of the parts below"),
    FieldRow("messages.content.text", _T, "`input_text`, of an assistant `output_text`"),
    FieldRow("messages.content.image_url", _T, "`input_image`, of a user only"),
    FieldRow("messages.content.file", _T, "`input_file`, of a user only"),
    FieldRow("messages.content.refusal", _T, "`refusal`"),
    FieldRow("messages.content.input_audio", _R, "there is no audio"),
    FieldRow("messages.content.prompt_cache_breakpoint", _T, "unchanged, but not of an assistant"),
    FieldRow("messages.content.other", _R, "a part, or a field of one, that is not known"),
    FieldRow("messages.refusal", _T, "a `refusal` part"),
    FieldRow("messages.tool_calls", _T, "`function_call` and `custom_tool_call` items"),
    FieldRow("messages.tool_call_id", _T, "`call_id` of an output item of the call's kind"),
    FieldRow("messages.name", _N, f"of a tool's output, which has an id; of others: {_NONE}"),
    FieldRow("messages.audio", _R, "there is no audio"),
    FieldRow("messages.function_call", _R, "replaced by `tool_calls` long ago"),
    FieldRow("messages.annotations", _D, "the reply's own, echoed"),
    FieldRow("messages.parsed", _D, "the content once more, added by SDKs"),
    FieldRow("messages.reasoning", _D, "not the API's; upstream keeps its own reasoning"),
    FieldRow("messages.reasoning_content", _D, "as `messages.reasoning`"),
    FieldRow("messages.__copilotMessageSource", _D, "a note that a client keeps for itself"),
    FieldRow("messages.other", _R, "a field that is not known"),
)

NAMES = frozenset(row.name for row in FIELDS)


class Untranslatable(ValueError):
    """
    A request has no exact equal in the Responses API. `field`, a row's name, says why.

    Also raised for what the Chat Completions API itself refuses: its own words are the best answer.
    """

    def __init__(self, field: str) -> None:
        assert field in NAMES, field
        super().__init__(f"can't be translated: {field}")
        self.field = field


def reference_table() -> str:
    """Return the table in Markdown, for people."""
    rows = (f"| `{row.name}` | {row.fate.value} | {row.text} |" for row in FIELDS)
    return "\n".join(("| Field | | How, or why |", "| --- | --- | --- |", *rows))
