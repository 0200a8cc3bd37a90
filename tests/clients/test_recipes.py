"""
`turnwire run` with real agents: each reaches the proxy by its recipe alone, and gets deltas.

Nothing but the recipe tells these agents where to go: no base URL is configured in them.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clients import install, npm
from clients.rows import Ecosystem
from proxy.simulator import AnswerOptions, Calls, Simulator, SimulatorOptions
from proxy.simulator.validate import Transport

if TYPE_CHECKING:
    from clients.rows import Client

TOOL_LOOP = """
import json
from openai import OpenAI
nothing = {"type": "object", "properties": {}}
tools = [{"type": "function", "name": "get_weather", "parameters": nothing}]
client, history = OpenAI(), [{"role": "user", "content": "go [calls=2]"}]
while True:
    answer = client.responses.create(model="gpt-5.2", input=history, tools=tools, store=False)
    history += answer.output
    calls = [item for item in answer.output if item.type == "function_call"]
    if not calls:
        break
    history += [
        {"type": "function_call_output", "call_id": call.call_id, "output": "seen"}
        for call in calls
    ]
print(answer.output_text)
"""

AI_SDK_LOOP = """
import { generateText, isStepCount, tool } from 'ai';
import { openai } from '@ai-sdk/openai';
import { z } from 'zod';
const look = tool({ description: 'look', inputSchema: z.object({}), execute: async () => 'seen' });
const { text } = await generateText({
  model: openai('gpt-5.2'),
  tools: { get_weather: look },
  prompt: 'go [calls=2]',
  stopWhen: isStepCount(6),
});
console.log(text);
"""

ROOT = Path(__file__).parents[2]
CODEX = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")


def installed(client: Client) -> Path:
    """Install a client if need be; return its directory."""
    if not install.can_install(Ecosystem.NPM):
        pytest.skip("npm does not exist here")
    for missing in install.needed([client]):
        install.install(missing)
    return install.directory(client)


async def run_agent(
    command: list[str], home: Path, work: Path, **environment: str
) -> tuple[str, Simulator]:
    """Run an agent with `turnwire run` in front of a simulator; return what it printed."""
    options = SimulatorOptions(answers=AnswerOptions(rounds=2, calls=Calls.HARMLESS))
    async with Simulator(options) as simulator:
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "proxy", "run", "--upstream", simulator.base_url, "--"),
            *command,
            cwd=work,
            env={
                **{name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ},
                "PATH": f"{install.node_bin()}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "HOME": str(home),
                "OPENAI_API_KEY": "sk-test-000000000000",
                **environment,
            },
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, complaints = await child.communicate()
    assert child.returncode == 0, said.decode() + complaints.decode()
    return said.decode(), simulator


def check(simulator: Simulator) -> None:
    """One full send, and then nothing but what was new."""
    turns = simulator.journal.turns

    assert len(turns) >= 3
    assert {seen.transport for seen in turns} == {Transport.WS}
    assert [seen.previous_response_id is not None for seen in turns] == [
        number > 0 for number in range(len(turns))
    ]


@pytest.mark.timeout(300)
async def test_the_openai_sdk_is_led_by_its_variable(tmp_path: Path) -> None:
    """A script that names no URL."""
    _, simulator = await run_agent([sys.executable, "-c", TOOL_LOOP], tmp_path, tmp_path)

    check(simulator)


@pytest.mark.timeout(600)
async def test_the_ai_sdk_is_led_by_its_variable(tmp_path: Path) -> None:
    """Its default provider, as most programs use it."""
    there = installed(npm.AI_SDK_7)
    command = ["node", "--input-type=module", "-e", AI_SDK_LOOP]

    _, simulator = await run_agent(command, tmp_path, there)

    check(simulator)


@pytest.mark.timeout(600)
async def test_codex_is_led_by_its_argument(tmp_path: Path) -> None:
    """The built-in provider; its own WebSocket is refused, and it goes on over HTTP at once."""
    there = installed(npm.CODEX["0.171.0"])
    codex = str(there / "node_modules" / ".bin" / "codex")
    settings = tmp_path / ".codex"
    settings.mkdir()
    (settings / "config.toml").write_text('model = "gpt-5.2-codex"\n[analytics]\nenabled = false\n')

    _, simulator = await run_agent(
        [codex, *CODEX, "go"],
        tmp_path,
        tmp_path,
        CODEX_HOME=str(settings),
        CODEX_API_KEY="sk-test-000000000000",
    )

    check(simulator)
