"""The recipes that point agents at Turnwire, and the launcher that carries them out."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib

import pytest

from proxy.agents import RECIPES, instructions, prepared
from proxy.cli import main
from proxy.errors import ConfigError

URL = "http://127.0.0.1:8787/v1"


def turnwire(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, as a shell does."""
    return subprocess.run(
        [sys.executable, "-m", "proxy", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_script_that_a_shell_takes(name):
    """What `turnwire env` prints can be evaluated, and names the URL."""
    script = instructions(name, URL)

    subprocess.run(["sh", "-n"], input=script, text=True, check=True)
    assert URL in script


def test_an_unknown_agent_is_named_with_those_that_are_known():
    """A person who mistypes learns which agents there are."""
    with pytest.raises(ConfigError, match=r"no recipe for cursor; .*codex"):
        instructions("cursor", URL)


def test_exports_are_what_the_shell_then_has():
    """The variables arrive unchanged, quotes and braces included."""
    script = instructions("opencode", URL) + "\nprintenv OPENCODE_CONFIG_CONTENT"
    printed = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)

    assert json.loads(printed.stdout)["provider"]["openai"]["options"]["baseURL"] == URL


def test_the_lines_for_a_file_are_of_its_format():
    """What goes into a file of settings parses as such."""
    codex = RECIPES["codex"].lines.replace("{base_url}", URL)

    assert tomllib.loads(codex) == {"openai_base_url": URL}
    for name in ("pi", "droid"):
        assert URL in json.dumps(json.loads(RECIPES[name].lines.replace("{base_url}", URL)))


PREPARED = [
    # command, environment, expected command, expected variables
    (["agent", "-x"], {}, ["agent", "-x"], {"OPENAI_BASE_URL": URL, "OPENAI_API_BASE": URL}),
    (
        ["/opt/bin/codex", "exec", "hi"],
        {},
        ["/opt/bin/codex", "-c", f'openai_base_url="{URL}"', "exec", "hi"],
        {"OPENAI_BASE_URL": URL},
    ),
    (
        ["copilot"],
        {"OPENAI_API_KEY": "sk-1"},
        ["copilot"],
        {"COPILOT_PROVIDER_API_KEY": "sk-1", "COPILOT_PROVIDER_BASE_URL": URL},
    ),
    (["copilot"], {}, ["copilot"], {"COPILOT_PROVIDER_BASE_URL": URL}),
]


@pytest.mark.parametrize(("command", "environment", "line", "variables"), PREPARED)
def test_a_command_gets_what_its_agent_reads(command, environment, line, variables):
    """The SDKs' variables go to every command, an agent's own to that agent."""
    prepared_line, prepared_environment = prepared(command, environment, URL)

    assert prepared_line == line
    assert variables.items() <= prepared_environment.items()
    assert "$OPENAI_API_KEY" not in prepared_environment.values()


def test_run_passes_the_exit_status_and_the_arguments_on():
    """The agent's own end is the end of `turnwire run`, and the terminal is the agent's."""
    script = 'test -n "$OPENAI_BASE_URL" && echo "$1" && exit 7'

    ended = turnwire("run", "--", "sh", "-c", script, "sh", "a b")

    assert (ended.returncode, ended.stdout) == (7, "a b\n")
    assert ended.stderr.startswith("turnwire: 0 turns")


def test_run_tells_a_signal_as_a_shell_does():
    """An agent that a signal ended gives 128 and the signal's number."""
    assert turnwire("run", "--", "sh", "-c", "kill -9 $$").returncode == 128 + 9


def test_run_hands_a_termination_on():
    """SIGTERM to `turnwire run` reaches the agent, which ends as it likes."""
    script = "trap 'exit 5' TERM; echo ready; while :; do sleep 0.05; done"
    with subprocess.Popen(
        [sys.executable, "-m", "proxy", "run", "--", "sh", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.terminate()

        assert process.wait(timeout=30) == 5


@pytest.mark.parametrize(
    ("command", "status", "sentence"),
    [
        (["no-such-agent-here"], 127, "turnwire: no-such-agent-here: no such command\n"),
        (["/"], 126, "turnwire: /: Permission denied\n"),
        ([], 64, "turnwire: no command to run; write it after --: turnwire run -- COMMAND\n"),
    ],
)
def test_a_command_that_cannot_run_is_one_sentence(command, status, sentence):
    """No traceback for a mistyped command, and the status that shells give."""
    ended = turnwire("run", "--", *command) if command else turnwire("run")

    assert (ended.returncode, ended.stderr) == (status, sentence)


def test_a_real_sdk_reaches_its_upstream_through_run(closed_port):
    """A script on the openai SDK needs no change, and its turns are counted at the end."""
    script = (
        "import openai; r = openai.OpenAI(api_key='sk-x', max_retries=0)\n"
        "try: r.responses.create(model='m', input='hi')\n"
        "except openai.InternalServerError as error: print(error.status_code)"
    )
    line = shlex.join([sys.executable, "-c", script])

    upstream = f"http://127.0.0.1:{closed_port}/v1"
    ended = turnwire("run", "--upstream", upstream, "--", "sh", "-c", line)

    assert ended.stdout == "502\n"
    assert "1 turns, of which 0 as deltas, 0 in full and 1 over HTTP" in ended.stderr


def test_env_is_for_the_sdks_by_default(capsys):
    """Without an agent's name the lines are those that most agents need."""
    assert main(["env", "--base-url", URL]) == 0

    assert f"export OPENAI_BASE_URL={URL}" in capsys.readouterr().out
