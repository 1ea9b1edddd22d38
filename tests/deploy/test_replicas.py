"""Tests of several bootstraps in the chart: addresses, keys, nodes, rollouts and evictions."""

from dataclasses import dataclass, field
from typing import Any, Final

import kubernetes_validate  # type: ignore[import-untyped]
import pytest

from baton.runtime.setting_kinds import split_address
from tests.deploy.chart import CASES, Object, Pod, helm, objects, of_kind, pods, values_file
from tests.deploy.flags import settings
from tests.deploy.test_render import OTHERS

REPLICAS: Final = (1, 2, 3)
HEADLESS: Final = "baton-bootstrap-grpc"
CALLS_MAX: Final = 100
"""Most evictions that a drain asks for."""


def values(replicas: int) -> tuple[str, ...]:
    return "--set", f"bootstrap.replicas={replicas}"


def one(kind: str, name: str, *more: str, case: str = "replicas") -> Object:
    [found] = [each for each in of_kind(case, kind, *more) if each["metadata"]["name"] == name]
    return found


def bootstrap_pod(*more: str) -> Pod:
    [pod] = [each for each in pods("replicas", *more) if each.component == "bootstrap"]
    return pod


@pytest.mark.parametrize("replicas", REPLICAS)
def test_any_number_of_bootstraps_renders_to_valid_manifests(replicas: int) -> None:
    more = values(replicas)
    for each in objects("replicas", *more):
        if each["kind"] not in OTHERS:
            kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
    assert one("Deployment", "baton-bootstrap", *more)["spec"]["replicas"] == replicas


def test_a_single_bootstrap_needs_no_key_of_several() -> None:
    more = (*values(1), "--set", "security.reasoningKey=null")
    assert settings(bootstrap_pod(*more)).reasoning_key_file == ""


@pytest.mark.parametrize("case", CASES)
def test_workers_and_bootstraps_have_a_name_with_each_bootstraps_address_also_before_it_is_ready(
    case: str,
) -> None:
    """A bootstrap becomes ready by its workers. The name has addresses of pods, so its port is theirs."""
    service = one("Service", HEADLESS, case=case)["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    [bootstrap] = [settings(pod) for pod in pods(case) if pod.component == "bootstrap"]
    for pod in pods(case):
        read = settings(pod)
        addresses = read.peer_bootstraps if pod.component == "bootstrap" else read.bootstrap
        assert [split_address(each) for each in addresses] == [(HEADLESS, bootstrap.grpc_port)]
    clients = one("Service", "baton", case=case)["spec"]
    assert "publishNotReadyAddresses" not in clients
    assert "clusterIP" not in clients


def test_all_bootstraps_have_the_same_keys() -> None:
    """One pod template, so the same Secrets. No key is drawn by a pod for itself."""
    read = settings(bootstrap_pod())
    files = (read.api_key_file, read.admin_api_key_file, read.reasoning_key_file)
    volumes = {each["name"]: each for each in bootstrap_pod().spec["volumes"]}
    mounts = {each["mountPath"]: each["name"] for each in bootstrap_pod().main["volumeMounts"]}
    named = [volumes[mounts[file.rpartition("/")[0]]]["secret"]["secretName"] for file in files]
    assert named == ["baton-api-keys", "baton-admin-keys", "baton-reasoning-key"]


@pytest.mark.parametrize("case", [("tp-group",), ("replicas",), ("replicas", *values(1))], ids=" ".join)
def test_pods_of_a_kind_prefer_nodes_without_another(case: tuple[str, ...]) -> None:
    for pod in pods(*case):
        spread = pod.spec.get("topologySpreadConstraints", [])
        assert bool(spread) == (not pod.owner.startswith("LeaderWorkerSet")), pod.owner
        for each in spread:
            assert each["topologyKey"] == "kubernetes.io/hostname"
            assert each["whenUnsatisfiable"] == "ScheduleAnyway", "fewer nodes than pods are enough"
            assert each["labelSelector"]["matchLabels"].items() <= pod.labels.items()


def test_values_replace_the_spread_of_bootstraps() -> None:
    more = ("--set-json", 'bootstrap.topologySpreadConstraints=[{"maxSkew":2}]')
    assert bootstrap_pod(*more).spec["topologySpreadConstraints"] == [{"maxSkew": 2}]


@dataclass
class Cluster:
    """Pods of the bootstraps on nodes, with Kubernetes' rules for evictions and for rollouts."""

    deployment: Object
    budget: Object | None
    nodes: list[str]
    """Node of each ready pod."""
    fewest: int = field(init=False)
    """Fewest ready pods at any time so far."""

    def __post_init__(self) -> None:
        self.fewest = len(self.nodes)

    @property
    def replicas(self) -> int:
        return int(self.deployment["spec"]["replicas"])

    def remove(self, node: str) -> None:
        self.nodes.remove(node)
        self.fewest = min(self.fewest, len(self.nodes))

    def evict(self, node: str) -> bool:
        """Evict a ready pod on the node, if the budget lets it. Return whether it did."""
        if self.budget is not None:
            wanted = self.replicas - int(self.budget["spec"]["maxUnavailable"])
            if len(self.nodes) <= wanted:
                return False
        self.remove(node)
        return True

    def drain(self, node: str, other: str) -> None:
        """Drain a node. A pod that is refused is tried again, after a new one on `other` is ready."""
        for _ in range(CALLS_MAX):
            if node not in self.nodes:
                break
            if not self.evict(node):
                assert len(self.nodes) < self.replicas, "the drain never ends"
                self.nodes.append(other)
        self.nodes += [other] * (self.replicas - len(self.nodes))
        assert node not in self.nodes

    def roll_out(self) -> None:
        """Replace each pod by one of a new version, as the strategy allows."""
        strategy = self.deployment["spec"]["strategy"]
        assert strategy["type"] == "RollingUpdate"
        surge, unavailable = (strategy["rollingUpdate"][key] for key in ("maxSurge", "maxUnavailable"))
        old, new = list(self.nodes), 0
        while old:
            for _ in range(min(len(old), max(0, len(old) + new - (self.replicas - unavailable)))):
                self.remove(old.pop())
            started = min(self.replicas - new, self.replicas + surge - len(old) - new)
            assert started > 0 or not old, "the rollout never ends"
            new += started
            self.nodes += ["new"] * started


def cluster(replicas: int, nodes: list[str]) -> Cluster:
    more = values(replicas)
    budgets = [
        each
        for each in of_kind("replicas", "PodDisruptionBudget", *more)
        if each["metadata"]["name"] == "baton-bootstrap"
    ]
    return Cluster(one("Deployment", "baton-bootstrap", *more), next(iter(budgets), None), nodes)


@pytest.mark.parametrize("replicas", REPLICAS)
def test_there_is_a_budget_where_there_is_more_than_one(replicas: int) -> None:
    """A single bootstrap with a budget would keep its node from ever being drained."""
    budget = cluster(replicas, []).budget
    assert (budget is not None) == (replicas > 1)
    if budget is not None:
        assert budget["spec"]["maxUnavailable"] == 1
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
        assert budget["spec"]["selector"]["matchLabels"].items() <= bootstrap_pod().labels.items()


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("spread", [True, False])
def test_a_drain_of_one_node_after_another_leaves_all_bootstraps_but_one(replicas: int, spread: bool) -> None:
    """Also if all of them are on one node, since the spread is a preference."""
    nodes = [f"node-{number}" for number in range(replicas)] if spread else ["node-0"] * replicas
    running = cluster(replicas, list(nodes))
    for node in dict.fromkeys(nodes):
        running.drain(node, "spare")
    assert running.fewest == replicas - 1
    assert running.nodes == ["spare"] * replicas


def test_without_the_budget_a_drain_of_their_only_node_leaves_none() -> None:
    running = cluster(3, ["node-0"] * 3)
    running.budget = None
    running.drain("node-0", "spare")
    assert running.fewest == 0


@pytest.mark.parametrize("replicas", REPLICAS)
def test_a_rollout_takes_no_bootstrap_away_before_another_is_ready(replicas: int) -> None:
    running = cluster(replicas, ["old"] * replicas)
    running.roll_out()
    assert running.fewest == replicas
    assert running.nodes == ["new"] * replicas


@pytest.mark.parametrize(
    ("name", "value"), [("rollout.maxUnavailable", 1), ("maxUnavailable", 2), ("replicas", 5)]
)
def test_the_numbers_are_values(name: str, value: int) -> None:
    more = ("--set", f"bootstrap.{name}={value}")
    read: dict[str, Any] = {
        "rollout.maxUnavailable": one("Deployment", "baton-bootstrap", *more)["spec"]["strategy"][
            "rollingUpdate"
        ]["maxUnavailable"],
        "maxUnavailable": one("PodDisruptionBudget", "baton-bootstrap", *more)["spec"]["maxUnavailable"],
        "replicas": one("Deployment", "baton-bootstrap", *more)["spec"]["replicas"],
    }
    assert read[name] == value


def test_the_schema_takes_whole_numbers_of_bootstraps_from_one() -> None:
    for wrong in ("0", "1.5", "two"):
        given = ("--values", values_file("replicas"), "--set", f"bootstrap.replicas={wrong}")
        done = helm("template", "baton", "deploy/helm/baton", *given, check=False)
        assert done.returncode != 0
        assert "replicas" in done.stderr
