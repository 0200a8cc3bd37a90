"""Open Interpreter on Chat Completions, always streamed. MODE: functions or text."""

from __future__ import annotations

import json

from common import BASE_URL, KEY, MODE, MODEL, PROMPTS, final
from interpreter import interpreter

interpreter.offline = True
interpreter.auto_run = True
interpreter.disable_telemetry = True
interpreter.llm.model = f"openai/{MODEL}"
interpreter.llm.api_base = BASE_URL
interpreter.llm.api_key = KEY
interpreter.llm.context_window = 100_000
interpreter.llm.max_tokens = 2000
interpreter.llm.supports_functions = MODE == "functions"
for prompt in PROMPTS:
    messages = interpreter.chat(prompt, display=False, stream=False)
    final(json.dumps(messages[-1]["content"]))
