"""The `llm` command, a process a prompt, with its database. MODE: stream, plain."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from common import INSTRUCTIONS, MODE, MODEL, PROMPTS, final

FUNCTIONS = """
def get_weather(city: str, unit: str = "c") -> str:
    "Get the current weather for a city."
    return f"{city}: 21 <sunny>"

def add(a: float, b: float) -> str:
    "Add two numbers."
    return str(a + b)
"""
os.environ["LLM_USER_PATH"] = str(Path(os.environ["HOME"]) / "llm")
command = [str(Path(sys.executable).parent / "llm"), "--functions", FUNCTIONS]
command += ["--no-stream"] if MODE == "plain" else []
for number, prompt in enumerate(PROMPTS):
    more = ["-c"] if number else ["-m", MODEL, "-s", INSTRUCTIONS]
    done = subprocess.run(
        [*command, *more, prompt],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(done.stderr)
    final(done.stdout)
