"""Cline's command-line agent. It takes one prompt a run. API: chat for Chat Completions."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from agent import BASE_URL, CHAT, KEY, PROMPT, binary, model, run, tell

NAME = model("gpt-5.2")
PROVIDER = "openai-compatible" if CHAT else "openai-native"
os.environ |= {"CLINE_TELEMETRY_DISABLED": "1", "CLINE_NO_AUTO_UPDATE": "1"}

run(binary("cline"), "auth", "-p", PROVIDER, "-k", KEY, "-m", NAME, "-b", BASE_URL)
tell(run(binary("cline"), "-P", PROVIDER, "-m", NAME, PROMPT))
