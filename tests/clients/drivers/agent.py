"""
What the drivers of command-line agents share: the prompts, running the agent, telling its output.

A driver writes the agent's settings into its own home, runs it once for each prompt, and tells what
the agent printed as its final output. It needs the standard library only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BASE_URL = os.environ["BASE_URL"]
HOME = Path(os.environ["HOME"])
KEY = os.environ["OPENAI_API_KEY"]
MODE = os.environ.get("MODE", "")
CHAT = os.environ.get("API") == "chat"  # Chat Completions in place of Responses
PROMPT = "Say hi with the shell, then say it twice more and finish."
AGAIN = "Again please."


def model(default: str) -> str:
    """The model that the row asks for."""
    return os.environ.get("MODEL", default)


def binary(name: str) -> str:
    """The agent's own command."""
    return str(Path(os.environ["CLIENT_DIR"]) / "node_modules" / ".bin" / name)


def write(path: Path, content: str | dict[str, object]) -> None:
    """Write a settings file; an object is written as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    path.write_text(text, encoding="utf-8")


def run(*command: str, **environment: str) -> str:
    """Run the agent; show what it says and return its standard output. Exits as it does."""
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    sys.stdout.write(f"$ {' '.join(command)[:300]}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n")
    sys.stdout.flush()
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def tell(text: str) -> None:
    """Tell a final output."""
    sys.stdout.write(f"FINAL {json.dumps(text)}\n")
    sys.stdout.flush()
