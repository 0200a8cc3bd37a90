"""The OpenHands SDK with its terminal and file tools."""

from __future__ import annotations

from pathlib import Path

from common import BASE_URL, KEY, MODEL, PROMPTS, final
from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.sdk.event import MessageEvent
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.terminal import TerminalTool
from pydantic import SecretStr

said: list[str] = []


def listen(event: object) -> None:
    """Keep the agent's messages."""
    if isinstance(event, MessageEvent) and event.source == "agent":
        said.append("".join(getattr(part, "text", "") for part in event.llm_message.content))


model = LLM(usage_id="agent", model=f"openai/{MODEL}", base_url=BASE_URL, api_key=SecretStr(KEY))
agent = Agent(llm=model, tools=[Tool(name=TerminalTool.name), Tool(name=FileEditorTool.name)])
conversation = Conversation(
    agent=agent, workspace=str(Path.cwd()), callbacks=[listen], visualizer=None
)
for prompt in PROMPTS:
    conversation.send_message(prompt)
    conversation.run()
    final(said[-1])
conversation.close()
