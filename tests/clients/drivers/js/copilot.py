"""
GitHub's Copilot CLI with a provider of one's own and no login.

MODE: `print` (each prompt in a process of its own) or `acp` (three prompts in one process). API:
chat for Chat Completions.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from acp import converse
from agent import AGAIN, BASE_URL, CHAT, KEY, MODE, PROMPT, binary, model, run, tell

os.environ |= {
    "COPILOT_PROVIDER_BASE_URL": BASE_URL,
    "COPILOT_PROVIDER_TYPE": "openai",
    "COPILOT_PROVIDER_API_KEY": KEY,
    "COPILOT_PROVIDER_WIRE_API": "completions" if CHAT else "responses",
    "COPILOT_PROVIDER_TRANSPORT": "http",
    "COPILOT_MODEL": model("gpt-5.2"),
    "COPILOT_OFFLINE": "true",
    "COPILOT_AUTO_UPDATE": "false",
}
COMMAND = (
    binary("copilot"),
    "--allow-all-tools",
    "--allow-all-paths",
    "--disable-client-telemetry",
)
if MODE == "acp":
    converse([*COMMAND, "--acp"], (PROMPT, AGAIN, "Once more."))
else:
    tell(run(*COMMAND, "-p", PROMPT))
    tell(run(*COMMAND, "--continue", "-p", AGAIN))
