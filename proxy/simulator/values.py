"""
Text and tool arguments, grown from a digest.

`Dice` is the only source of chance here, and it has none: equal seeds give equal throws. So a
value tells which context it was grown from.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from proxy.simulator.meaning import digest
from proxy.simulator.wire import Json, dumps

_VOCABULARY = (
    "amber birch cedar delta ember fjord garnet harbor indigo juniper kernel lagoon maple "
    "nickel orchid pebble quartz raven saffron timber umber violet willow xenon yarrow zephyr "
    'Z\u00fcrich na\u00efve \u65e5\u672c \u2603 "quoted" back\\slash <tag> a&b tab\tstop'
)
_WORDS = _VOCABULARY.split(" ")
_PLAIN_WORDS = _WORDS[:26]
_DEPTH_LIMIT = 6
_COMMANDS = frozenset({"command", "cmd", "script", "code"})


@dataclass(frozen=True, slots=True)
class Dice:
    """Throws that depend on the seed and on a label alone."""

    seed: bytes

    def number(self, label: str, below: int) -> int:
        """An integer in [0, below)."""
        return int.from_bytes(digest(self.seed, label.encode())[:8], "big") % max(below, 1)

    def hex(self, label: str, length: int) -> str:
        """So many hexadecimal digits, at most 64."""
        first = digest(self.seed, label.encode())
        return (first + digest(first)).hex()[:length]

    def words(self, label: str, count: int) -> str:
        """So many words with single spaces, and a line break now and then."""
        throws: list[int] = []
        block = digest(self.seed, label.encode())
        while len(throws) < count:
            throws.extend(block)
            block = digest(block)
        words = [_WORDS[throw % len(_WORDS)] for throw in throws[:count]]
        return "".join(f"{word}\n" if i % 17 == 16 else f"{word} " for i, word in enumerate(words))


def pieces(text: str) -> list[str]:
    """The text in the portions that a model would stream: a word each with its white space."""
    return re.findall(r"\s*\S{1,12}|\s+", text)


def instance(schema: Json, dice: Dice, *, odd: bool = False) -> Json:
    """A value that a JSON schema describes, as far as its common keywords go."""
    definitions: dict[str, Json] = {}
    if isinstance(schema, dict):
        definitions = {**schema.get("definitions", {}), **schema.get("$defs", {})}
    return Grower(dice, definitions, odd).value(schema, "$", "", _DEPTH_LIMIT)


@dataclass(frozen=True, slots=True)
class Grower:
    """Grows values at paths of a schema; `errands` has one that takes more care."""

    dice: Dice
    definitions: dict[str, Json]
    odd: bool

    def value(self, schema: Json, path: str, name: str, depth: int) -> Json:
        """The value for a schema at a path; `name` is the property it stands under."""
        if not isinstance(schema, dict) or depth == 0:
            return self.text(path, name)
        if "$ref" in schema:
            target = self.definitions.get(str(schema["$ref"]).rsplit("/", 1)[-1], {})
            return self.value(target, path, name, depth - 1)
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return schema["enum"][self.dice.number(path, len(schema["enum"]))]
        for keyword in ("anyOf", "oneOf", "allOf"):
            if schema.get(keyword):
                return self.value(schema[keyword][0], path, name, depth - 1)
        return self.typed(schema, path, name, depth)

    def typed(self, schema: dict[str, Json], path: str, name: str, depth: int) -> Json:
        """The value for a schema that names a type, or implies `object`."""
        kind = schema.get("type", "object" if "properties" in schema else "string")
        if isinstance(kind, list):
            kind = next((each for each in kind if each != "null"), "null")
        match kind:
            case "object":
                return self.object(schema, path, depth)
            case "array":
                count = max(int(schema.get("minItems", 1)), 1)
                items = schema.get("items", {})
                return [self.value(items, f"{path}[{i}]", name, depth - 1) for i in range(count)]
            case "integer":
                return self.integer(schema, path)
            case "number":
                return schema.get("minimum", 0) + self.dice.number(path, 100) / 4
            case "boolean":
                return self.dice.number(path, 2) == 1
            case "null":
                return None
            case _:
                return self.text(path, name)

    def object(self, schema: dict[str, Json], path: str, depth: int) -> dict[str, Json]:
        """All required properties, and the others as the dice fall."""
        properties: dict[str, Any] = schema.get("properties", {})
        required = schema.get("required", list(properties))
        return {
            name: self.value(member, f"{path}.{name}", name, depth - 1)
            for name, member in properties.items()
            if name in required or self.dice.number(f"{path}?{name}", 2)
        }

    def integer(self, schema: dict[str, Json], path: str) -> int:
        """A small integer within the schema's bounds; beyond 64 bits when odd and unbounded."""
        low = int(schema.get("minimum", 1))
        if self.odd and "maximum" not in schema and self.dice.number(f"{path}#", 2):
            return 2**64 + self.dice.number(path, 1000)
        high = int(schema.get("maximum", low + 99))
        return low + self.dice.number(path, high - low + 1)

    def text(self, path: str, name: str) -> str:
        """A few words. What might be run by a real agent does nothing but echo."""
        word = _PLAIN_WORDS[self.dice.number(path, len(_PLAIN_WORDS))]
        tag = self.dice.hex(path, 6)
        if name in _COMMANDS:
            return f"echo {word} {tag}"
        if self.odd:
            return f"{word} Z\u00fcrich \u2603 {tag}"
        return f"{word} {tag}"


def write_arguments(value: Json, dice: Dice, *, odd: bool = False) -> str:
    """
    Arguments as a model writes them: compact, or when `odd` in one of the spellings that a client
    changes when it parses and writes them again.
    """
    if not odd:
        return dumps(value)
    match dice.number("spelling", 4):
        case 0:
            return json.dumps(value)
        case 1:
            return json.dumps(value, ensure_ascii=False, indent=1)
        case 2:
            return re.sub(r"(?<=:)(\d+)(?=[,}])", r"\1.0", dumps(value))
        case _:
            return dumps(value)
