"""What the drivers of Python libraries share: two tools, the prompts, a way to tell an output."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

BASE_URL = os.environ["OPENAI_BASE_URL"] = os.environ["BASE_URL"]
os.environ["OPENAI_API_BASE"] = BASE_URL  # what litellm and its users read

KEY = os.environ["OPENAI_API_KEY"]
MODE = os.environ.get("MODE", "")
CHAT = os.environ.get("API") == "chat"  # Chat Completions in place of Responses
MODEL = os.environ.get("MODEL", "gpt-5.2")
INSTRUCTIONS = "You are a terse weather agent. \u00dcn\u00efcode <system> & 'quotes'."
PROMPTS = (
    "Compare the weather in Z\u00fcrich with Paris & Mal\u00e9, then answer.",
    "Thanks \u2013 anything else?",
)


def get_weather(city: str, unit: str) -> str:
    """Get the current weather for a city."""
    return f'{city}: 21\u00b0{unit.upper()} <sunny> & "mild"'


def add(a: float, b: float) -> str:
    """Add two numbers."""
    return str(a + b)


FUNCTIONS = {"get_weather": get_weather, "add": add}

_TEXT = {"type": "string"}
_NUMBER = {"type": "number"}
_SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {"city": _TEXT, "unit": {"type": "string", "enum": ["c", "f"]}},
    "add": {"a": _NUMBER, "b": _NUMBER},
}
TOOLS = [
    {
        "type": "function",
        "name": name,
        "description": FUNCTIONS[name].__doc__,
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        },
    }
    for name, properties in _SCHEMAS.items()
]

CHAT_TOOLS = [
    {"type": "function", "function": {key: tool[key] for key in tool if key != "type"}}
    for tool in TOOLS
]


def call(name: str, arguments: str) -> str:
    """Carry out a tool call."""
    return FUNCTIONS[name](**json.loads(arguments))


def final(text: object) -> None:
    """Tell a final output."""
    sys.stdout.write(f"FINAL {json.dumps(str(text))}\n")
    sys.stdout.flush()
