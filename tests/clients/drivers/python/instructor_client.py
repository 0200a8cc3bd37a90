"""
instructor in its Responses mode: an answer that does not validate is asked for again.

API: chat for Chat Completions, MODE: the name of instructor's own mode.
"""

from __future__ import annotations

import instructor
from common import CHAT, MODE, MODEL, PROMPTS, final
from openai import OpenAI
from pydantic import BaseModel, field_validator

tries: list[str] = []


class Answered(BaseModel):
    """What is asked for; the first answer never validates."""

    answer: str

    @field_validator("answer")
    @classmethod
    def is_second(cls, value: str) -> str:
        """Refuse the first answer."""
        tries.append(value)
        if len(tries) == 1:
            raise ValueError("say it again")
        return value


asked = [{"role": "user", "content": PROMPTS[0]}]
options = {"model": MODEL, "response_model": Answered, "max_retries": 2}
if CHAT:
    client = instructor.from_openai(OpenAI(), mode=instructor.Mode[MODE])
    found = client.chat.completions.create(messages=asked, **options)
else:
    client = instructor.from_openai(OpenAI(), mode=instructor.Mode.RESPONSES_TOOLS)
    found = client.responses.create(input=asked, **options)
final(found.answer)
