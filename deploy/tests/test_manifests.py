"""
Every set of manifests: valid for the Kubernetes versions that are served, and true to itself.

A schema knows the shape of each object. What it can't know is whether they fit together: that a
selector finds its pods, that a port has its name, that a variable is a setting of ours, that the
time to end is enough. Those are the mistakes that show only in a cluster.
"""

from __future__ import annotations

import functools
import json
import tomllib
from typing import Any

import pytest

from deploy.tests.rendering import (
    CHART,
    SETS,
    VALUES,
    Manifest,
    Rendered,
    containers,
    module,
    render_chart,
    rendered,
)
from proxy.config import MIB, load

VERSIONS = ("1.31", "1.32", "1.33", "1.34", "1.35")
NOT_KUBERNETES = {"ServiceMonitor", "PrometheusRule"}  # of the Prometheus operator
PODLESS = {"ConfigMap", "Namespace", "ServiceAccount", "ServiceMonitor", "PrometheusRule"}


# --- Shape ----------------------------------------------------------------------------------------


@functools.cache
def problem(manifest: str, version: str) -> str | None:
    """Return what the schema of a Kubernetes version has against a manifest (given as JSON)."""
    kubernetes = module("kubernetes_validate")
    try:
        kubernetes.validate(json.loads(manifest), version, strict=True)
    except (kubernetes.ValidationError, kubernetes.SchemaNotFoundError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("version", VERSIONS)
def test_schema(manifests: Rendered, version: str):
    """No unknown field, no wrong type, no API that the version does not serve."""
    checked = 0
    for manifest in manifests.manifests:
        if manifest["kind"] not in NOT_KUBERNETES:
            assert problem(json.dumps(manifest, sort_keys=True), version) is None, manifest["kind"]
            checked += 1
    assert checked >= 3


def test_the_validator_is_strict():
    """A misspelt field is found, or the test above would prove little."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}}
    good = pod | {"spec": {"containers": [{"name": "c", "image": "i"}]}}
    bad = pod | {"spec": {"containers": [{"name": "c", "image": "i", "imagePullpolicy": "Never"}]}}

    assert problem(json.dumps(good), "1.33") is None
    assert problem(json.dumps(bad), "1.33") is not None


def test_names_are_unique_and_short_enough(manifests: Rendered):
    """Two objects of a kind never share a name, and every name is one that DNS takes."""
    names = [(each["kind"], each["metadata"]["name"]) for each in manifests.manifests]

    assert len(set(names)) == len(names)
    assert all(len(name) <= 63 for _, name in names)


# --- Fit ------------------------------------------------------------------------------------------


def finds(selector: dict[str, str], labels: dict[str, str]) -> bool:
    """Tell whether a selector finds an object with these labels."""
    return bool(selector) and selector.items() <= labels.items()


def labels_of(manifest: Manifest) -> dict[str, str]:
    """Return an object's labels."""
    return manifest.get("metadata", {}).get("labels", {})


def ports_of(pod: Manifest) -> set[str]:
    """Return the names of a pod's ports."""
    return {port["name"] for each in containers(pod["spec"]) for port in each.get("ports", [])}


def test_selectors_find_the_pods_of_the_gateway_and_no_others(manifests: Rendered):
    """Deployment, Service, budget and policy mean the same pods; the port names exist there."""
    pods = manifests.pods()
    for maker, pod in pods:
        selector = maker["spec"].get("selector", {}).get("matchLabels")
        assert selector is None or finds(selector, labels_of(pod))
    serving = [pod for _, pod in pods if pod["spec"]["containers"][0].get("args") == ["serve"]]
    others = [pod for _, pod in pods if pod not in serving]
    for service in manifests.of("Service"):
        assert any(finds(service["spec"]["selector"], labels_of(pod)) for pod in serving)
        assert not any(finds(service["spec"]["selector"], labels_of(pod)) for pod in others)
        for port in service["spec"]["ports"]:
            assert all(port["targetPort"] in ports_of(pod) for pod in serving)
    for budget in manifests.of("PodDisruptionBudget"):
        assert any(finds(budget["spec"]["selector"]["matchLabels"], labels_of(p)) for p in serving)
    for policy in manifests.of("NetworkPolicy"):
        assert any(
            finds(policy["spec"]["podSelector"]["matchLabels"], labels_of(pod)) for pod in serving
        )
        named = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
        assert all(named <= ports_of(pod) for pod in serving)


def test_the_autoscaler_scales_what_is_there(manifests: Rendered):
    """Its target exists, and leaves the number of replicas to it."""
    deployments = {each["metadata"]["name"]: each for each in manifests.of("Deployment")}
    for scaler in manifests.of("HorizontalPodAutoscaler"):
        target = deployments[scaler["spec"]["scaleTargetRef"]["name"]]
        assert "replicas" not in target["spec"]
        metric = scaler["spec"]["metrics"][0]["pods"]["metric"]["name"]
        assert metric == "turnwire_turns_in_flight"


def test_prometheus_scrapes_each_pod_once(manifests: Rendered):
    """The ServiceMonitor finds exactly one Service, and the port that it names there."""
    for monitor in manifests.of("ServiceMonitor"):
        selector = monitor["spec"]["selector"]["matchLabels"]
        found = [each for each in manifests.of("Service") if finds(selector, labels_of(each))]
        assert len(found) == 1
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in found[0]["spec"]["ports"]}


def test_every_configmap_that_is_read_is_there(manifests: Rendered):
    """`envFrom` names ConfigMaps of the same set, hash and all."""
    there = {each["metadata"]["name"] for each in manifests.of("ConfigMap")}
    read = {
        source["configMapRef"]["name"]
        for _, pod in manifests.pods()
        for each in containers(pod["spec"])
        for source in each.get("envFrom", [])
        if "configMapRef" in source
    }
    assert read <= there


# --- Ours -----------------------------------------------------------------------------------------


def test_turnwire_would_start(manifests: Rendered):
    """The environment is one that `turnwire serve` takes, and the probes ask where it listens."""
    assert manifests.ours()
    for _, container in manifests.ours():
        config = load({}, manifests.environment(container), None).config
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        probes = [value for key, value in container.items() if key.endswith("Probe")]
        assert len(probes) >= 2
        for probe in probes:
            assert ports[probe["httpGet"]["port"]] == config.admin_port
            assert probe["httpGet"]["path"] in {"/startupz", "/readyz", "/livez"}
            assert probe["timeoutSeconds"] >= 5
        assert config.admin_host == "0.0.0.0"  # or the kubelet would not reach it
        assert config.shutdown.notice_s == 0  # that is what the sleep before SIGTERM is for


def test_the_time_to_end_is_enough(manifests: Rendered):
    """The grace period holds the sleep before SIGTERM, the drain, and five seconds more."""
    for spec, container in manifests.ours():
        config = load({}, manifests.environment(container), None).config
        sleep_s = (
            container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        )
        grace_s = spec.get("terminationGracePeriodSeconds", 30)
        assert grace_s >= sleep_s + config.shutdown.drain_timeout_s + 5


def test_the_memory_is_enough(manifests: Rendered):
    """The limit holds chains, bodies twice, and the process."""
    for _, container in manifests.ours():
        config = load({}, manifests.environment(container), None).config
        limit = container["resources"]["limits"]["memory"]
        limit_bytes = int(limit[:-2]) * {"Mi": MIB, "Gi": 1024 * MIB}[limit[-2:]]
        held = config.chains.max_bytes + 2 * config.limits.max_inflight_body_bytes
        assert limit_bytes >= held + 256 * MIB


def test_pods_are_restricted(manifests: Rendered):
    """What the pod security standard "restricted" asks for, and a root that can't be written."""
    for _, pod in manifests.pods():
        for container in containers(pod["spec"]):
            context = pod["spec"].get("securityContext", {}) | container["securityContext"]
            assert context["runAsNonRoot"] is True
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
            if container.get("args", [""])[0] in ("serve", "health"):
                assert context["readOnlyRootFilesystem"] is True
                assert (context["runAsUser"], context["runAsGroup"]) == (65532, 65532)
        assert pod["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("name", ["native", "legacy"])
def test_the_sidecar_comes_before_the_agent_and_serves_it_alone(name: str):
    """It is first in its list, listens on loopback, and the agent is pointed there."""
    manifests = rendered(f"kustomize:{name}-sidecar")
    assert manifests.ours()
    for spec, container in manifests.ours():
        first, agent = containers(spec)[0], spec["containers"][-1]
        config = load({}, manifests.environment(container), None).config
        assert first is container
        assert config.host == "127.0.0.1"
        assert agent["name"] == "agent"
        url = manifests.environment(agent)["OPENAI_BASE_URL"]
        assert url == f"http://127.0.0.1:{config.port}/v1"
        assert (container in spec.get("initContainers", [])) == (name == "native")
        assert container.get("restartPolicy") == ("Always" if name == "native" else None)


def test_a_job_gets_the_sidecar_that_lets_it_finish():
    """Only the native form is given to a Job: an ordinary container would keep it running."""
    kinds = {name: {maker["kind"] for maker, _ in rendered(name).pods()} for name in SETS}

    assert "Job" in kinds["kustomize:native-sidecar"]
    assert not any("Job" in found for name, found in kinds.items() if "native" not in name)


# --- The chart ------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", VALUES, ids=lambda path: path.stem)
def test_lint(values: Any):
    """`helm lint --strict` has nothing to say but that an icon would be nice."""
    helm, yaml = module("helm_python"), module("yaml")

    report = helm.lint(str(CHART), yaml.safe_load(values.read_text()), strict=True)

    assert report["errors"] == []
    assert [each["error"] for each in report["messages"]] == ["icon is recommended"]


REFUSED = {
    "grace too short": ({"shutdown": {"drainSeconds": 611}}, "turns would be cut off"),
    "grace of a minute": (
        {"shutdown": {"terminationGracePeriodSeconds": 60}},
        r"preStopSeconds \+ drainSeconds \+ 5 is 620",
    ),
    "memory too small": ({"memory": {"limit": "1023Mi"}}, "would be killed under load"),
    "memory request above limit": ({"memory": {"request": "2Gi"}}, "above memory.limit"),
    "bodies too small for one": ({"memory": {"bodies": "127Mi"}}, "one body may have 128Mi"),
    "autoscaling upside down": (
        {"autoscaling": {"enabled": True, "minReplicas": 11}},
        "above maxReplicas 10",
    ),
    "one port for two": ({"service": {"port": 8788}}, "are the same"),
    "unknown key": ({"replicaCount": 3}, "replicaCount"),
    "unknown key within": ({"service": {"prot": 3}}, "prot"),
    "a setting that the chart makes": ({"settings": {"port": 9}}, "port"),
    "a setting of the shutdown": ({"settings": {"shutdown.notice_s": 9}}, "shutdown"),
    "no upstream": ({"upstream": "api.openai.com"}, "upstream"),
    "no replica": ({"replicas": 0}, "replicas"),
    "a tag as digest": ({"image": {"digest": "latest"}}, "digest"),
    "a memory limit in bytes": ({"memory": {"limit": "1000000000"}}, "limit"),
}


@pytest.mark.parametrize(("values", "complaint"), REFUSED.values(), ids=REFUSED)
def test_values_that_do_not_add_up_are_refused(values: Manifest, complaint: str):
    """With a sentence that names them."""
    helm = module("helm_python")

    with pytest.raises(helm.HelmError, match=complaint):
        render_chart(values)


def test_settings_reach_turnwire_as_they_are_meant():
    """Numbers without exponents, lists with commas, switches in lower case."""
    manifests = rendered("helm:azure")
    (_, container) = manifests.ours()[0]
    config = load({}, manifests.environment(container), None).config

    assert config.upstream == "https://my-resource.openai.azure.com/openai/v1"
    assert config.limits.max_decoded_body_bytes == 134217728
    assert config.websocket.retire_margin_s == 900.5
    assert config.security.identity_headers[:2] == ("authorization", "api-key")
    assert len(config.security.identity_headers) == 5
    assert (config.tuning.uvloop, config.log.level) == (False, "warning")


def test_the_rules_and_the_dashboard_go_with_the_chart():
    """What `prometheusRule` and `dashboard` install are the files of deploy/, whole."""
    yaml = module("yaml")
    manifests = rendered("helm:production")
    (rule,), (board,) = manifests.of("PrometheusRule"), manifests.of("ConfigMap")
    deploy = CHART.parents[1]

    assert rule["spec"] == yaml.safe_load((deploy / "prometheus" / "rules.yaml").read_text())
    shipped = json.loads((deploy / "grafana" / "turnwire.json").read_text())
    assert json.loads(board["data"]["turnwire.json"]) == shipped


def test_the_chart_has_the_version_of_the_package():
    """appVersion, image tags of Kustomize and pyproject.toml agree."""
    yaml = module("yaml")
    project = tomllib.loads((CHART.parents[2] / "pyproject.toml").read_text())["project"]
    version = project["version"]

    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == version
    images = {container["image"] for name in SETS for _, container in rendered(name).ours()}
    assert {image for image in images if "@" not in image} == {f"turnwire:{version}"}
