"""
How to point each agent at Turnwire: the one table behind `turnwire env` and `turnwire run`.

Most agents are built on an SDK that reads `OPENAI_BASE_URL`. Those that are not want a variable of
their own, an argument, or a few lines in a file. A recipe says which, with `{base_url}` where the
URL goes; a file that the person owns is never written, so what needs one is for `env` only.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from proxy.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Read by the OpenAI SDKs of every language, and by what is built on them; the second by old ones.
SDK_ENVIRONMENT: Final = {"OPENAI_BASE_URL": "{base_url}", "OPENAI_API_BASE": "{base_url}"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """
    How one agent is pointed at a base URL.

    `commands` are the names by which the agent is started. `environment` and `arguments` go to it
    when `run` starts it; `file` names the file that `lines` belong in, for what neither can do.
    `steps` are commands to run once.
    """

    title: str
    commands: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    file: str = ""
    lines: str = ""
    steps: tuple[str, ...] = ()


def _opencode(prefix: str, title: str, command: str) -> Recipe:
    content = '{"provider":{"openai":{"options":{"baseURL":"{base_url}"}}}}'
    return Recipe(title, (command,), {f"{prefix}_CONFIG_CONTENT": content})


RECIPES: Final[Mapping[str, Recipe]] = {
    "openai": Recipe("OpenAI SDKs, and agents built on them", environment=SDK_ENVIRONMENT),
    "ai-sdk": Recipe("Vercel AI SDK, Mastra", environment=SDK_ENVIRONMENT),
    "codex": Recipe(
        "OpenAI Codex CLI",
        ("codex",),
        arguments=("-c", 'openai_base_url="{base_url}"'),
        file="~/.codex/config.toml",
        lines='openai_base_url = "{base_url}"',
    ),
    "opencode": _opencode("OPENCODE", "opencode", "opencode"),
    "kilo": _opencode("KILO", "Kilo Code CLI", "kilo"),
    "copilot": Recipe(
        "GitHub Copilot CLI (bring your own key)",
        ("copilot",),
        {
            "COPILOT_PROVIDER_BASE_URL": "{base_url}",
            "COPILOT_PROVIDER_TYPE": "openai",
            "COPILOT_PROVIDER_WIRE_API": "responses",
            "COPILOT_PROVIDER_API_KEY": "$OPENAI_API_KEY",
        },
    ),
    "cline": Recipe(
        "Cline CLI",
        steps=('cline auth -p openai-native -k "$OPENAI_API_KEY" -m gpt-5.2 -b {base_url}',),
    ),
    "pi": Recipe(
        "pi",
        file="~/.pi/agent/models.json",
        lines='{"providers":{"openai":{"baseUrl":"{base_url}"}}}',
    ),
    "continue": Recipe(
        "Continue CLI",
        file="~/.continue/config.yaml, under each model of `provider: openai`",
        lines="    apiBase: {base_url}",
    ),
    "droid": Recipe(
        "Factory droid (custom model)",
        file="~/.factory/settings.json",
        lines=(
            '{"customModels":[{"model":"gpt-5.2","displayName":"gpt-5.2","provider":"openai",'
            '"baseUrl":"{base_url}","apiKey":"YOUR KEY","maxOutputTokens":16384}]}'
        ),
    ),
    "langchain": Recipe("LangChain, LangGraph", environment=SDK_ENVIRONMENT),
    "openai-agents": Recipe("OpenAI Agents SDK", environment=SDK_ENVIRONMENT),
    "pydantic-ai": Recipe("Pydantic AI", environment=SDK_ENVIRONMENT),
    "litellm": Recipe("LiteLLM SDK, aider, mini-swe-agent", environment=SDK_ENVIRONMENT),
}


def filled(text: str, base_url: str) -> str:
    """Put the URL into a text of a recipe."""
    return text.replace("{base_url}", base_url)


def instructions(name: str, base_url: str) -> str:
    """
    Return the lines that point an agent at `base_url`, as a shell takes them.

    What belongs into a file stands in comments that name it. Raises ConfigError for an agent that
    is not in the table.
    """
    recipe = RECIPES.get(name)
    if recipe is None:
        raise ConfigError(f"no recipe for {name}; there are {', '.join(RECIPES)}")
    lines = [f"# {recipe.title}"]
    lines += (
        f"export {key}={_quoted(filled(value, base_url))}"
        for key, value in recipe.environment.items()
    )
    lines += (filled(step, base_url) for step in recipe.steps)
    if recipe.file:
        lines.append(f"# in {recipe.file}:")
        lines += (f"# {line}" for line in filled(recipe.lines, base_url).split("\n"))
    if recipe.arguments:
        arguments = shlex.join(filled(each, base_url) for each in recipe.arguments)
        lines.append(f"# or: {recipe.commands[0]} {arguments}")
    return "\n".join(lines)


def _quoted(value: str) -> str:
    return f'"{value}"' if value.startswith("$") else shlex.quote(value)


def prepared(
    command: Sequence[str], environment: Mapping[str, str], base_url: str
) -> tuple[list[str], dict[str, str]]:
    """
    Return a command and its environment, changed so that the agent it starts uses `base_url`.

    Every agent gets the variables of the SDKs; one that the table knows by its command's name also
    gets its own. A recipe's `$NAME` is filled from the environment.
    """
    program = command[0].replace("\\", "/").rsplit("/", 1)[-1]
    recipe = next((r for r in RECIPES.values() if program in r.commands), Recipe("any"))
    changed = dict(environment)
    for key, value in {**SDK_ENVIRONMENT, **recipe.environment}.items():
        text = filled(value, base_url)
        if not text.startswith("$"):
            changed[key] = text
        elif (known := environment.get(text[1:])) is not None:
            changed[key] = known
    arguments = [filled(each, base_url) for each in recipe.arguments]
    return [command[0], *arguments, *command[1:]], changed
