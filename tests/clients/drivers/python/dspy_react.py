"""DSPy's ReAct on Responses: it rewrites its one user message at every step."""

from __future__ import annotations

import dspy
from common import BASE_URL, KEY, MODEL, PROMPTS, add, final, get_weather

model = dspy.LM(
    f"openai/{MODEL}",
    api_base=BASE_URL,
    api_key=KEY,
    cache=False,
    model_type="responses",
    temperature=1.0,
    max_tokens=16_000,
)
with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
    final(
        dspy.ReAct("question -> answer", tools=[get_weather, add], max_iters=3)(
            question=PROMPTS[0]
        ).answer
    )
