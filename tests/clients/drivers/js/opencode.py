"""
opencode, or Kilo, its fork, with the second prompt in a new process. CLI: opencode | kilo.

API: chat for Chat Completions, by the AI SDK's provider of compatible services.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from agent import AGAIN, BASE_URL, CHAT, HOME, KEY, PROMPT, binary, model, run, tell, write

CLI = os.environ["CLI"]
PROVIDER = "compatible" if CHAT else "openai"
NAME = f"{PROVIDER}/{model('gpt-5.2')}"
OPTIONS: dict[str, object] = {"options": {"baseURL": BASE_URL, "apiKey": KEY}}
if CHAT:
    limit = {"context": 200_000, "output": 32_000}
    known = {"name": "m", "tool_call": True, "reasoning": True, "limit": limit}
    OPTIONS |= {"npm": "@ai-sdk/openai-compatible", "name": PROVIDER}
    OPTIONS |= {"models": {model("gpt-5.2"): known}}
SETTINGS = {
    "$schema": "https://opencode.ai/config.json",
    "autoupdate": False,
    "share": "disabled",
    "model": NAME,
    "permission": {"*": "allow"},
    "provider": {PROVIDER: OPTIONS},
}
for prefix in ("OPENCODE", "KILO"):
    for switch in (
        "MODELS_FETCH",
        "AUTOUPDATE",
        "LSP_DOWNLOAD",
        "DEFAULT_PLUGINS",
    ):
        os.environ[f"{prefix}_DISABLE_{switch}"] = "1"
os.environ["KILO_TELEMETRY_DISABLED"] = "1"

write(HOME / ".config" / CLI / f"{CLI}.json", SETTINGS)
tell(run(binary(CLI), "run", "-m", NAME, PROMPT))
tell(run(binary(CLI), "run", "-m", NAME, "--continue", AGAIN))
