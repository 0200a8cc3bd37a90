"""The configuration: its layers, how values are written, and the sentences about mistakes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from proxy.config import (
    GIB,
    MIB,
    Config,
    LimitsConfig,
    WebSocketConfig,
    load,
    reference_table,
    settings,
    value_of,
    written,
)
from proxy.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def sentence(
    flags: dict[str, str] | None = None,
    env: dict[str, str] | None = None,
    file: Path | None = None,
) -> str:
    """Return the sentence that `load` refuses these with."""
    with pytest.raises(ConfigError) as caught:
        load(flags or {}, env or {}, file)
    return str(caught.value)


@pytest.fixture
def toml(tmp_path: Path):
    """Return a function that writes a TOML file and returns its path."""

    def write(text: str) -> Path:
        path = tmp_path / "turnwire.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


# --- layers ----------------------------------------------------------------------------------


def test_each_layer_overrides_the_one_below(toml):
    """A flag wins over the environment, that over the file, and the file over the default."""
    file = toml("host = '0.0.0.0'\nport = 1\nadmin_port = 2\n[log]\nlevel = 'debug'\n")
    env = {"TURNWIRE_PORT": "11", "TURNWIRE_ADMIN_PORT": "12", "HOME": "/nowhere"}

    loaded = load({"--port": "21"}, env, file)

    assert loaded.config.port == 21
    assert loaded.origins["port"] == "flag --port"
    assert loaded.config.admin_port == 12
    assert loaded.origins["admin_port"] == "environment TURNWIRE_ADMIN_PORT"
    assert loaded.config.log.level == "debug"
    assert loaded.origins["log.level"] == f"file {file}"
    assert loaded.config.log.format == "auto"
    assert loaded.origins["log.format"] == "default"


def test_nothing_given_is_the_default():
    """Without flags, environment and file, the configuration is that of the models."""
    loaded = load({}, {}, None)

    assert loaded.config == Config()
    assert loaded.origins == dict.fromkeys(settings(), "default")


def test_the_environment_may_name_the_file(toml):
    """TURNWIRE_CONFIG names the file unless a flag does."""
    file = toml("port = 5\n")

    assert load({}, {"TURNWIRE_CONFIG": str(file)}, None).config.port == 5
    assert load({}, {"TURNWIRE_CONFIG": "/nowhere"}, file).config.port == 5


def test_an_empty_variable_is_not_set():
    """Compose files and shells pass empty variables on; they change nothing."""
    assert load({}, {"TURNWIRE_PORT": "", "TURNWIRE_CONFIG": "", "TURNWIRE_X": ""}, None)


def test_the_agents_variable_is_not_ours():
    """OPENAI_BASE_URL points agents at us, so it never becomes the upstream."""
    env = {"OPENAI_BASE_URL": "http://127.0.0.1:8787/v1"}

    assert load({}, env, None).config.upstream == "https://api.openai.com/v1"


def test_service_links_of_kubernetes_are_ignored():
    """A Service called turnwire puts variables of its own into every pod beside it."""
    links = {
        "TURNWIRE_PORT": "tcp://10.0.0.1:8787",
        "TURNWIRE_PORT_8787_TCP": "tcp://10.0.0.1:8787",
        "TURNWIRE_PORT_8787_TCP_ADDR": "10.0.0.1",
        "TURNWIRE_SERVICE_HOST": "10.0.0.1",
        "TURNWIRE_SERVICE_PORT": "8787",
        "TURNWIRE_SERVICE_PORT_HTTP": "8787",
        "TURNWIRE_ADMIN_PORT": "tcp://10.0.0.2:8788",
        "TURNWIRE_ADMIN_PORT_8788_TCP_PROTO": "tcp",
        "TURNWIRE_ADMIN_SERVICE_HOST": "10.0.0.2",
    }

    assert load({}, links, None).config == Config()


@pytest.mark.parametrize("key", settings())
def test_every_setting_has_its_names(key):
    """Each default, as it is written, is accepted back from the environment and from a flag."""
    setting = settings()[key]
    text = written(key, setting.default)

    for flags, env in (({setting.flag: text}, {}), ({}, {setting.environment: text})):
        if text or flags:
            flags = {flag: value for flag, value in flags.items() if value}
            assert value_of(load(flags, env, None).config, key) == setting.default


def test_names_are_unambiguous():
    """No two settings share a flag or an environment variable."""
    assert len({setting.flag for setting in settings().values()}) == len(settings())
    assert len({setting.environment for setting in settings().values()}) == len(settings())


# --- how values are written ------------------------------------------------------------------

DURATIONS = [("30", 30), ("30s", 30), ("2.5", 2.5), ("10m", 600), ("1h", 3600), ("250 ms", 0.25)]
SIZES = [("65536", 65536), ("64MiB", 64 * MIB), ("16MB", 16_000_000), ("1 gib", GIB), ("1Gi", GIB)]
SWITCHES = [("true", True), ("1", True), ("yes", True), ("ON", True), ("false", False)]
SWITCHES += [("0", False), ("no", False), ("off", False)]
LISTS = [("", ()), ("A.example", ("a.example",)), (" a , b,", ("a", "b"))]
WRITTEN = [
    *(("shutdown.drain_timeout_s", text, value) for text, value in DURATIONS),
    *(("websocket.max_send_bytes", text, value) for text, value in SIZES),
    *(("tuning.uvloop", text, value) for text, value in SWITCHES),
    *(("security.allowed_hosts", text, value) for text, value in LISTS),
    ("security.allowed_origins", "http://LOCALHOST:3000", ("http://localhost:3000",)),
    ("host", "[::1]", "::1"),
    ("upstream", "http://gw.example/azure/openai/v1/", "http://gw.example/azure/openai/v1"),
    ("upstream", "https://[2001:db8::1]:8443", "https://[2001:db8::1]:8443"),
    ("websocket.url", "wss://x.example/r?api-version=v1", "wss://x.example/r?api-version=v1"),
]


@pytest.mark.parametrize(("key", "text", "value"), WRITTEN)
def test_values_can_be_written_as_people_do(key, text, value):
    """Units, switches and lists are understood in flags."""
    assert value_of(load({settings()[key].flag: text}, {}, None).config, key) == value


def test_a_file_has_types_of_its_own(toml):
    """In TOML, numbers, lists and booleans are themselves, and units may be used as well."""
    file = toml(
        "[websocket]\nenabled = false\nmax_age_s = '50m'\nclose_timeout_s = 0.5\n"
        "[security]\nallowed_hosts = ['proxy.local', 'b']\n[log]\n"
    )
    config = load({}, {}, file).config

    assert config.websocket == WebSocketConfig(enabled=False, max_age_s=3000, close_timeout_s=0.5)
    assert config.security.allowed_hosts == ("proxy.local", "b")


@given(st.integers(min_value=1, max_value=1 << 50))
def test_sizes_are_written_exactly(size):
    """A size that is printed with a unit is the same when it is read."""
    text = written("chains.max_bytes", size)

    assert load({"--chains-max-bytes": text}, {}, None).config.chains.max_bytes == size


@given(st.floats(min_value=0.001, max_value=1e9))
def test_durations_are_written_exactly(duration):
    """A duration that is printed is the same when it is read."""
    config = Config.model_validate({"reply": {"keepalive_s": duration}})
    text = written("reply.keepalive_s", config.reply.keepalive_s)

    assert load({"--reply-keepalive-s": text}, {}, None).config == config


@given(st.text())
def test_any_text_is_a_value_or_a_sentence(text):
    """Whatever is written for any setting, the outcome is a configuration or a ConfigError."""
    for setting in settings().values():
        try:
            load({setting.flag: text}, {}, None)
        except ConfigError as error:
            assert setting.flag in str(error)  # noqa: PT017  both outcomes are fine


# --- what is derived -------------------------------------------------------------------------

WEBSOCKET_URLS = [
    ("https://api.openai.com/v1", "wss://api.openai.com/v1/responses"),
    ("http://127.0.0.1:8790/v1/", "ws://127.0.0.1:8790/v1/responses"),
    ("https://gw.example", "wss://gw.example/v1/responses"),
]


@pytest.mark.parametrize(("upstream", "url"), WEBSOCKET_URLS)
def test_the_websocket_url_follows_from_the_upstream(upstream, url):
    """The path prefix is kept, https becomes wss and http ws."""
    assert Config(upstream=upstream).websocket_url == url


def test_the_websocket_url_can_be_set():
    """A URL that is given is used as it stands."""
    url = "wss://elsewhere.example/responses?api-version=v1"

    assert Config(websocket=WebSocketConfig(url=url)).websocket_url == url


# --- mistakes --------------------------------------------------------------------------------

UNKNOWN = [
    ({"--prot": "1"}, {}, "unknown flag --prot; did you mean --port?"),
    (
        {},
        {"TURNWIRE_WEBSOCKET_PING_INTERVAL": "1"},
        "unknown environment variable TURNWIRE_WEBSOCKET_PING_INTERVAL; "
        "did you mean TURNWIRE_WEBSOCKET_PING_INTERVAL_S?",
    ),
    ({"--zzzzzz": ""}, {}, "unknown flag --zzzzzz; `turnwire config` lists all keys"),
]


@pytest.mark.parametrize(("flags", "env", "expected"), UNKNOWN)
def test_unknown_names_are_refused(flags, env, expected):
    """A misspelt flag or variable is an error that names the nearest known one."""
    assert sentence(flags, env) == expected


UNKNOWN_IN_FILE = [
    ("prot = 1", "unknown key prot in file {}; did you mean port?"),
    ("ping_interval_s = 1", "unknown key ping_interval_s in file {}; "
     "did you mean websocket.ping_interval_s?"),
    ("[webscket]\nurl = 'x'", "unknown key webscket.url in file {}; did you mean websocket.url?"),
    ("[logs]", "unknown key logs in file {}; `turnwire config` lists all keys"),
    ("websocket = 3", "unknown key websocket in file {}; did you mean websocket.url?"),
    ("[log.level]\nx = 1", "unknown key log.level.x in file {}; did you mean log.level?"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), UNKNOWN_IN_FILE)
def test_unknown_keys_of_a_file_are_refused(toml, text, expected):
    """A misspelt key or section of a file is an error that names the nearest known key."""
    file = toml(text)

    assert sentence(file=file) == expected.format(file)


BAD_VALUES = [
    ("--port", "http", 'port = "http" must be a valid integer (flag --port)'),
    (
        "--admin-port",
        "65536",
        'admin_port = "65536" must be less than or equal to 65535 (flag --admin-port)',
    ),
    (
        "--shutdown-drain-timeout-s",
        "ten",
        'shutdown.drain_timeout_s = "ten" must be a duration such as 30, 30s, 10m, 1h or 250ms '
        "(flag --shutdown-drain-timeout-s)",
    ),
    (
        "--chains-max-bytes",
        "1TB",
        'chains.max_bytes = "1TB" must be a size such as 65536, 64KiB, 64MiB, 16MB or 1GiB '
        "(flag --chains-max-bytes)",
    ),
    (
        "--matching-changed-tools",
        "maybe",
        "matching.changed_tools = \"maybe\" must be 'resend' or 'continue' "
        "(flag --matching-changed-tools)",
    ),
    ("--host", "0.0.0.0:80", "must be a host name or an IP address"),
    ("--upstream", "api.openai.com/v1", "must be a URL of http or https with a host, such as"),
    ("--upstream", "https://:443/v1", "must be a URL of http or https with a host"),
    ("--upstream", "https://h:99999/", "must be a URL of http or https with a host"),
    ("--upstream", "https://h/a b", "must be a URL of http or https with a host"),
    ("--upstream", "https://h\t.example", "must be a URL of http or https with a host"),
    ("--upstream", "https://[::1", "must be a URL of http or https with a host"),
    ("--upstream", "https://h/v1?api-version=1", "must have no query"),
    ("--upstream", "https://h/v1#x", "must have no fragment"),
    ("--upstream", "https://h/v1/responses", "must be the base URL, without /responses"),
    ("--websocket-url", "https://h/v1", "must be a URL of ws or wss with a host"),
    ("--security-identity-headers", "x-team", "must keep authorization, api-key, x-api-key"),
    ("--security-allowed-origins", "localhost", "must be origins such as"),
    ("--websocket-enabled", "maybe", "must be a valid boolean"),
]


@pytest.mark.parametrize(("flag", "text", "expected"), BAD_VALUES)
def test_a_bad_value_is_one_sentence(flag, text, expected):
    """The sentence has the key, the value, what is wrong with it and where it came from."""
    message = sentence({flag: text})

    assert expected in message
    assert message.endswith(f"(flag {flag})")
    assert "\n" not in message


def test_the_first_of_several_mistakes_is_told():
    """With more than one bad value, the sentence is about one and counts the rest."""
    message = sentence({"--port": "x", "--admin-port": "y", "--log-level": "z"})

    assert message == 'port = "x" must be a valid integer (flag --port); 2 more to follow'


def test_a_boolean_is_no_number(toml):
    """In TOML, `true` where a number belongs is refused, not taken for 1."""
    for text in ("port = true", "[reply]\nkeepalive_s = true", "[chains]\nmax_bytes = true"):
        assert "must be a number, not a boolean" in sentence(file=toml(text))


def test_a_bad_element_of_a_list_is_told_by_its_key(toml):
    """A list with a number in it is refused by the key of the list."""
    message = sentence(file=toml("[security]\nallowed_hosts = ['a', 1]"))

    assert message.startswith('security.allowed_hosts = ["a", 1] must be a valid string')


@pytest.mark.parametrize(
    "url", ["https://user:hunter2@h/v1", "https://sk-abcdefghijklmnop@h", "sk-abcdefghijklmnop"]
)
def test_no_credential_is_repeated(url):
    """A secret that was given by mistake is not in the sentence about it."""
    message = sentence({"--upstream": url})

    assert "hunter2" not in message
    assert "abcdefgh" not in message
    assert "***" in message


CONTRADICTIONS = [
    ({"--websocket-max-age-s": "10m"}, "websocket.retire_margin_s must be less than"),
    ({"--websocket-probe-timeout-s": "11"}, "websocket.probe_timeout_s must not exceed"),
    ({"--limits-max-body-bytes": "129MiB"}, "limits.max_body_bytes must not exceed"),
    ({"--limits-max-inflight-body-bytes": "1MiB"}, "limits.max_decoded_body_bytes must not exceed"),
    ({"--cooldown-first-s": "1h"}, "cooldown.first_s must not exceed cooldown.max_s"),
    ({"--port": "8788"}, "port and admin_port must differ"),
    ({"--admin-port": "8787", "--admin-host": "0.0.0.0"}, "port and admin_port must differ"),
    ({"--upstream": "http://localhost:8787/v1"}, "upstream is this very process"),
    ({"--upstream": "http://127.0.0.1:8788"}, "upstream is this very process"),
    ({"--upstream": "http://[::1]:9/v1", "--host": "::", "--port": "9"}, "upstream is this very"),
    ({"--upstream": "http://box/v1", "--host": "box", "--port": "80"}, "upstream is this very"),
    ({"--websocket-url": "ws://127.0.0.1:8787/v1/responses"}, "websocket.url is this very process"),
]


@pytest.mark.parametrize(("flags", "expected"), CONTRADICTIONS)
def test_values_that_contradict_each_other_are_refused(flags, expected):
    """The sentence names the settings in question and where the values came from."""
    message = sentence(flags)

    assert message.startswith(expected)
    assert all(flag in message for flag in list(flags)[:1])


def test_a_contradiction_tells_both_origins():
    """Of two values that do not go together, both are shown, the default included."""
    assert sentence(env={"TURNWIRE_WEBSOCKET_MAX_AGE_S": "5m"}) == (
        "websocket.retire_margin_s must be less than websocket.max_age_s, or no connection is "
        "ever used (websocket.retire_margin_s = 600 from default, websocket.max_age_s = "
        '"5m" from environment TURNWIRE_WEBSOCKET_MAX_AGE_S)'
    )


FINE = [
    {"--port": "0", "--admin-port": "0"},
    {"--host": "10.0.0.1", "--admin-host": "10.0.0.2", "--admin-port": "8787"},
    {"--upstream": "http://127.0.0.1:8790/v1"},
    {"--upstream": "http://other:8787/v1"},
    {"--host": "10.0.0.1", "--upstream": "http://127.0.0.1:8787/v1"},
]


@pytest.mark.parametrize("flags", FINE)
def test_values_that_only_look_alike_are_fine(flags):
    """Free ports, other machines and other addresses are neither clashes nor loops."""
    assert load(flags, {}, None)


def test_files_that_cannot_be_used_are_refused(tmp_path, toml):
    """A missing file, a folder, bad TOML and bad UTF-8 are a sentence each."""
    missing = tmp_path / "none.toml"
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"host = '\xe9'")

    assert sentence(file=missing) == f"file {missing} can't be read: no such file or directory"
    assert sentence(file=tmp_path) == f"file {tmp_path} can't be read: is a directory"
    assert "is not valid TOML: " in sentence(file=toml("port ="))
    assert "is not valid TOML: " in sentence(file=latin)


# --- the models ------------------------------------------------------------------------------


def test_models_are_frozen_and_closed():
    """A setting can't be changed, nor one be made up."""
    with pytest.raises(ValidationError, match="frozen"):
        Config().port = 1
    with pytest.raises(ValidationError, match="Extra inputs"):
        LimitsConfig.model_validate({"max_boddy_bytes": 1})


def test_every_setting_is_described():
    """Each description is one sentence, as the reference needs it."""
    for setting in settings().values():
        assert setting.description.endswith("."), setting.key
        assert setting.description.count(". ") == 0, setting.key


def test_the_reference_has_a_row_for_each_setting():
    """The table is Markdown with a head, a rule and one row of four cells a setting."""
    head, rule, *rows = reference_table().splitlines()

    assert head == "| Key | Default | Environment variable | Meaning |"
    assert rule == "| --- | --- | --- | --- |"
    assert [row.split("`")[1] for row in rows] == list(settings())
    assert any(
        "| `websocket.max_send_bytes` | `16MB` | `TURNWIRE_WEBSOCKET_MAX_SEND_BYTES` |" in row
        for row in rows
    )
