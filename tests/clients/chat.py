"""
The rows of clients on Chat Completions, which Turnwire translates.

Most of them are the clients of the other rows, asked for the other endpoint. What the proxy answers
with plain HTTP is a row too: its mode is `http`, and its reason is excused.
"""

from __future__ import annotations

from typing import Any

from clients import npm, pip
from clients.rows import Client, Ecosystem, Row, Same
from proxy.core.reasons import Reason


def _library(name: str, client: Client, variant: str, driver: str, **more: Any) -> Row:
    """A row of a library; the environment is written as `NAME=value NAME=value`."""
    return _row(name, client, variant, driver, same=Same.ALL, **more)


def _row(
    name: str, client: Client, variant: str, driver: str, environment: str = "", **more: Any
) -> Row:
    pairs = dict(pair.split("=", 1) for pair in f"API=chat {environment}".split())
    place = "js" if client.ecosystem is Ecosystem.NPM else "python"
    words = f"Chat Completions, {variant}" if variant else "Chat Completions"
    return Row(f"{name}-chat", client, words, f"{place}/{driver}", pairs, **more)


def _pip(name: str, title: str, *packages: str) -> Client:
    return Client(name, title, packages, Ecosystem.PIP)


QWEN = Client("qwen", "qwen-code", ("@qwen-code/qwen-code@0.24.4",), Ecosystem.NPM)
AI_SDK_COMPATIBLE = Client(
    "ai-sdk-compatible",
    "Vercel AI SDK, openai-compatible",
    ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7"),
    Ecosystem.NPM,
)
AIDER = _pip("aider", "aider", "aider-chat==0.86.2")
SMOLAGENTS = _pip("smolagents", "smolagents", "smolagents==1.26.0", "openai==3.57.0")
OPEN_INTERPRETER = _pip(
    "open-interpreter", "Open Interpreter", "open-interpreter==0.4.3", "setuptools==79.0.1"
)
GOOGLE_ADK = _pip("google-adk", "Google ADK", "google-adk==2.13.0", "litellm==1.110.2")
# Its requests are rewritten from prompt to prompt, so each is a conversation of its own.
DSPY = _pip("dspy", "DSPy", "dspy==3.4.1")

_DROPS_TEXT = {Reason.TEXT_DROPPED: "it drops the text beside tool calls"}
_REWRITTEN = {
    "llamaindex": {
        Reason.ANSWER_CHANGED: "an answer that is not in its form of thoughts and actions is asked"
        " for again, and comes back rewritten"
    },
    "aider": {
        Reason.UNKNOWN_HISTORY: "each request has examples before it, and the files and a reminder"
        " behind it, anew"
    },
    "smolagents": {
        Reason.ANSWER_CHANGED: "a call comes back as text, and its output as a user's message",
        Reason.UNKNOWN_HISTORY: "its last step is asked for in other words and without tools",
    },
    "open-interpreter": {
        Reason.ANSWER_CHANGED: "calls get ids of its own, and of two calls one is dropped"
    },
    "qwen": {Reason.UNKNOWN_HISTORY: "resumed in a new process, it has another first message"},
}
# The instructions are the first message here.
_HANDED_ON = {Reason.UNKNOWN_HISTORY: "another agent has other instructions and tools"}
_NAMED = {Reason.UNTRANSLATABLE: "its messages have a `name`, for which Responses has no place"}

_PYTHON_ROWS = (
    *(
        _library(
            f"openai-python-{mode}",
            pip.OPENAI,
            words,
            "openai_python_chat.py",
            environment=f"MODE={mode}",
        )
        for mode, words in (
            ("create", "hand loop, not streamed"),
            ("stream", "`chat.completions.stream()` helper"),
            ("dump", "history as `model_dump()`"),
            ("async", "asynchronous client"),
        )
    ),
    *(
        _library(
            f"openai-agents-{mode}",
            pip.AGENTS,
            words,
            "openai_agents.py",
            environment=f"MODE={mode}",
            excuses=_HANDED_ON if mode == "handoff" else {},
        )
        for mode, words in (
            ("list", "history passed on"),
            ("stream", "streamed"),
            ("session", "SQLiteSession"),
            ("structured", "structured output"),
            ("handoff", "handoff to another agent"),
            ("parallel", "three conversations at once"),
        )
    ),
    *(
        _library(
            f"langchain-{name}",
            pip.LANGCHAIN,
            words,
            "langchain_python.py",
            environment=environment,
        )
        for name, words, environment in (
            ("react", "create_react_agent", "MODE=react"),
            ("stream", "create_react_agent, streamed", "MODE=react STREAM=1"),
            ("create", "create_agent", "MODE=create"),
            ("v1", "output version v1", "MODE=react VERSION=v1"),
        )
    ),
    *(
        _library(
            f"pydantic-ai-{mode}",
            pip.PYDANTIC_AI,
            words,
            "pydantic_ai_agent.py",
            environment=f"MODE={mode}",
        )
        for mode, words in (
            ("run", "default"),
            ("stream", "streamed"),
            ("json", "history kept as JSON"),
            ("prompt", "system prompt"),
            ("native", "structured output"),
        )
    ),
    *(
        _library(
            f"litellm-{mode}", pip.LITELLM, words, "litellm_sdk.py", environment=f"MODE={mode}"
        )
        for mode, words in (
            ("chat", "completion()"),
            ("chat-stream", "completion(), streamed"),
            ("chat-dump", "completion(), history as `model_dump()`"),
            ("chat-async", "acompletion()"),
        )
    ),
    _library(
        "litellm-chat-effort",
        pip.LITELLM,
        "completion(), `reasoning_effort`",
        "litellm_sdk.py",
        environment="MODE=chat EFFORT=low",
    ),
    *(
        _library(
            f"llamaindex-{mode}",
            pip.LLAMAINDEX,
            words,
            "llamaindex_agent.py",
            environment=f"MODE={mode}",
            excuses=_REWRITTEN["llamaindex"] if mode == "react" else {},
        )
        for mode, words in (
            ("memory", "FunctionAgent with Memory"),
            ("plain", "not streamed"),
            ("react", "ReActAgent"),
        )
    ),
    *(
        _library(
            f"autogen-{mode}",
            pip.AUTOGEN,
            words,
            "autogen_agent.py",
            environment=f"MODE={mode}",
            excuses=_NAMED,
        )
        for mode, words in (
            ("run", "AssistantAgent"),
            ("stream", "AssistantAgent, streamed"),
            ("reflect", "AssistantAgent, reflecting"),
        )
    ),
    *(
        _library(
            f"crewai-{mode}",
            pip.CREWAI,
            words,
            "crewai_crew.py",
            environment=f"MODE={mode}",
            prompts=1,
            excuses=_DROPS_TEXT,
        )
        for mode, words in (("plain", "one task"), ("stream", "one task, streamed"))
    ),
    *(
        _library(f"agno-{mode}", pip.AGNO, words, "agno_agent.py", environment=f"MODE={mode}")
        for mode, words in (("run", "default"), ("stream", "streamed"))
    ),
    *(
        _library(
            f"haystack-{mode}", pip.HAYSTACK, words, "haystack_agent.py", environment=f"MODE={mode}"
        )
        for mode, words in (("run", "Agent"), ("stream", "streamed"))
    ),
    *(
        _library(
            f"semantic-kernel-{mode}",
            pip.SEMANTIC_KERNEL,
            words,
            "semantic_kernel_agent.py",
            environment=f"MODE={mode}",
            excuses=_NAMED,
        )
        for mode, words in (("run", "ChatCompletionAgent"), ("stream", "streamed"))
    ),
    _library("strands", pip.STRANDS, "OpenAIModel", "strands_agent.py"),
    _row(
        "openhands",
        pip.OPENHANDS,
        "terminal tool",
        "openhands_agent.py",
        environment="MODEL=gpt-4o",
    ),
    _row("mini-swe-agent", pip.MINI_SWE_AGENT, "one task", "mini_swe_agent_cli.py", prompts=1),
    *(
        _library(
            f"llm-{mode}", pip.LLM, words, "llm_cli.py", environment=f"MODE={mode} MODEL=gpt-4.1"
        )
        for mode, words in (("stream", "second prompt in a new process"), ("plain", "not streamed"))
    ),
    *(
        _library(
            f"agent-framework-{mode}",
            pip.AGENT_FRAMEWORK,
            words,
            "agent_framework_agent.py",
            environment=f"MODE={mode}",
            excuses=_NAMED,
        )
        for mode, words in (("run", "default"), ("stream", "streamed"))
    ),
    *(
        _library(
            f"instructor-{mode.lower().replace('_', '-')}",
            pip.INSTRUCTOR,
            f"{mode}, asked again",
            "instructor_client.py",
            environment=f"MODE={mode}",
            prompts=1,
        )
        for mode in ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA")
    ),
    *(
        _row(
            f"aider-{mode}",
            AIDER,
            words,
            "aider_cli.py",
            environment=f"MODE={mode}",
            excuses=_REWRITTEN["aider"],
            openings=0,
        )
        for mode, words in (("stream", "second prompt in a new process"), ("plain", "not streamed"))
    ),
    *(
        _library(
            f"smolagents-{mode}",
            SMOLAGENTS,
            words,
            "smolagents_agent.py",
            environment=f"MODE={mode}",
            excuses=_REWRITTEN["smolagents"],
        )
        for mode, words in (
            ("tools", "ToolCallingAgent"),
            ("stream", "ToolCallingAgent, streamed"),
            ("code", "CodeAgent"),
            ("structured", "CodeAgent, structured output"),
        )
    ),
    *(
        _row(
            f"open-interpreter-{mode}",
            OPEN_INTERPRETER,
            mode,
            "open_interpreter_agent.py",
            environment=f"MODE={mode}",
            excuses=_REWRITTEN["open-interpreter"] if mode == "functions" else {},
        )
        for mode in ("functions", "text")
    ),
    _library("google-adk", GOOGLE_ADK, "LiteLlm", "google_adk_agent.py"),
    _library("dspy", DSPY, "Predict with native tool calls", "dspy_program.py"),
)

_NPM_ROWS = (
    *(
        _library(
            f"openai-node-{mode}",
            npm.OPENAI_NODE,
            words,
            "openai_node_chat.mjs",
            environment=f"MODE={mode}",
        )
        for mode, words in (
            ("create", "hand loop, not streamed"),
            ("stream", "`chat.completions.stream()` helper"),
            ("tools", "`runTools()` helper"),
        )
    ),
    *(
        _library(
            f"{client.name}-{mode}",
            client,
            "streamText" if mode == "stream" else "generateText",
            "ai_sdk.mjs",
            environment=f"MODE={mode} SYSTEM={system}",
        )
        for client, system in (
            (npm.AI_SDK_7, "instructions"),
            (npm.AI_SDK_6, "system"),
            (npm.AI_SDK_5, "system"),
        )
        for mode in ("stream", "generate")
    ),
    *(
        _library(
            f"ai-sdk-compatible-{mode}",
            AI_SDK_COMPATIBLE,
            "streamText" if mode == "stream" else "generateText",
            "ai_sdk.mjs",
            environment=f"MODE={mode} MODEL_PROVIDER=compatible",
        )
        for mode in ("stream", "generate")
    ),
    *(
        _library(
            f"openai-agents-js-{name}",
            npm.AGENTS,
            words,
            "openai_agents.mjs",
            environment=environment,
        )
        for name, words, environment in (
            ("run", "history passed on, not streamed", "MODE=run"),
            ("stream", "history passed on, streamed", "MODE=stream"),
        )
    ),
    *(
        _library(
            f"langchain-js-{name}",
            npm.LANGCHAIN,
            words,
            "langchain.mjs",
            environment=environment,
            excuses=_NAMED if name == "agent" else {},
        )
        for name, words, environment in (
            ("agent", "createAgent", "MODE=agent"),
            ("loop", "hand loop", "MODE=loop"),
        )
    ),
    *(
        _library(f"mastra-{mode}", npm.MASTRA, mode, "mastra.mjs", environment=f"MODE={mode}")
        for mode in ("stream", "generate")
    ),
    _row(
        "qwen",
        QWEN,
        "second prompt in a new process",
        "qwen.py",
        excuses=_REWRITTEN["qwen"],
    ),
    _row(
        "opencode",
        npm.OPENCODE,
        "second prompt in a new process",
        "opencode.py",
        environment="CLI=opencode",
    ),
    _row("pi", npm.PI, "second prompt in a new process", "pi.py"),
    _row("cline", npm.CLINE, "one prompt", "cline.py", prompts=1),
    _row("continue", npm.CONTINUE, "resumed", "continue.py", environment="MODEL=gpt-4.1"),
    _row("copilot", npm.COPILOT, "own provider, resumed", "copilot.py"),
    _row("droid", npm.DROID, "one prompt", "droid.py", prompts=1),
)

ROWS: tuple[Row, ...] = (*_NPM_ROWS, *_PYTHON_ROWS)
