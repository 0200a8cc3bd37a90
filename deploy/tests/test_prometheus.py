"""Metrics, alert rules and the dashboard: sound for Prometheus, and about metrics that exist."""

from __future__ import annotations

import itertools
import json
import re
from typing import TYPE_CHECKING, Any

from deploy.tests.rendering import DEPLOY, module, program, run
from proxy.core.reasons import Mode, Reason
from proxy.core.shadow import Verdict
from proxy.observe.facts import TurnFacts
from proxy.observe.metrics import CONNECT_RESULTS, DEFINITIONS, GAP_FIELDS, Metrics

if TYPE_CHECKING:
    from pathlib import Path

RULES = DEPLOY / "prometheus" / "rules.yaml"
BOARD = DEPLOY / "grafana" / "turnwire.json"
# What the dashboard's variables stand for when its expressions are checked.
VARIABLES = {"$job": ".*", "$instance": ".*", "$__rate_interval": "5m", "$__range": "6h"}


def names_known() -> set[str]:
    """Return every name of a series that a scrape has, as the program itself says."""
    suffixes = {"histogram": ("_bucket", "_sum", "_count")}
    ours = {
        definition.name + suffix
        for definition in DEFINITIONS
        for suffix in suffixes.get(definition.kind, ("",))
    }
    text = Metrics("1").render()[0].decode()
    return ours | set(re.findall(r"^(process_\w+)", text, re.MULTILINE))


def names_in(expression: str) -> set[str]:
    """Return the names of the series that an expression reads."""
    return set(re.findall(r"\b(?:turnwire|process)_\w+", expression))


def rules() -> list[dict[str, Any]]:
    """Return all rules."""
    groups = module("yaml").safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    """Return all panels of the dashboard that show something."""
    return [each for each in json.loads(BOARD.read_text())["panels"] if each["type"] != "row"]


def test_the_metrics_pass_promtool():
    """Names, types and help texts are as Prometheus wants them, for every metric there is."""
    metrics = Metrics("1")
    for mode, reason in itertools.product(Mode, Reason):
        metrics.turn_started()
        metrics.turn_finished(
            TurnFacts(
                turn_id="t",
                principal="p",
                label="p",
                mode=mode,
                reason=reason,
                status=200,
                bytes_in=9,
                bytes_up=3,
                ended_at=0.0,
                duration_s=1.0,
                first_event_s=0.5,
                overhead_s=0.001,
            )
        )
    for reason in Reason:
        metrics.resend(reason)
        metrics.fallback(reason)
    for result in CONNECT_RESULTS:
        metrics.connect(result)
    for name in GAP_FIELDS:
        metrics.gap(name)
    metrics.passthrough(200)

    text = metrics.render()[0].decode()

    assert run(program("promtool"), "check", "metrics", input=text).stderr == ""
    assert all(f"# TYPE {each.name.removesuffix('_total')}" in text for each in DEFINITIONS)


def test_the_rules_pass_promtool():
    """They parse, and none says the same as another."""
    assert "SUCCESS" in run(program("promtool"), "check", "rules", RULES).stdout


def test_the_alerts_fire_when_they_should_and_only_then():
    """promtool plays series to them."""
    tests = DEPLOY / "prometheus" / "rules_test.yaml"
    assert "SUCCESS" in run(program("promtool"), "test", "rules", tests).stdout


def test_every_alert_is_seen_to_fire_and_to_be_silent():
    """Each has a test that expects it, and one that expects it not to."""
    tests = module("yaml").safe_load((DEPLOY / "prometheus" / "rules_test.yaml").read_text())
    fired, silent = set(), set()
    for case in (each for test in tests["tests"] for each in test["promql_expr_test"]):
        if found := re.search(r'ALERTS\{alertname="(\w+)"', case["expr"]):
            (fired if case.get("exp_samples") else silent).add(found[1])
    alerts = {rule["alert"] for rule in rules() if "alert" in rule}

    assert alerts == fired == silent


def test_every_alert_says_what_to_do():
    """Its runbook is a section of deploy/README.md."""
    sections = re.findall(r"^#+ (\w+)$", (DEPLOY / "README.md").read_text(), re.MULTILINE)
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in {"critical", "warning", "info"}
            assert set(rule["annotations"]) == {"summary", "description", "runbook"}
            assert rule["annotations"]["runbook"] == f"deploy/README.md#{rule['alert'].lower()}"
            assert rule["alert"] in sections


def test_rules_and_dashboard_read_series_that_exist():
    """A metric that was renamed would leave an alert silent and a panel empty."""
    expressions = [rule["expr"] for rule in rules()]
    expressions += [target["expr"] for panel in panels() for target in panel["targets"]]
    assert len(expressions) > 30
    for expression in expressions:
        assert names_in(expression) <= names_known(), expression
        assert names_in(expression) or "turnwire:" in expression


def test_rules_name_reasons_and_results_that_exist():
    """A label's value in an expression is one that the program gives."""
    known = {
        "reason": {str(reason) for reason in Reason},
        "result": set(CONNECT_RESULTS),
        "mode": {str(mode) for mode in Mode},
        "verdict": {str(verdict) for verdict in Verdict},
    }
    found = 0
    for rule in rules():
        for label, values in re.findall(r'(\w+)=~?"([^"]*)"', rule["expr"]):
            assert set(values.split("|")) <= known[label]
            found += 1
    assert found >= 5


def test_the_expressions_of_the_dashboard_parse(tmp_path: Path):
    """As Prometheus reads them, with values for the dashboard's variables."""
    records = []
    for number, target in enumerate(t for panel in panels() for t in panel["targets"]):
        expression = target["expr"]
        for variable, value in VARIABLES.items():
            expression = expression.replace(variable, value)
        assert "$" not in expression
        records.append({"record": f"panel:{number}", "expr": expression})
    file = tmp_path / "board.yaml"
    file.write_text(json.dumps({"groups": [{"name": "board", "rules": records}]}))

    run(program("promtool"), "check", "rules", file)


def test_the_first_row_answers_whether_it_saves_anything():
    """Bytes and deltas come first, before any fault or resource."""
    board = json.loads(BOARD.read_text())["panels"]

    assert board[0]["title"] == "Is it saving anything?"
    second_row = next(i for i, each in enumerate(board) if i and each["type"] == "row")
    read = names_in(" ".join(t["expr"] for each in board[1:second_row] for t in each["targets"]))
    assert "turnwire_upstream_request_bytes_total" in read
    assert "turnwire_turns_total" in read


def test_panels_have_a_place_of_their_own():
    """No two overlap, none is wider than the board, and each says what it shows."""
    board = json.loads(BOARD.read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in board:
        grid = panel["gridPos"]
        cells = set(
            itertools.product(
                range(grid["x"], grid["x"] + grid["w"]), range(grid["y"], grid["y"] + grid["h"])
            )
        )
        assert not cells & taken, panel["title"]
        assert grid["x"] + grid["w"] <= 24
        assert panel["type"] == "row" or panel["description"]
        taken |= cells
    assert len({panel["id"] for panel in board}) == len(board)


def test_the_adapter_serves_what_the_autoscaler_asks_for():
    """The metric's name is one that there is."""
    values = module("yaml").safe_load((DEPLOY / "prometheus" / "adapter.yaml").read_text())
    (rule,) = values["rules"]["custom"]

    assert names_in(rule["seriesQuery"]) == {"turnwire_turns_in_flight"}
    assert names_in(rule["seriesQuery"]) <= names_known()
