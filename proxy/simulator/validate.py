"""
What the API refuses, with the API's words.

Checks are in the order in which a request meets them: JSON, fields, items, then the whole
context (`Ledger`): every call has its output, every output its call, no item id is there twice.
Sources: protocol sections 2.1, 5.3 and 5.4.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from proxy.simulator.answers import is_genuine
from proxy.simulator.meaning import CALL_OUTPUTS, item_type
from proxy.simulator.wire import ApiError, Item, Json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Transport(enum.StrEnum):
    """How a request came in."""

    HTTP = "http"
    WS = "ws"


_FIELD_NAMES = (
    "access_programs background background_options client_metadata context_management "
    "conversation image include input instructions max_output_tokens max_tool_calls metadata "
    "model moderation parallel_tool_calls previous_response_id prompt prompt_cache_key "
    "prompt_cache_options prompt_cache_retention reasoning safety_identifier service_tier store "
    "stream stream_options temperature text tool_choice tools top_logprobs top_p truncation "
    "user"
)
FIELDS = frozenset(_FIELD_NAMES.split())
"""Top-level fields of both transports."""

SOCKET_FIELDS = frozenset({"type", "generate"})
"""What `response.create` has besides. `stream_id` is refused: this upstream has no lanes."""

_ITEM_TYPE_NAMES = (
    "message file_search_call computer_call computer_call_output web_search_call function_call "
    "function_call_output tool_search_call tool_search_output additional_tools "
    "configuration_update reasoning compaction image_generation_call code_interpreter_call "
    "local_shell_call local_shell_call_output shell_call shell_call_output apply_patch_call "
    "apply_patch_call_output mcp_list_tools mcp_approval_request mcp_approval_response mcp_call "
    "custom_tool_call_output custom_tool_call compaction_trigger item_reference program "
    "program_output"
)
ITEM_TYPES = frozenset(_ITEM_TYPE_NAMES.split())
"""The input union."""

_ROLES = frozenset({"user", "assistant", "system", "developer"})
_REQUIRED = {
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id", "output"),
    "reasoning": ("summary",),
    "compaction": ("encrypted_content",),
    "item_reference": ("id",),
}
_CALLS_BY_OUTPUT = {output: call for call, output in CALL_OUTPUTS.items()}
_MIN_OUTPUT_TOKENS = 16


def parse(raw: bytes | str) -> dict[str, Json]:
    """The body as an object; ApiError 400 otherwise."""
    try:
        body = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        message = "We could not parse the JSON body of your request."
        raise ApiError(400, message) from None
    if not isinstance(body, dict):
        raise ApiError(400, "Invalid type for request body: expected an object.")
    return body


def _refuse_constant(constant: str) -> Json:
    raise ValueError(constant)


def check_fields(body: Mapping[str, Json], transport: Transport) -> None:
    """Refuse what this transport does not take, and settings that contradict each other."""
    known = FIELDS | SOCKET_FIELDS if transport is Transport.WS else FIELDS
    for name in body:
        if name not in known:
            message = f"Unknown parameter: '{name}'."
            raise ApiError(400, message, code="unknown_parameter", param=name)
    if transport is Transport.WS and body.get("background"):
        raise ApiError(400, "Background mode is not supported over WebSocket.", param="background")
    if not isinstance(body.get("model"), str) or not body["model"]:
        raise _missing("model")
    if body.get("previous_response_id") is not None and body.get("conversation") is not None:
        message = "Mutually exclusive parameters: 'previous_response_id' and 'conversation'."
        raise ApiError(400, message, code="mutually_exclusive_parameters")
    limit = body.get("max_output_tokens")
    if isinstance(limit, int) and limit < _MIN_OUTPUT_TOKENS:
        message = f"Invalid 'max_output_tokens': expected a value >= {_MIN_OUTPUT_TOKENS}."
        code = "integer_below_min_value"
        raise ApiError(400, message, code=code, param="max_output_tokens")
    if (
        body.get("stream_options") is not None
        and transport is Transport.HTTP
        and not body.get("stream")
    ):
        message = "The 'stream_options' parameter is only allowed when 'stream' is enabled."
        raise ApiError(400, message, param="stream_options")


def input_items(body: Mapping[str, Json]) -> list[Item]:
    """The `input` as items, each of a known type; ApiError 400 otherwise."""
    given = body.get("input")
    if given is None:
        if all(body.get(k) is None for k in ("previous_response_id", "conversation", "prompt")):
            raise _missing("input")
        return []
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        message = "Invalid type for 'input': expected a string or an array."
        raise ApiError(400, message, code="invalid_type", param="input")
    for index, item in enumerate(given):
        _check_item(item, f"input[{index}]")
    return given


def _missing(param: str) -> ApiError:
    message = f"Missing required parameter: '{param}'."
    return ApiError(400, message, code="missing_required_parameter", param=param)


def _check_item(item: Json, where: str) -> None:
    if not isinstance(item, dict):
        message = f"Invalid type for '{where}': expected an object."
        raise ApiError(400, message, code="invalid_type", param=where)
    kind = item_type(item)
    if kind not in ITEM_TYPES:
        message = f"Invalid value: '{kind}'. Supported values are: {', '.join(sorted(ITEM_TYPES))}."
        raise ApiError(400, message, code="invalid_value", param=f"{where}.type")
    if kind == "message" and item.get("role") not in _ROLES:
        message = f"Invalid value: '{item.get('role')}'. Supported values are: {sorted(_ROLES)}."
        raise ApiError(400, message, code="invalid_value", param=f"{where}.role")
    for name in _REQUIRED.get(kind, ()):
        if name not in item:
            raise _missing(f"{where}.{name}")
    if kind == "reasoning" and item.get("encrypted_content") is not None:
        _check_blob(item)


def _check_blob(item: Item) -> None:
    if not is_genuine(item["encrypted_content"]):
        message = (
            f"The encrypted content for item {item.get('id')} could not be verified. "
            "Reason: Encrypted content could not be decrypted or parsed."
        )
        raise ApiError(400, message, code="invalid_encrypted_content")


@dataclass(frozen=True, slots=True)
class Ledger:
    """
    What pairing needs to know of a context: ids there, calls made, calls not answered yet.

    Grows with the context, so that a delta is checked against what came before it.
    """

    ids: frozenset[str] = frozenset()
    made: frozenset[tuple[str, str]] = frozenset()
    unanswered: tuple[tuple[str, str], ...] = ()

    def extended(self, items: Iterable[Item]) -> Ledger:
        """The ledger after more items; ApiError 400 for a doubled id or an output of no call."""
        ids, made = set(self.ids), set(self.made)
        unanswered = dict.fromkeys(self.unanswered)
        for item in items:
            identity = item.get("id")
            if identity is not None:
                if identity in ids:
                    raise _duplicate(str(identity))
                ids.add(str(identity))
            kind, call_id = item_type(item), str(item.get("call_id"))
            if kind in CALL_OUTPUTS:
                made.add((kind, call_id))
                unanswered[kind, call_id] = None
            elif kind in _CALLS_BY_OUTPUT:
                call = (_CALLS_BY_OUTPUT[kind], call_id)
                if call not in made:
                    raise _no_call(*call)
                unanswered.pop(call, None)
        return replace(self, ids=frozenset(ids), made=frozenset(made), unanswered=tuple(unanswered))

    def check_settled(self) -> None:
        """ApiError 400 unless every call has its output."""
        for kind, call_id in self.unanswered:
            name = (
                "function"
                if kind == "function_call"
                else kind.removesuffix("_call").replace("_", " ")
            )
            message = f"No tool output found for {name} call {call_id}."
            raise ApiError(400, message, param="input")


def _duplicate(identity: str) -> ApiError:
    message = f"Duplicate item found with id {identity}. Remove duplicate items from your input."
    return ApiError(400, message, param="input")


def _no_call(kind: str, call_id: str) -> ApiError:
    name = "function" if kind == "function_call" else kind.removesuffix("_call").replace("_", " ")
    message = f"No tool call found for {name} call output with call_id {call_id}."
    return ApiError(400, message, param="input")


def check_reasoning_is_followed(items: Iterable[Item]) -> None:
    """ApiError 400 for a reasoning item whose response has nothing after it."""
    pending: Item | None = None
    for item in items:
        kind = item_type(item)
        if kind == "reasoning":
            pending = item
        elif pending is not None and (kind in CALL_OUTPUTS or item.get("role") == "assistant"):
            pending = None
        elif pending is not None:
            raise _orphan(pending)
    if pending is not None:
        raise _orphan(pending)


def _orphan(item: Item) -> ApiError:
    message = (
        f"Item '{item.get('id')}' of type 'reasoning' was provided without its required "
        "following item."
    )
    return ApiError(400, message, param="input")
