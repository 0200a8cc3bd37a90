"""
Errands: calls that a real agent can carry out without anything coming of it.

A real agent does what its tools are called for. So it is told to echo a word in its shell and to
look at a file; its other tools (those that write, browse, or ask the user) are left alone. An
agent that has none of the tools known here has somebody's own functions, and those are called.
Only required arguments are given: an optional one may ask for leave, a timeout or a directory.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.simulator.values import Dice, Grower

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from proxy.simulator.wire import Json

_SHELL_NAMES = (
    "exec_command shell_command shell bash Bash run_shell_command run_commands execute_command "
    "run_in_terminal run_terminal_command execute_bash terminal Execute exec"
)
_READER_NAMES = "read Read read_file read_files view ReadFile list_files LS glob"
_DELEGATE_NAMES = "task Task spawn_agent agent Agent spawn_subagent Subagent use_subagents"

SHELLS = tuple(_SHELL_NAMES.split())
"""Names of tools that run a command."""

READERS = tuple(_READER_NAMES.split())
"""Names of tools that look at files."""

DELEGATES = tuple(_DELEGATE_NAMES.split())
"""Names of tools that give a sub-agent a task."""

WAIT = "wait_agent"
"""The name of a tool that waits for sub-agents."""

SUB_TASK = "Sub-task"
"""How the task of a sub-agent begins: one that reads this has no sub-agents of its own."""

FILE_NAME = "hello.txt"
"""The file that is looked at, in the agent's working directory."""

_SCRIPTS = {
    "exec": (
        "const r = await tools.exec_command({{cmd: '{command}'}});\n"
        "text(r.output ?? JSON.stringify(r));\n"
    )
}
"""What a tool without arguments is given, where that is not a command itself."""

_AGENT_ID = re.compile(r'"agent_id":\s*"([0-9a-f-]{36})"')

_PATH_NAMES = frozenset({"file", "filename", "file_name", "dirpath", "directory"})
_COMMAND_NAMES = frozenset({"command", "cmd", "commands", "script"})
_KIND_NAMES = frozenset({"subagent_type", "agent_type", "subagent"})
_FORK = "fork_context"  # a sub-agent that starts with its parent's history
_TASK_NAMES = frozenset({"prompt", "message", "task", "instructions"})


def choose(names: Sequence[str], index: int) -> int | None:
    """
    The place of the tool for the call number `index` of a round: 0 runs a command, 1 reads a file.

    None where none of the names is known.
    """
    wanted = [*READERS, *SHELLS] if index else [*SHELLS, *READERS]
    return next((names.index(name) for name in wanted if name in names), None)


def delegate(names: Sequence[str]) -> int | None:
    """The place of a tool that gives a sub-agent a task, or None."""
    return next((names.index(name) for name in DELEGATES if name in names), None)


def agents_to_wait_for(names: Sequence[str], outputs: Sequence[str]) -> list[str]:
    """
    The ids of sub-agents that were started in the background, as the outputs tell them.

    Empty unless there is a tool that waits for them: where there is none, an output is a result.
    """
    if WAIT not in names:
        return []
    return [found for text in outputs for found in _AGENT_ID.findall(text)]


def script(name: str, dice: Dice) -> str:
    """The text for a tool that takes plain text."""
    return _SCRIPTS.get(name, "{command}\n").format(command=_command(dice, "script"))


def arguments(schema: Json, dice: Dice, index: int, *, odd: bool) -> str:
    """The arguments of the call number `index` of a round; when `odd`, now and then spelt oddly."""
    definitions: dict[str, Json] = {}
    if isinstance(schema, dict):
        definitions = {**schema.get("definitions", {}), **schema.get("$defs", {})}
    grower = _Careful(dice, definitions, odd, index)
    value = grower.value(schema, "$", "", 6)
    value = value if isinstance(value, dict) else {}
    match dice.number("spelling", 3) if odd else 2:
        case 0:
            return json.dumps(value)
        case 1:
            return json.dumps(value, ensure_ascii=False, indent=1)
        case _:
            return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class _Careful(Grower):
    index: int

    def value(self, schema: Json, path: str, name: str, depth: int) -> Json:
        """The first of several allowed values: it is the mildest, if there is a scale."""
        if isinstance(schema, dict) and schema.get("enum"):
            return schema["enum"][0]
        return Grower.value(self, schema, path, name, depth)

    def object(self, schema: Mapping[str, Json], path: str, depth: int) -> dict[str, Json]:
        """The required properties; where none is, the task and what goes with it."""
        properties = schema.get("properties", {})
        required = schema.get("required") or (*_TASK_NAMES, _FORK)
        return {
            name: self.value(member, f"{path}.{name}", name, depth - 1)
            for name, member in properties.items()
            if name in required
        }

    def typed(self, schema: dict[str, Json], path: str, name: str, depth: int) -> Json:
        """Commands may be lists of words; numbers are small, and nothing is switched on."""
        kind = schema.get("type")
        kinds = kind if isinstance(kind, list) else [kind]
        if "array" in kinds and name in _COMMAND_NAMES - {"commands"}:
            return ["bash", "-lc", _command(self.dice, path)]
        if "boolean" in kinds:
            return name == _FORK and self.index == 1
        if "integer" in kinds or "number" in kinds:
            return schema.get("minimum", 10)
        return Grower.typed(self, schema, path, name, depth)

    def text(self, path: str, name: str) -> str:
        """A text that suits the property's name."""
        lowered = name.lower().rstrip("s")
        if lowered in _COMMAND_NAMES:
            return _command(self.dice, path)
        if "path" in lowered or lowered in _PATH_NAMES:
            return FILE_NAME
        if lowered == "pattern":
            return "*.txt"
        if lowered in _KIND_NAMES:
            return "general"
        letter = "AB"[self.index % 2]
        if lowered in _TASK_NAMES:
            return f"{SUB_TASK} {letter}: say hi."
        if lowered in ("name", "task_name"):
            return f"task_{letter.lower()}"
        return Grower.text(self, path, name)


def _command(dice: Dice, path: str) -> str:
    return f"echo Z\u00fcrich \u2013 {dice.hex(path, 6)}"
