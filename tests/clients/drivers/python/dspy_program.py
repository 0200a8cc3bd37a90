"""
DSPy on Chat Completions, with native tool calls: one prediction a prompt, each a request anew.

Its text protocol wants answers in a form that the simulator does not write. MODE: native.
"""

from __future__ import annotations

import dspy
from common import BASE_URL, KEY, MODEL, PROMPTS, add, final, get_weather


class Choose(dspy.Signature):
    """Choose the tools to use."""

    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    outputs: dspy.ToolCalls = dspy.OutputField()


model = dspy.LM(f"openai/{MODEL}", api_base=BASE_URL, api_key=KEY, cache=False)
adapter = dspy.ChatAdapter(use_native_function_calling=True)
with dspy.context(lm=model, adapter=adapter):
    for prompt in PROMPTS:
        found = dspy.Predict(Choose)(
            question=prompt, tools=[dspy.Tool(get_weather), dspy.Tool(add)]
        )
        final([(call.name, call.args) for call in found.outputs.tool_calls])
