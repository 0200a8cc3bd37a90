"""A client of the Agent Client Protocol: JSON-RPC on the agent's standard input and output."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent import tell

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_NO_SUCH_METHOD = {"code": -32601, "message": "not here"}


class AcpAgent:
    """An agent that was started; `text` is what it has said since the last prompt."""

    def __init__(self, command: Sequence[str]) -> None:
        self.text = ""
        self._number = 0
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def call(self, method: str, **params: Any) -> Any:
        """Call a method; serve the agent's own requests until the result is there."""
        self._number += 1
        self._send({"id": self._number, "method": method, "params": params})
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if message.get("id") == self._number and "method" not in message:
                if "error" in message:
                    raise RuntimeError(json.dumps(message["error"]))
                return message["result"]
            self._serve(message)
        raise RuntimeError(f"the agent ended during {method}")

    def end(self) -> None:
        """Stop the agent."""
        self._process.terminate()
        self._process.wait()

    def _serve(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "session/update":
            update = params["update"]
            if update.get("sessionUpdate") == "agent_message_chunk":
                self.text += update.get("content", {}).get("text", "")
        elif message.get("method") == "session/request_permission":
            options = params["options"]
            allowed = next((o for o in options if "allow" in o["kind"]), options[0])
            outcome = {"outcome": "selected", "optionId": allowed["optionId"]}
            self._send({"id": message["id"], "result": {"outcome": outcome}})
        elif "id" in message and "method" in message:
            self._send({"id": message["id"], "error": _NO_SUCH_METHOD})

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        self._process.stdin.flush()


def converse(command: Sequence[str], prompts: Iterable[str]) -> None:
    """All prompts in one session of one process; tell what the agent says to each."""
    agent = AcpAgent(command)
    try:
        agent.call("initialize", protocolVersion=1, clientCapabilities={})
        session = agent.call("session/new", cwd=str(Path.cwd()), mcpServers=[])["sessionId"]
        for prompt in prompts:
            agent.text = ""
            part = {"type": "text", "text": prompt}
            agent.call("session/prompt", sessionId=session, prompt=[part])
            tell(agent.text)
    finally:
        agent.end()
