"""smolagents on Chat Completions. MODE: tools, stream (ToolCallingAgent), code, structured."""

from __future__ import annotations

import common
from common import BASE_URL, KEY, MODE, MODEL, PROMPTS, final
from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool


@tool
def get_weather(city: str, unit: str) -> str:
    """
    Get the current weather for a city.

    Args:
        city: City name
        unit: c or f
    """
    return common.get_weather(city, unit)


@tool
def add(a: float, b: float) -> str:
    """
    Add two numbers.

    Args:
        a: first
        b: second
    """
    return common.add(a, b)


model = OpenAIServerModel(model_id=MODEL, api_base=BASE_URL, api_key=KEY)
kind = CodeAgent if MODE in ("code", "structured") else ToolCallingAgent
options = {"stream_outputs": True} if MODE == "stream" else {}
if MODE == "structured":
    options = {"use_structured_outputs_internally": True}
agent = kind(tools=[get_weather, add], model=model, max_steps=3, verbosity_level=0, **options)
for number, prompt in enumerate(PROMPTS):
    final(agent.run(prompt, reset=not number))
