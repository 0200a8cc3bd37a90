"""
pi. MODE: `print` (each prompt in a process of its own) or `rpc` (both in one process).

API: chat for Chat Completions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from agent import AGAIN, BASE_URL, CHAT, HOME, KEY, MODE, PROMPT, binary, model, run, tell, write

NAME = model("gpt-5.2")
COSTS = {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}
MODEL = {
    "id": NAME,
    "name": "simulated",
    "reasoning": True,
    "input": ["text"],
    "contextWindow": 200_000,
    "maxTokens": 32_000,
    "cost": COSTS,
}
API = "openai-completions" if CHAT else "openai-responses"
PROVIDER = {"baseUrl": BASE_URL, "api": API, "apiKey": KEY, "models": [MODEL]}
COMMAND = (binary("pi"), "--provider", "turnwire", "--model", NAME)


def converse() -> None:
    """Both prompts in one process, by its RPC mode."""
    with subprocess.Popen(
        [*COMMAND, "--mode", "rpc"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for prompt in (PROMPT, AGAIN):
            process.stdin.write(json.dumps({"type": "prompt", "message": prompt}) + "\n")
            process.stdin.flush()
            said: list[str] = []
            for line in process.stdout:
                event = json.loads(line)
                if event.get("type") == "message_end":
                    said = [text_of(event["message"])]
                if event.get("type") == "agent_end":
                    break
            tell("".join(said))
        process.stdin.close()
        process.terminate()


def text_of(message: dict[str, object]) -> str:
    """The text of a message."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts)


os.environ |= {"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"}
write(HOME / ".pi" / "agent" / "models.json", {"providers": {"turnwire": PROVIDER}})
if MODE == "rpc":
    converse()
else:
    tell(run(*COMMAND, "-p", PROMPT))
    tell(run(*COMMAND, "-c", "-p", AGAIN))
