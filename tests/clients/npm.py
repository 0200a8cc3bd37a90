"""The rows of clients that are npm packages."""

from __future__ import annotations

from typing import Any

from clients.rows import Client, Ecosystem, NotRun, Row


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


def _library(name: str, client: Client, variant: str, driver: str, environment: str) -> Row:
    return _row(name, client, variant, driver, environment, reproducible=True)


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
        if version != "0.171.0"
    ),
)

ROWS: tuple[Row, ...] = (*_OPENAI_NODE_ROWS, *_AI_SDK_ROWS, *_CODEX_ROWS)

NOT_RUN: tuple[NotRun, ...] = ()
