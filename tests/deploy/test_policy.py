"""Tests that the manifests fit the services: flags, ports, probes, metrics and least rights."""

import json
import re
from typing import Any, Final

import pytest
from prometheus_client import CollectorRegistry

from baton.bootstrap.admin_routes import admin_router, probe_router
from baton.decode.metrics import DecodeMetrics
from baton.fleet.registry import Registry
from baton.models.conversion_cache import CONVERSION_DEADLINE_S
from baton.prefill.metrics import PrefillMetrics
from baton.runtime.errors import SettingsError
from baton.web.probe_pages import metrics_app
from tests.deploy.chart import CASES, NAMESPACE, Object, Pod, objects, of_kind, pods, pods_of
from tests.deploy.flags import settings

STOP_MARGIN_S = 15
"""Seconds that a service may need beyond its drain time to say goodbye and close."""


def routes(pod: Pod) -> set[str]:
    """Return the routes served at the probed port."""
    if pod.component == "bootstrap":
        registry = Registry(model="m", first_room=1, lease_ms=1, done_max=1, failed_max=1)
        routers = (
            probe_router(registry, lambda: None),
            admin_router(registry, CollectorRegistry(), lambda *_: None),
        )
        return {route.path for router in routers for route in router.routes}  # type: ignore[attr-defined]
    app = metrics_app(CollectorRegistry(), list, list, list)
    return {route.path for route in app.routes}  # type: ignore[attr-defined]


def ports(pod: Pod) -> dict[str, int]:
    return {each["name"]: each["containerPort"] for each in pod.main["ports"]}


@pytest.mark.parametrize("case", CASES)
def test_flags_and_variables_are_what_the_service_reads_and_its_ports_are_the_pods(case: str) -> None:
    for pod in pods(case):
        read = settings(pod)
        assert read.role == ("worker" if pod.component == "both" else pod.component)
        wanted = {"grpc": read.grpc_port}
        if pod.component == "bootstrap":
            wanted |= {"http": read.http_port, "admin": read.admin_port}
            assert read.admin_host == read.host
        else:
            wanted["metrics"] = read.metrics_port
            assert read.advertise == "10.0.0.7"
            if read.machine:
                del wanted["grpc"]
            if pod.component == "both":
                other = read.of_prefill
                wanted |= {"prefill-grpc": other.grpc_port, "prefill-metrics": other.metrics_port}
        assert ports(pod) == wanted
        assert len(set(wanted.values())) == len(wanted)
        assert read.host == "0.0.0.0"
        assert all(port >= 1024 for port in wanted.values())
        assert read.log_format == "json"


@pytest.mark.parametrize("wrong", ["--max-roms=3", "--max-rooms=many"])
def test_a_flag_that_the_service_does_not_take_is_found(wrong: str) -> None:
    [pod] = [each for each in pods("default") if each.component == "decode"]
    container = {**pod.main, "args": [*pod.main["args"], wrong]}
    with pytest.raises(SettingsError, match="--max-ro"):
        settings(Pod(pod.owner, {**pod.template, "spec": {**pod.spec, "containers": [container]}}))


@pytest.mark.parametrize("case", CASES)
def test_each_probe_asks_for_a_page_that_is_there_at_a_port_that_is_named(case: str) -> None:
    for pod in pods(case):
        read = settings(pod)
        at = "admin" if pod.component == "bootstrap" else "metrics"
        tls = pod.component == "bootstrap" and read.http_tls is not None
        wanted = {
            "startupProbe": "/health" if pod.component == "bootstrap" else "/started",
            "livenessProbe": "/health",
            "readinessProbe": "/ready",
        }
        for probe, page in wanted.items():
            asked = pod.main[probe]["httpGet"]
            assert asked["path"] == page
            assert page in routes(pod)
            assert asked["port"] == at
            assert at in ports(pod)
            assert asked.get("scheme", "HTTP") == ("HTTPS" if tls else "HTTP")
            assert pod.main[probe]["timeoutSeconds"] <= pod.main[probe]["periodSeconds"] + 3
        started = pod.main["startupProbe"]
        assert started["periodSeconds"] * started["failureThreshold"] >= 300


@pytest.mark.parametrize(
    ("more", "least_s"),
    [
        ((), CONVERSION_DEADLINE_S + 300),
        (("--set", "model.gguf=false"), 300),
        (("--set", "bootstrap.startupSeconds=60"), 60),
    ],
    ids=str,
)
def test_a_start_may_take_the_conversion_of_a_file_as_well(more: tuple[str, ...], least_s: float) -> None:
    deployments = of_kind("default", "Deployment", *more)
    [deployment] = [each for each in deployments if "bootstrap" in each["metadata"]["name"]]
    [pod] = pods_of(deployment)
    started = pod.main["startupProbe"]
    assert started["periodSeconds"] * started["failureThreshold"] == least_s
    # It is ready when workers are.
    theirs_s = [each["spec"]["progressDeadlineSeconds"] for each in deployments if each is not deployment]
    assert len(theirs_s) == 2
    assert deployment["spec"]["progressDeadlineSeconds"] == max(least_s + 300, *theirs_s)


@pytest.mark.parametrize("case", ["hpa", "tp-group"])
def test_what_is_added_to_the_environment_is_there_for_the_download_too(case: str) -> None:
    """Variables for a proxy or a mirror are needed by the download above all."""
    proxy = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
    more = ("--set-json", f"env={json.dumps([proxy])}", "--set", "model.download.repository=a/b")
    for pod in pods(case, *more):
        names = [container["name"] for container in pod.containers]
        assert names[0] == "model"
        assert all(proxy in container["env"] for container in pod.containers), pod.owner


def test_the_bootstrap_fetches_no_weights_and_workers_do() -> None:
    fetched = {
        pod.component: pod.containers[0]["args"]
        for pod in pods("hpa", "--set", "model.download.repository=a/b")
    }
    assert "--exclude=*.safetensors" in fetched.pop("bootstrap")
    assert fetched
    for arguments in fetched.values():
        assert not [each for each in arguments if "exclude" in each]


def test_the_bootstrap_may_mount_a_model_without_weights_of_its_own() -> None:
    small = {"path": "/models/small", "volume": {"configMap": {"name": "small"}}}
    more = ("--set-json", f"bootstrap.model={json.dumps(small)}", "--set", "model.gguf=true")
    for pod in pods("cuda-rdma", *more):
        [volume] = [each for each in pod.spec["volumes"] if each["name"] == "model"]
        own = pod.component == "bootstrap"
        assert (volume.get("configMap") == {"name": "small"}) is own
        assert ("--model=/models/small" in pod.main["args"]) is own
        assert ("baton-bootstrap" in pod.main["image"]) is own, "no file is converted there"


@pytest.mark.parametrize("case", CASES)
def test_the_grace_period_is_longer_than_all_that_comes_before_the_end(case: str) -> None:
    for pod in pods(case):
        hook = pod.main.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        drain_s = settings(pod).drain_timeout_ms / 1000
        assert pod.spec["terminationGracePeriodSeconds"] >= hook + drain_s + STOP_MARGIN_S


@pytest.mark.parametrize("case", CASES)
def test_a_pod_has_the_least_of_rights(case: str) -> None:
    for pod in pods(case):
        assert pod.spec["automountServiceAccountToken"] is False
        assert (
            pod.spec["enableServiceLinks"] is False
        )  # their variables would be refused as misspelt settings
        whole = pod.spec["securityContext"]
        assert whole["runAsNonRoot"]
        assert whole["runAsUser"] >= 10_000
        assert whole["seccompProfile"] == {"type": "RuntimeDefault"}
        for name in ("hostNetwork", "hostPID", "hostIPC"):
            assert name not in pod.spec
        for container in pod.containers:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["readOnlyRootFilesystem"] is True
            assert own["capabilities"]["drop"] == ["ALL"]
            assert set(own["capabilities"].get("add", [])) <= {"IPC_LOCK"}
            assert "privileged" not in own
            assert {"requests", "limits"} <= container["resources"].keys()
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]
            assert re.search(r":[^:/]+$|@sha256:", container["image"]), "an image without a version"
            assert not container["image"].endswith(":latest")


@pytest.mark.parametrize("case", CASES)
def test_what_a_pod_mounts_is_there_and_secrets_are_files_that_only_it_reads(case: str) -> None:
    for pod in pods(case):
        volumes = {each["name"]: each for each in pod.spec["volumes"]}
        assert not any("hostPath" in each for each in volumes.values())
        for container in pod.containers:
            assert {each["name"] for each in container["volumeMounts"]} <= volumes.keys()
            writable = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
            assert {"/tmp", "/home/baton"} <= writable
            assert {"name": "HOME", "value": "/home/baton"} in container["env"]
            for each in container["env"]:
                secret = "valueFrom" in each and "secretKeyRef" in each["valueFrom"]
                assert secret == (each["name"] == "HF_TOKEN")
        for each in volumes.values():
            if "secret" in each:
                assert each["secret"]["defaultMode"] == 0o440
        mounted = {each["mountPath"] for each in pod.main["volumeMounts"]}
        for flag in pod.main["args"]:
            path = flag.partition("=")[2]
            if path.startswith("/etc/baton/"):
                assert path.rpartition("/")[0] in mounted


@pytest.mark.parametrize("case", CASES)
def test_nothing_asks_for_rights_in_the_cluster(case: str) -> None:
    kinds = {each["kind"] for each in objects(case)}
    assert not {kind for kind in kinds if "Role" in kind}
    for each in of_kind(case, "ServiceAccount"):
        assert each["automountServiceAccountToken"] is False


def _selected(case: str, labels: dict[str, str]) -> list[Pod]:
    return [pod for pod in pods(case) if labels.items() <= pod.labels.items()]


@pytest.mark.parametrize("case", CASES)
def test_every_selector_finds_the_pods_that_it_is_for(case: str) -> None:
    components = {"bootstrap", "prefill", "decode"} | ({"both"} if case == "both" else set())
    assert {pod.component for pod in pods(case)} == components
    for each in objects(case):
        component = each["metadata"]["labels"]["app.kubernetes.io/component"]
        assert each["metadata"]["namespace"] == NAMESPACE
        for selector in _selectors(each):
            labels = {k: v for k, v in selector.items() if not k.startswith("leaderworkerset.sigs")}
            if each["kind"] == "ServiceMonitor":
                [service] = [
                    one
                    for one in of_kind(case, "Service")
                    if labels.items() <= one["metadata"]["labels"].items()
                ]
                [endpoint] = each["spec"]["endpoints"]
                assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
                continue
            found = _selected(case, labels)
            assert {pod.component for pod in found} == {component}, each["metadata"]["name"]
            assert {pod.owner for pod in pods_of(each)} <= {pod.owner for pod in found}


def _selectors(each: Object) -> list[dict[str, str]]:
    spec = each.get("spec", {})
    match each["kind"]:
        case "Service":
            return [spec["selector"]]
        case "NetworkPolicy":
            return [spec["podSelector"]["matchLabels"]]
        case "Deployment" | "PodDisruptionBudget" | "ServiceMonitor" | "PodMonitor":
            return [spec["selector"]["matchLabels"]]
        case _:
            return []


@pytest.mark.parametrize("case", CASES)
def test_every_port_that_is_named_exists(case: str) -> None:
    [bootstrap] = [pod for pod in pods(case) if pod.component == "bootstrap"]
    for service in of_kind(case, "Service"):
        assert {each["targetPort"] for each in service["spec"]["ports"]} <= ports(bootstrap).keys()
    for pod in pods(case):
        if pod.component != "bootstrap":
            for address in settings(pod).bootstrap:
                host, _, port = address.rpartition(":")
                [service] = [one for one in of_kind(case, "Service") if one["metadata"]["name"] == host]
                assert int(port) in {each["port"] for each in service["spec"]["ports"]}


@pytest.mark.parametrize("case", CASES)
def test_clients_find_the_api_at_the_usual_port_of_what_it_speaks_or_where_they_are_told(case: str) -> None:
    [bootstrap] = [pod for pod in pods(case) if pod.component == "bootstrap"]
    speaks = ("http", 80) if settings(bootstrap).http_tls is None else ("https", 443)
    for told, more in ((speaks, ()), ((speaks[0], 8443), ("--set", "service.port=8443"))):
        [api] = [each for each in of_kind(case, "Service", *more) if each["metadata"]["name"] == "baton"]
        [port] = api["spec"]["ports"]
        assert (port["name"], port["port"]) == told


def test_a_workers_name_is_its_pods() -> None:
    """A worker's name belongs to one process at a time, and so does a pod's name."""
    for case in CASES:
        for pod in pods(case):
            if pod.component != "bootstrap":
                assert "--name=$(POD_NAME)" in pod.main["args"]
                [name] = [each for each in pod.main["env"] if each["name"] == "POD_NAME"]
                assert name["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}


@pytest.mark.parametrize("case", CASES)
def test_threads_are_the_cores_that_a_pod_asks_for_and_devices_are_as_many_as_ranks(case: str) -> None:
    for pod in pods(case):
        if pod.component == "bootstrap":
            continue
        read = settings(pod)
        ranks = len(read.ranks_here)
        assert read.threads * ranks <= int(pod.main["resources"]["requests"]["cpu"])
        gpus = pod.main["resources"]["limits"].get("nvidia.com/gpu", 0)
        assert (read.device == "cuda") == (gpus > 0)
        assert gpus in (0, ranks)


@pytest.mark.parametrize(
    ("cpu", "threads"),
    [("2", 2), ("2.5", 2), ("2500m", 2), ("2999m", 2), ("0.5", 1), ("500m", 1), ("12.9", 12)],
)
@pytest.mark.parametrize("kind", ["--set", "--set-string"])
def test_of_a_part_of_a_core_no_thread_is_made(cpu: str, threads: int, kind: str) -> None:
    asked = (kind, f"decode.resources.requests.cpu={cpu}")
    [decode] = [pod for pod in pods("default", *asked) if pod.component == "decode"]
    assert settings(decode).threads == threads
    [of_two, *_] = [pod for pod in pods("tp-group", *asked) if pod.component == "decode"]
    assert settings(of_two).threads == max(1, threads // 2)


def _metrics_asked_for(case: str, *more: str) -> set[str]:
    asked: set[str] = set()
    for each in of_kind(case, "ScaledObject", *more):
        for trigger in each["spec"]["triggers"]:
            asked |= set(re.findall(r"baton_\w+", trigger["metadata"]["query"]))
    for each in of_kind(case, "HorizontalPodAutoscaler", *more):
        asked |= {metric[metric["type"].lower()]["metric"]["name"] for metric in each["spec"]["metrics"]}
    return asked


def test_both_sides_of_a_worker_are_asked_for_their_metrics() -> None:
    """The two sides are two workers to the bootstrap, each with a metrics registry of its own."""
    [monitor] = [each for each in of_kind("both", "PodMonitor") if each["metadata"]["name"] == "baton-both"]
    [pod] = [each for each in pods("both") if each.component == "both"]
    asked = {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]}
    assert (
        asked == {name for name in ports(pod) if name.endswith("metrics")} == {"metrics", "prefill-metrics"}
    )


SCALED: Final = [
    ("cuda-rdma",),
    ("hpa",),
    *(("both", "--set", f"both.replicas=0,both.autoscaling.kind={kind}") for kind in ("keda", "hpa")),
]
"""Cases of which workers are scaled by themselves."""


@pytest.mark.parametrize("case", SCALED, ids=" ".join)
def test_what_a_side_is_scaled_by_is_what_its_workers_count(case: tuple[str, ...]) -> None:
    registry = CollectorRegistry()
    PrefillMetrics(registry)
    prefill = {family.name for family in registry.collect() if family.type == "gauge"}
    registry = CollectorRegistry()
    DecodeMetrics(registry, max_running=1)
    decode = {family.name for family in registry.collect() if family.type == "gauge"}
    asked = _metrics_asked_for(*case)
    # The bootstrap estimates it. The chart asks for it where values set `queueSeconds`.
    assert ("baton_prefill_queue_seconds" in asked) is (case[0] != "both")
    asked.discard("baton_prefill_queue_seconds")
    assert asked == {
        "baton_prefill_waiting_queue_requests",
        "baton_decode_prealloc_queue_requests",
        "baton_decode_waiting_requests",
        "baton_decode_running_requests",
        "baton_side_queue_requests",
    }
    assert {name for name in asked if "prefill" in name} <= prefill
    assert {name for name in asked if "decode" in name} <= decode


@pytest.mark.parametrize("case", SCALED, ids=" ".join)
def test_an_autoscaler_scales_what_is_there_and_nobody_else_sets_its_size(case: tuple[str, ...]) -> None:
    name, *more = case
    scalers = of_kind(name, "ScaledObject", *more) + of_kind(name, "HorizontalPodAutoscaler", *more)
    wanted = {"baton-both"} if name == "both" else {"baton-prefill", "baton-decode"}
    assert {each["metadata"]["name"] for each in scalers} == wanted
    for scaler in scalers:
        target = scaler["spec"]["scaleTargetRef"]
        [found] = [
            each
            for each in of_kind(name, target["kind"], *more)
            if each["metadata"]["name"] == target["name"] and each["apiVersion"] == target["apiVersion"]
        ]
        assert "replicas" not in found["spec"]


def _allowed(case: str, component: str) -> dict[Any, set[str]]:
    """Return the peers that a component's network policy lets in, by port."""
    [policy] = [
        each for each in of_kind(case, "NetworkPolicy") if each["metadata"]["name"] == f"baton-{component}"
    ]
    allowed: dict[Any, set[str]] = {}
    for rule in policy["spec"]["ingress"]:
        peers = {
            peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            if "podSelector" in peer
            else peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
            for peer in rule.get("from", [])
        } or {"everybody"}
        for port in rule.get("ports", [{"port": "any"}]):
            allowed.setdefault(port["port"], set()).update(peers)
    return allowed


def test_only_the_named_peers_reach_the_control_and_data_ports() -> None:
    assert _allowed("default", "bootstrap") == {
        "http": {"everybody"},
        "grpc": {"bootstrap", "prefill", "decode"},
        "admin": {"monitoring"},
    }
    assert _allowed("tls", "bootstrap")["http"] == {"gateway"}
    assert _allowed("tp-group", "prefill") == {
        8200: {"bootstrap", "decode"},
        9500: {"decode"},
        "metrics": {"monitoring"},
        "any": {"prefill"},
    }
    assert _allowed("tp-group", "decode") == {
        8200: {"bootstrap"},
        9500: {"prefill"},
        "metrics": {"monitoring"},
    }
    assert _allowed("both", "bootstrap")["grpc"] == {"bootstrap", "prefill", "decode", "both"}
    assert _allowed("both", "both") == {
        8200: {"bootstrap"},
        8201: {"bootstrap", "decode", "both"},
        9500: {"prefill", "decode", "both"},
        "metrics": {"monitoring"},
        "prefill-metrics": {"monitoring"},
    }
    assert _allowed("both", "prefill")[8200] == {"bootstrap", "decode", "both"}
    assert _allowed("both", "decode")[9500] == {"prefill", "both"}
    for case in CASES:
        for policy in of_kind(case, "NetworkPolicy"):
            data = [
                f"{port['port']}-{port['endPort']}"
                for rule in policy["spec"]["ingress"]
                for port in rule.get("ports", [])
                if "endPort" in port
            ]
            component = policy["metadata"]["labels"]["app.kubernetes.io/component"]
            for pod in _selected(case, {"app.kubernetes.io/component": component}):
                listens = [each["value"] for each in pod.main["env"] if each["name"] == "UCX_TCP_PORT_RANGE"]
                assert data == listens
                assert len(data) == (component != "bootstrap")
