"""
mini-swe-agent's command on Responses. It ends when a command of its own says so, which the
simulator's never does: so it is given as many steps as the simulator has calls for.

API: chat for Chat Completions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from common import CHAT, MODEL, PROMPTS, final

HOME = Path(os.environ["HOME"])
TRAJECTORY = HOME / "trajectory.json"
STEPS = 3

environment = {
    **os.environ,
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_GLOBAL_CONFIG_DIR": str(HOME / "mini"),
}
command = [str(Path(sys.executable).parent / "mini"), "-m", f"openai/{MODEL}", "-t", PROMPTS[0]]
command += ["--yolo", "--exit-immediately", "-l", "0"]
command += ["--model-class", "litellm" if CHAT else "litellm_response"]
command += ["-c", "mini.yaml", "-c", f"agent.step_limit={STEPS}", "-o", str(TRAJECTORY)]
done = subprocess.run(
    command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
)
sys.stdout.write(done.stdout[-1500:] + done.stderr[-1500:])
messages = json.loads(TRAJECTORY.read_text(encoding="utf-8"))["messages"]
said = [message["content"] for message in messages if message.get("role") == "assistant"]
texts = (
    [text for text in said if text]
    if CHAT
    else [
        part["text"]
        for message in messages
        if isinstance(message.get("output"), list)
        for item in message["output"]
        if item.get("type") == "message"
        for part in item["content"]
    ]
)
final(texts[-1])
