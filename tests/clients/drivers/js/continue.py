"""Continue's command-line agent, with the second prompt in a resumed session."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from agent import AGAIN, BASE_URL, HOME, KEY, PROMPT, binary, model, run, tell, write

SETTINGS = HOME / "settings.yaml"
os.environ |= {
    "CONTINUE_TELEMETRY_ENABLED": "0",
    "CONTINUE_METRICS_ENABLED": "0",
    "CONTINUE_CLI_DISABLE_COMMIT_SIGNATURE": "1",
}
(HOME / ".continue").mkdir()
write(
    SETTINGS,
    f"""name: turnwire
version: 1.0.0
schema: v1
models:
  - name: simulated
    provider: openai
    model: {model("gpt-5.2")}
    apiBase: {BASE_URL}
    apiKey: {KEY}
    roles: [chat, edit]
    capabilities: [tool_use]
""",
)
COMMAND = (binary("cn"), "--config", str(SETTINGS), "--auto")
tell(run(*COMMAND, "-p", PROMPT))
tell(run(*COMMAND, "--resume", "-p", AGAIN))
