"""The rows of clients that are npm packages."""

from __future__ import annotations

from typing import Any

from clients.rows import Client, Ecosystem, NotRun, Row, Same
from proxy.core.reasons import Reason
from proxy.simulator import Calls


def _client(name: str, title: str, *packages: str) -> Client:
    return Client(name, title, packages, Ecosystem.NPM)


def _row(
    name: str, client: Client, variant: str, driver: str, environment: str = "", **more: Any
) -> Row:
    """A row; the environment is written as `NAME=value NAME=value`."""
    pairs = dict(pair.split("=", 1) for pair in environment.split())
    return Row(name, client, variant, f"js/{driver}", pairs, **more)


OPENAI_NODE = _client("openai-node", "openai (Node)", "openai@7.59.0")
AI_SDK_7 = _client("ai-sdk-7", "Vercel AI SDK", "ai@7.0.173", "@ai-sdk/openai@4.0.118", "zod@4.6.7")
AI_SDK_6 = _client("ai-sdk-6", "Vercel AI SDK", "ai@6.0.326", "@ai-sdk/openai@3.0.141", "zod@4.6.7")
AI_SDK_5 = _client("ai-sdk-5", "Vercel AI SDK", "ai@5.0.277", "@ai-sdk/openai@2.0.131", "zod@4.6.7")
CODEX = {
    version: _client(f"codex-{version}", "Codex CLI", f"@openai/codex@{version}")
    for version in ("0.171.0", "0.142.5", "0.120.0", "0.101.0", "0.80.0", "0.47.0")
}


_HANDED_ON = {Reason.CHANGED_INSTRUCTIONS: "another agent has other instructions and tools"}


def _library(
    name: str, client: Client, variant: str, driver: str, environment: str, **more: Any
) -> Row:
    return _row(name, client, variant, driver, environment, same=Same.ALL, **more)


_OPENAI_NODE_ROWS = tuple(
    _library(f"openai-node{suffix}", OPENAI_NODE, variant, "openai_node.mjs", environment)
    for suffix, variant, environment in (
        ("-stream", "hand loop, streamed, store:false", "MODE=stream STORE=false INCLUDE=1"),
        ("-create", "hand loop, not streamed", "MODE=create"),
        ("-helper", "`responses.stream()` helper", "MODE=helper"),
        ("-parse", "`responses.parse()` helper", "MODE=parse"),
    )
)

_AI_SDK_ROWS = tuple(
    _library(
        f"{client.name}-{mode}{suffix}",
        client,
        f"{'streamText' if mode == 'stream' else 'generateText'}, {words}",
        "ai_sdk.mjs",
        f"MODE={mode} SYSTEM={system}{store}",
    )
    for client, system in ((AI_SDK_7, "instructions"), (AI_SDK_6, "system"), (AI_SDK_5, "system"))
    for mode in ("stream", "generate")
    for suffix, words, store in (("", "default store", ""), ("-zdr", "store:false", " STORE=false"))
)

_CODEX_ROWS = (
    _row("codex", CODEX["0.171.0"], "own provider, resumed", "codex.py", "MODE=provider"),
    _row("codex-builtin", CODEX["0.171.0"], "OpenAI provider", "codex.py", "MODE=builtin"),
    _row(
        "codex-lite",
        CODEX["0.171.0"],
        "a lite model: tools in `input`",
        "codex.py",
        "MODE=provider MODEL=gpt-6.2-sol",
    ),
    _row("codex-chatgpt", CODEX["0.171.0"], "ChatGPT login, zstd", "codex.py", "MODE=chatgpt"),
    *(
        _row(client.name, client, "own provider, resumed", "codex.py", "MODE=provider")
        for version, client in CODEX.items()
        if version not in ("0.171.0", "0.47.0")
    ),
    _row(
        "codex-0.47.0",
        CODEX["0.47.0"],
        "own provider; it can't resume headless",
        "codex.py",
        "MODE=provider RESUME=0",
        prompts=1,
    ),
)

OPENCODE = _client("opencode", "opencode", "opencode-ai@1.18.33")
KILO = _client("kilo", "Kilo CLI", "@kilocode/cli@7.7.7")
PI = _client("pi", "pi", "@earendil-works/pi-coding-agent@1.6.0")
PI_LEGACY = _client("pi-legacy", "pi (@mariozechner)", "@mariozechner/pi-coding-agent@0.73.1")
CLINE = _client("cline", "Cline CLI", "cline@3.0.65")
CONTINUE = _client("continue", "Continue CLI", "@continuedev/cli@1.5.47")
COPILOT = _client("copilot", "GitHub Copilot CLI", "@github/copilot@1.0.102")
DROID = _client("droid", "Factory droid", "droid@0.215.0")
AGENTS = _client("openai-agents-js", "OpenAI Agents (JS)", "@openai/agents@0.20.0", "zod@4.6.7")
LANGCHAIN = _client(
    "langchain-js",
    "LangChain (JS)",
    "@langchain/openai@1.6.0",
    "langchain@1.5.14",
    "@langchain/core@1.4.0",
    "zod@4.6.7",
)
MASTRA = _client("mastra", "Mastra", "@mastra/core@1.71.0", "@ai-sdk/openai@4.0.118", "zod@4.6.7")

_AGENT_ROWS = (
    _row("opencode", OPENCODE, "second prompt in a new process", "opencode.py", "CLI=opencode"),
    _row("kilo", KILO, "second prompt in a new process", "opencode.py", "CLI=kilo"),
    _row("pi", PI, "second prompt in a new process", "pi.py"),
    _row("pi-rpc", PI, "both prompts in one process", "pi.py", "MODE=rpc"),
    _row("pi-legacy", PI_LEGACY, "second prompt in a new process", "pi.py"),
    _row("cline", CLINE, "one prompt", "cline.py", prompts=1),
    _row("continue", CONTINUE, "resumed", "continue.py"),
    _row(
        "copilot",
        COPILOT,
        "own provider, resumed",
        "copilot.py",
        excuses={
            Reason.HISTORY_CHANGED: "resumed in a new process, it drops all earlier reasoning and"
            " spells arguments anew"
        },
    ),
    _row(
        "copilot-acp", COPILOT, "three prompts in one process", "copilot.py", "MODE=acp", prompts=3
    ),
    _row("droid", DROID, "one prompt", "droid.py", prompts=1),
)

_SUB_AGENT_ROWS = tuple(
    _row(
        f"{name}-sub-agents",
        client,
        "two sub-agents at once",
        driver,
        environment,
        prompts=prompts,
        calls=Calls.DELEGATED,
        same=Same.ENDING,
        openings=3,
    )
    for name, client, driver, environment, prompts in (
        ("codex", CODEX["0.171.0"], "codex.py", "MODE=provider RESUME=0", 1),
        ("copilot", COPILOT, "copilot.py", "MODE=acp", 3),
        ("cline", CLINE, "cline.py", "", 1),
        ("opencode", OPENCODE, "opencode.py", "CLI=opencode", 2),
    )
)

_AGENTS_ROWS = tuple(
    _library(
        f"openai-agents-js-{name}",
        AGENTS,
        variant,
        "openai_agents.mjs",
        environment,
        excuses=_HANDED_ON if name == "handoff" else {},
    )
    for name, variant, environment in (
        ("run", "history passed on, not streamed", "MODE=run"),
        ("stream", "history passed on, streamed, store:false", "MODE=stream STORE=false"),
        ("session", "MemorySession", "MODE=run VARIANT=session"),
        ("previous", "chained by itself", "MODE=run VARIANT=previous"),
        ("handoff", "handoff to another agent", "MODE=run VARIANT=handoff"),
        ("tool", "an agent as a tool", "MODE=run VARIANT=tool"),
        ("parallel", "three conversations at once", "MODE=stream VARIANT=parallel"),
    )
)

_LANGCHAIN_ROWS = tuple(
    _library(f"langchain-js-{name}", LANGCHAIN, variant, "langchain.mjs", environment)
    for name, variant, environment in (
        ("agent", "createAgent", "MODE=agent"),
        ("stream", "hand loop, streamed", "MODE=loop STREAM=1"),
        ("zdr", "hand loop, store:false", "MODE=loop ZDR=1"),
        ("v1", "hand loop, output version v1", "MODE=loop OUTPUT_VERSION=v1"),
    )
)

_MASTRA_ROWS = tuple(
    _library(f"mastra-{mode}", MASTRA, mode, "mastra.mjs", f"MODE={mode}")
    for mode in ("stream", "generate")
)

ROWS: tuple[Row, ...] = (
    *_CODEX_ROWS,
    *_AGENT_ROWS,
    *_SUB_AGENT_ROWS,
    *_AI_SDK_ROWS,
    *_OPENAI_NODE_ROWS,
    *_AGENTS_ROWS,
    *_LANGCHAIN_ROWS,
    *_MASTRA_ROWS,
)

NOT_RUN: tuple[NotRun, ...] = (
    NotRun("Crush", "its package fetches the program from GitHub when it is installed"),
    NotRun("goose", "is not on the registry"),
    NotRun("Cursor", "needs a desktop and an account; its known request is replayed in the tests"),
)
