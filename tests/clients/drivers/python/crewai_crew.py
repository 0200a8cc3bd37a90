"""
crewAI; a crew has one task. MODE: plain, stateless, chain.

API: chat for Chat Completions, MODE: plain, stream.
"""

from __future__ import annotations

from typing import Any

from common import BASE_URL, CHAT, INSTRUCTIONS, KEY, MODE, MODEL, PROMPTS, add, final, get_weather
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

options: dict[str, Any] = {} if CHAT else {"api": "responses"}
if MODE == "stateless":
    options |= {"store": False, "include": ["reasoning.encrypted_content"]}
if MODE == "chain":
    options |= {"auto_chain": True}
if MODE == "stream":
    options |= {"stream": True}
model = LLM(model=f"openai/{MODEL}", base_url=BASE_URL, api_key=KEY, **options)
tools = [tool("get_weather")(get_weather), tool("add")(add)]
agent = Agent(
    role="Weather agent",
    goal="Compare weather",
    backstory=INSTRUCTIONS,
    llm=model,
    tools=tools,
    max_iter=8,
)
task = Task(description=PROMPTS[0], expected_output="a sentence", agent=agent)
final(Crew(agents=[agent], tasks=[task]).kickoff().raw)
