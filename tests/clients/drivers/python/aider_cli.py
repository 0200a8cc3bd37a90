"""
aider's command on Chat Completions, with edits that its test finds wanting.

MODE: stream, plain. The simulator writes no edits, so what is asked for again is another answer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from common import BASE_URL, MODE, MODEL, PROMPTS, final

WORK = Path.cwd()
(WORK / "hello.py").write_text("x = 1\n", encoding="utf-8")
for arguments in (
    ("init", "-q"),
    ("config", "user.email", "a@b.c"),
    ("config", "user.name", "a"),
    ("add", "hello.py"),
    ("commit", "-qm", "start"),
):
    subprocess.run(["git", *arguments], cwd=WORK, check=True, capture_output=True)
environment = {
    **os.environ,
    "OPENAI_API_BASE": BASE_URL,
    "AIDER_ANALYTICS": "false",
    "AIDER_CHECK_UPDATE": "false",
}
command = [str(Path(sys.executable).parent / "aider"), "--model", f"openai/{MODEL}"]
command += ["--yes-always", "--no-show-model-warnings", "--no-check-update", "--analytics-disable"]
command += ["--no-gitignore", "--no-fancy-input", "--no-pretty", "--edit-format", "diff"]
command += ["--no-stream"] if MODE == "plain" else []
for number, prompt in enumerate(PROMPTS):
    more = ["--restore-chat-history"] if number else []
    done = subprocess.run(
        [*command, *more, "--message", prompt, "hello.py"],
        cwd=WORK,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    sys.stdout.write(done.stdout[-1500:] + done.stderr[-1500:])
    lines = [line for line in done.stdout.splitlines() if "[" in line]
    final(" ".join(lines))
