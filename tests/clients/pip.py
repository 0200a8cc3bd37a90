"""The rows of clients that are Python packages."""

from __future__ import annotations

from typing import Any

from clients.rows import Client, Ecosystem, NotRun, Row, Same
from proxy.core.reasons import Reason


def _client(name: str, title: str, *packages: str, python: tuple[int, int] = (3, 11)) -> Client:
    return Client(name, title, packages, Ecosystem.PIP, python)


def _row(
    name: str, client: Client, variant: str, driver: str, environment: str = "", **more: Any
) -> Row:
    """A row; the environment is written as `NAME=value NAME=value`."""
    pairs = dict(pair.split("=", 1) for pair in environment.split())
    options = {"same": Same.ALL, **more}
    return Row(name, client, variant, f"python/{driver}", pairs, **options)


OPENAI = _client("openai-python", "openai (Python)", "openai==3.57.0")

_OPENAI_ROWS = tuple(
    _row(f"openai-python{suffix}", OPENAI, variant, "openai_python.py", environment)
    for suffix, variant, environment in (
        ("-stream", "hand loop, streamed, store:false", "MODE=stream STATELESS=1"),
        ("-create", "hand loop, not streamed", "MODE=create"),
        ("-items", "items kept from the stream", "MODE=items STATELESS=1"),
        ("-helper", "`responses.stream()` helper", "MODE=helper STATELESS=1"),
        ("-parse", "`responses.parse()` helper", "MODE=parse"),
        ("-dump", "history as `model_dump()`", "MODE=dump STATELESS=1"),
        ("-async", "asynchronous client", "MODE=async"),
    )
)

AGENTS = _client("openai-agents", "OpenAI Agents (Python)", "openai-agents==0.24.0")
LANGCHAIN = _client(
    "langchain",
    "LangChain (Python)",
    "langchain-openai==1.7.4",
    "langchain==1.5.2",
    "langgraph==1.2.24",
)
PYDANTIC_AI = _client("pydantic-ai", "pydantic-ai", "pydantic-ai-slim[openai]==2.68.0")
LITELLM = _client("litellm", "litellm SDK", "litellm==1.110.2")
LLAMAINDEX = _client(
    "llamaindex", "LlamaIndex", "llama-index-llms-openai==0.8.3", "llama-index-core==0.14.25"
)
AUTOGEN = _client("autogen", "AutoGen", "autogen-ext[openai]==0.7.5", "autogen-agentchat==0.7.5")
CREWAI = _client("crewai", "crewAI", "crewai==1.15.30")
AGNO = _client("agno", "agno", "agno==3.1.10", "openai==3.57.0")
HAYSTACK = _client("haystack", "Haystack", "haystack-ai==3.4.1")
SEMANTIC_KERNEL = _client("semantic-kernel", "Semantic Kernel", "semantic-kernel==1.45.0")
STRANDS = _client("strands", "Strands Agents", "strands-agents[openai]==1.62.0")
OPENHANDS = _client(
    "openhands",
    "OpenHands SDK",
    "openhands-sdk==1.58.2",
    "openhands-tools==1.58.2",
    python=(3, 12),
)
MINI_SWE_AGENT = _client("mini-swe-agent", "mini-swe-agent", "mini-swe-agent==2.4.6")
LLM = _client("llm", "llm", "llm==0.36")
AGENT_FRAMEWORK = _client(
    "agent-framework",
    "Agent Framework",
    "agent-framework-openai==1.17.0",
    "agent-framework-core==1.23.0",
)
INSTRUCTOR = _client("instructor", "instructor", "instructor==1.17.0")

_HANDED_ON = {Reason.CHANGED_INSTRUCTIONS: "another agent has other instructions and tools"}
_AGENTS_EXCUSES = {
    "handoff": _HANDED_ON,
    "nested": {**_HANDED_ON, Reason.UNKNOWN_HISTORY: "the history is replaced by one text"},
}

_AGENTS_ROWS = tuple(
    _row(
        f"openai-agents-{mode}",
        AGENTS,
        variant,
        "openai_agents.py",
        f"MODE={mode}",
        excuses=_AGENTS_EXCUSES.get(mode, {}),
    )
    for mode, variant in (
        ("list", "history passed on"),
        ("stream", "streamed"),
        ("stateless", "store:false"),
        ("session", "SQLiteSession"),
        ("nameless", "reasoning without ids"),
        ("previous", "chained by itself"),
        ("required", "tool_choice required"),
        ("structured", "structured output"),
        ("handoff", "handoff to another agent"),
        ("nested", "handoff, history nested"),
        ("parallel", "three conversations at once"),
        ("tool", "an agent as a tool"),
    )
)

_LANGCHAIN_ROWS = tuple(
    _row(f"langchain-{name}", LANGCHAIN, variant, "langchain_python.py", environment)
    for name, variant, environment in (
        ("react", "create_react_agent", "MODE=react"),
        ("stream", "create_react_agent, streamed", "MODE=react STREAM=1"),
        ("create", "create_agent", "MODE=create"),
        ("v0", "output version v0", "MODE=react VERSION=v0 STATELESS=1"),
        (
            "responses-v1",
            "output version responses/v1",
            "MODE=react VERSION=responses/v1 STATELESS=1",
        ),
        ("v1", "output version v1", "MODE=react VERSION=v1 STATELESS=1"),
        ("v1-stream", "output version v1, streamed", "MODE=react VERSION=v1 STATELESS=1 STREAM=1"),
        ("previous", "chained by itself", "MODE=previous"),
    )
)

_PYDANTIC_AI_ROWS = tuple(
    _row(
        f"pydantic-ai-{mode}",
        PYDANTIC_AI,
        variant,
        "pydantic_ai_agent.py",
        f"MODE={mode}",
        excuses={Reason.ANSWER_CHANGED: "reasoning comes back as text of the assistant"}
        if mode == "nameless"
        else {},
    )
    for mode, variant in (
        ("run", "default"),
        ("stream", "streamed"),
        ("stateless", "store:false"),
        ("nameless", "reasoning sent as text"),
        ("previous", "chained by itself"),
        ("json", "history kept as JSON"),
        ("prompt", "system prompt"),
        ("native", "structured output"),
    )
)

_LITELLM_ROWS = tuple(
    _row(f"litellm-{name}", LITELLM, variant, "litellm_sdk.py", environment)
    for name, variant, environment in (
        ("responses", "responses()", "MODE=responses"),
        ("stream", "responses(), streamed, store:false", "MODE=stream STATELESS=1"),
        ("dump", "responses(), history as `model_dump()`", "MODE=dump"),
        ("bridge", "completion() bridged to Responses", "MODE=bridge"),
        ("bridge-stream", "completion() bridged, streamed", "MODE=bridge-stream"),
    )
)

_LLAMAINDEX_ROWS = tuple(
    _row(f"llamaindex-{mode}", LLAMAINDEX, variant, "llamaindex_agent.py", f"MODE={mode}")
    for mode, variant in (
        ("memory", "FunctionAgent with Memory"),
        ("forgetful", "FunctionAgent without Memory"),
        ("stateless", "store:false"),
        ("plain", "not streamed"),
        ("track", "chained by itself"),
    )
)

_DROPS_TEXT = {Reason.TEXT_DROPPED: "it drops the text beside tool calls"}

_CREWAI_ROWS = tuple(
    _row(
        f"crewai-{mode}",
        CREWAI,
        variant,
        "crewai_crew.py",
        f"MODE={mode}",
        prompts=1,
        excuses=_DROPS_TEXT if mode == "stateless" else {},
    )
    for mode, variant in (
        ("plain", "one task"),
        ("stateless", "one task, store:false"),
        ("chain", "one task, chained by itself"),
    )
)

_AGNO_ROWS = tuple(
    _row(
        f"agno-{mode}",
        AGNO,
        variant,
        "agno_agent.py",
        f"MODE={mode}",
        excuses=_DROPS_TEXT if mode == "stateless" else {},
    )
    for mode, variant in (
        ("chained", "chained by itself"),
        ("stream", "chained by itself, streamed"),
        ("stateless", "store:false"),
        ("plain", "gpt-4.1"),
    )
)

_HAYSTACK_ROWS = tuple(
    _row(f"haystack-{mode}", HAYSTACK, variant, "haystack_agent.py", f"MODE={mode}")
    for mode, variant in (("run", "Agent"), ("stream", "streamed"), ("stateless", "store:false"))
)

_SEMANTIC_KERNEL_ROWS = tuple(
    _row(
        f"semantic-kernel-{mode}",
        SEMANTIC_KERNEL,
        variant,
        "semantic_kernel_agent.py",
        f"MODE={mode}",
        excuses={Reason.UNKNOWN_HISTORY: "its rounds of tools vanish at the next prompt"}
        if mode == "stateless"
        else {},
    )
    for mode, variant in (("chained", "chained by itself"), ("stateless", "store:false"))
)

_STRANDS_ROWS = tuple(
    _row(f"strands-{mode}", STRANDS, variant, "strands_agent.py", f"MODE={mode}")
    for mode, variant in (("default", "default"), ("stateless", "store:false"))
)

_AGENT_FRAMEWORK_ROWS = tuple(
    _row(
        f"agent-framework-{mode}",
        AGENT_FRAMEWORK,
        variant,
        "agent_framework_agent.py",
        f"MODE={mode}",
    )
    for mode, variant in (
        ("chained", "chained by itself"),
        ("stream", "chained by itself, streamed"),
        ("stateless", "store:false"),
    )
)

ROWS: tuple[Row, ...] = (
    *_OPENAI_ROWS,
    *_AGENTS_ROWS,
    *_LANGCHAIN_ROWS,
    *_PYDANTIC_AI_ROWS,
    *_LITELLM_ROWS,
    *_LLAMAINDEX_ROWS,
    _row("autogen", AUTOGEN, "OpenAIAgent, chained by itself", "autogen_agent.py"),
    *_CREWAI_ROWS,
    *_AGNO_ROWS,
    *_HAYSTACK_ROWS,
    *_SEMANTIC_KERNEL_ROWS,
    *_STRANDS_ROWS,
    _row("openhands", OPENHANDS, "terminal tool", "openhands_agent.py", same=Same.COUNTS),
    _row(
        "mini-swe-agent",
        MINI_SWE_AGENT,
        "one task",
        "mini_swe_agent_cli.py",
        prompts=1,
        same=Same.COUNTS,
    ),
    _row("llm", LLM, "second prompt in a new process", "llm_cli.py", "MODE=stream"),
    _row("llm-plain", LLM, "not streamed", "llm_cli.py", "MODE=plain"),
    *_AGENT_FRAMEWORK_ROWS,
    _row(
        "instructor",
        INSTRUCTOR,
        "structured answer, asked again",
        "instructor_client.py",
        prompts=1,
    ),
)

NOT_RUN: tuple[NotRun, ...] = ()
