"""qwen-code, which speaks Chat Completions only, with the second prompt in a new process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from agent import AGAIN, BASE_URL, HOME, PROMPT, binary, model, run, tell, write

os.environ |= {"OPENAI_BASE_URL": BASE_URL, "OPENAI_MODEL": model("gpt-5.2")}
SETTINGS = {
    "security": {"auth": {"selectedType": "openai"}},
    "telemetry": {"enabled": False},
    "privacy": {"usageStatisticsEnabled": False},
    "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
    "$version": 4,
}
write(HOME / ".qwen" / "settings.json", SETTINGS)
tell(run(binary("qwen"), "-y", PROMPT))
tell(run(binary("qwen"), "-y", "-c", AGAIN))
