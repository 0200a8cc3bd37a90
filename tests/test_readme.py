"""
README.md says what the program says: generated tables, and commands that are there.

`python tests/test_readme.py` writes the tables anew.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proxy import config
from proxy.core import chat_fields, reasons
from proxy.observe import metrics

README = Path(__file__).parents[1] / "README.md"

TABLES = {
    "settings": config.reference_table,
    "metrics": metrics.reference_table,
    "reasons": reasons.reference_table,
    "chat-fields": chat_fields.reference_table,
}


def marked(name: str) -> re.Pattern[str]:
    """Return the pattern of what stands between the markers of a table."""
    return re.compile(f"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)


def written(text: str, name: str) -> str:
    """Return README's text with one table as the program has it."""
    table = TABLES[name]().strip()
    return marked(name).sub(lambda match: f"{match[1]}\n{table}\n\n{match[2]}", text)


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_those_of_the_program(name):
    """Each generated table stands in README exactly as the program makes it."""
    text = README.read_text(encoding="utf-8")

    assert marked(name).search(text)
    assert written(text, name) == text


def test_the_first_two_blocks_are_the_two_commands():
    """A newcomer's first `sh` block runs the demo, the second the tests."""
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)

    assert "turnwire demo" in blocks[0]
    assert "/pytest" in blocks[1]


if __name__ == "__main__":
    content = README.read_text(encoding="utf-8")
    for each in TABLES:
        content = written(content, each)
    README.write_text(content, encoding="utf-8")
