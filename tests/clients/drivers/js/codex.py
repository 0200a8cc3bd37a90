"""
OpenAI Codex CLI, its second prompt in a resumed session.

MODE: `provider` (one of our own in config.toml), `builtin` (the OpenAI provider with another base
URL) or `chatgpt` (a made-up login, whose requests are compressed). RESUME=0 for one prompt.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from agent import AGAIN, BASE_URL, HOME, KEY, MODE, PROMPT, binary, model, run, tell, write

CODEX_HOME = HOME / ".codex"
LAST_MESSAGE = HOME / "last.txt"
OPTIONS = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")


def settings() -> str:
    """config.toml for the mode."""
    name = model("gpt-5.2-codex")
    backend = BASE_URL.removesuffix("/v1") + "/backend-api/"
    chatgpt = f'chatgpt_base_url = "{backend}"\n' if MODE == "chatgpt" else ""
    if MODE == "builtin":
        return f'model = "{name}"\nopenai_base_url = "{BASE_URL}"\n'
    login = "requires_openai_auth = true" if chatgpt else 'env_key = "OPENAI_API_KEY"'
    title = "OpenAI" if chatgpt else "Turnwire"
    return (
        f'model = "{name}"\nmodel_provider = "turnwire"\n{chatgpt}'
        f'[model_providers.turnwire]\nname = "{title}"\nbase_url = "{BASE_URL}"\n{login}\n'
        f'wire_api = "responses"\nsupports_websockets = false\n[analytics]\nenabled = false\n'
    )


def login() -> dict[str, object]:
    """auth.json of an account that does not exist, with unsigned tokens."""
    account = "acc-00000000"
    claims = {
        "chatgpt_plan_type": "pro",
        "chatgpt_account_id": account,
        "chatgpt_user_id": "user-0",
    }
    now = int(time.time())
    payload = {
        "email": "nobody@example.com",
        "iat": now,
        "exp": now + 864_000,
        "sub": "user-0",
        "https://api.openai.com/auth": claims,
    }
    parts = [json.dumps(part).encode() for part in ({"alg": "none", "typ": "JWT"}, payload)]
    token = ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)
    token += ".c2ln"
    tokens = {"id_token": token, "access_token": token, "refresh_token": "r", "account_id": account}
    refreshed = time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime(now))
    return {
        "auth_mode": "chatgpt",
        "OPENAI_API_KEY": None,
        "tokens": tokens,
        "last_refresh": refreshed,
    }


def ask(*arguments: str) -> None:
    """One run of `codex exec`, and its last message."""
    environment = {"CODEX_HOME": str(CODEX_HOME)}
    if MODE != "chatgpt":
        environment["CODEX_API_KEY"] = KEY
    said = run(binary("codex"), "exec", *arguments, **environment)
    tell(LAST_MESSAGE.read_text(encoding="utf-8") if LAST_MESSAGE.exists() else said)
    LAST_MESSAGE.unlink(missing_ok=True)


write(CODEX_HOME / "config.toml", settings())
if MODE == "chatgpt":
    del os.environ["OPENAI_API_KEY"]
    write(CODEX_HOME / "auth.json", login())
message = ("--output-last-message", str(LAST_MESSAGE))
ask(*OPTIONS, *message, PROMPT)
if os.environ.get("RESUME") != "0":
    ask(*OPTIONS, *message, "resume", "--last", AGAIN)
