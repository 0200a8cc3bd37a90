"""Factory's droid with a model of one's own. It takes one prompt a run. API: chat."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from agent import BASE_URL, CHAT, HOME, KEY, PROMPT, binary, model, run, tell, write

NAME = model("gpt-5.2")
MODEL = {
    "model": NAME,
    "displayName": "simulated",
    "baseUrl": BASE_URL,
    "apiKey": KEY,
    "provider": "generic-chat-completion-api" if CHAT else "openai",
    "maxOutputTokens": 16_384,
}
os.environ |= {"FACTORY_API_KEY": "fk-none", "FACTORY_DISABLE_AUTO_UPDATE": "1"}

write(HOME / ".factory" / "settings.json", {"customModels": [MODEL]})
tell(run(binary("droid"), "exec", "--auto", "medium", "-m", f"custom:{NAME}", PROMPT))
