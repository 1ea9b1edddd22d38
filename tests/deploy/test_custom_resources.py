"""Tests of the custom resources against the definitions of their own controllers.

Their schemas are not in the validator: what is asked here was read from the projects' own definitions
(leaderworkerset.x-k8s.io/v1, disaggregatedset.x-k8s.io/v1, keda.sh/v1alpha1, monitoring.coreos.com/v1).
"""

import json
from pathlib import Path

import pytest
import yaml

from baton.runtime.setting_kinds import split_address
from tests.deploy.chart import CASES, ROOT, Object, named, of_kind, pods, pods_of
from tests.deploy.flags import settings
from tests.watch.prometheus import promtool

GROUPS = ("tp-group", "hpa")
BOTH_SCALED = ("--set", "both.autoscaling.kind=keda")


def _check_group(spec: Object) -> None:
    assert set(spec) <= {
        "replicas",
        "leaderWorkerTemplate",
        "rolloutStrategy",
        "startupPolicy",
        "networkConfig",
    }
    assert (
        spec["startupPolicy"] == "LeaderCreated"
    )  # followers that waited for a ready leader would wait for ever
    assert spec["rolloutStrategy"]["type"] == "RollingUpdate"
    assert set(spec["rolloutStrategy"]["rollingUpdateConfiguration"]) == {"maxSurge", "maxUnavailable"}
    group = spec["leaderWorkerTemplate"]
    assert set(group) <= {"size", "leaderTemplate", "workerTemplate", "restartPolicy"}
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"
    assert group["size"] >= 1


@pytest.mark.parametrize("case", GROUPS)
def test_a_groups_pods_share_its_ranks_which_meet_at_the_leaders(case: str) -> None:
    found = named(case, "LeaderWorkerSet", "baton-prefill")
    assert found["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    _check_group(found["spec"])
    leader, follower = (settings(pod) for pod in pods_of(found))
    size = found["spec"]["leaderWorkerTemplate"]["size"]
    assert size == leader.machines == follower.machines
    assert (leader.machine, follower.machine) == (0, 1)
    assert leader.launches
    assert leader.topology.ranks == follower.topology.ranks == size * len(leader.ranks_here)
    # The leader listens at its own address, which needs no name to be known yet; the others look it up.
    assert split_address(leader.rendezvous)[0] == leader.advertise
    assert split_address(follower.rendezvous)[0] == "baton-prefill-0.baton-prefill.baton"
    assert split_address(leader.rendezvous)[1] == split_address(follower.rendezvous)[1]


@pytest.mark.parametrize("case", GROUPS)
def test_ranks_wait_for_each_other_as_long_as_a_start_may_take(case: str) -> None:
    for pod in pods_of(named(case, "LeaderWorkerSet", "baton-prefill")):
        probe = pod.main["startupProbe"]
        assert settings(pod).meet_timeout_ms / 1000 <= probe["periodSeconds"] * probe["failureThreshold"]


def test_a_disaggregated_set_holds_both_sides_and_nothing_else_runs_them() -> None:
    [found] = of_kind("disaggregatedset", "DisaggregatedSet")
    assert found["apiVersion"] == "disaggregatedset.x-k8s.io/v1"
    assert set(found["spec"]) == {"roles"}
    assert [role["name"] for role in found["spec"]["roles"]] == ["prefill", "decode"]
    for role in found["spec"]["roles"]:
        assert set(role) == {"name", "spec"}
        assert role["spec"]["replicas"] >= 1  # none of them zero, or all
        _check_group(role["spec"])
    assert not of_kind("disaggregatedset", "LeaderWorkerSet")
    assert [each["metadata"]["name"] for each in of_kind("disaggregatedset", "Deployment")] == [
        "baton-bootstrap"
    ]


def test_keda_asks_each_side_for_its_own_queue_and_takes_no_answer_for_none() -> None:
    found = of_kind("cuda-rdma", "ScaledObject") + of_kind("both", "ScaledObject", *BOTH_SCALED)
    scaled = {each["metadata"]["name"]: each["spec"] for each in found}
    assert set(scaled) == {"baton-prefill", "baton-decode", "baton-both"}
    for name, spec in scaled.items():
        assert set(spec) == {
            "scaleTargetRef",
            "minReplicaCount",
            "maxReplicaCount",
            "advanced",
            "triggers",
        }
        assert 1 <= spec["minReplicaCount"] < spec["maxReplicaCount"]
        for trigger in spec["triggers"]:
            assert set(trigger) == {"type", "name", "metricType", "metadata"}
            assert (trigger["type"], trigger["metricType"]) == ("prometheus", "AverageValue")
            asked = trigger["metadata"]
            assert set(asked) == {"serverAddress", "query", "threshold", "ignoreNullValues"}
            assert all(isinstance(value, str) for value in asked.values())
            assert float(asked["threshold"]) > 0
            assert asked["ignoreNullValues"] == "false"
            of_pods = f'{{namespace="baton", pod=~"{name}-.+"}}' in asked["query"]
            assert of_pods is (trigger["name"] != "seconds"), "the bootstrap counts the seconds"
            assert asked["query"].startswith("sum(" if of_pods else "max("), (
                "each bootstrap counts all seconds"
            )
    assert [trigger["name"] for trigger in scaled["baton-prefill"]["triggers"]] == ["waiting", "seconds"]
    for name in ("baton-decode", "baton-both"):
        assert [trigger["name"] for trigger in scaled[name]["triggers"]] == ["waiting", "running"]


@pytest.mark.prometheus
def test_what_keda_asks_is_what_prometheus_understands(tmp_path: Path) -> None:
    queries = [
        trigger["metadata"]["query"]
        for each in of_kind("cuda-rdma", "ScaledObject") + of_kind("both", "ScaledObject", *BOTH_SCALED)
        for trigger in each["spec"]["triggers"]
    ]
    rules = [{"record": f"asked:{place}", "expr": query} for place, query in enumerate(queries)]
    file = tmp_path / "asked.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "keda", "rules": rules}]}))
    done = promtool("check", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(queries)} rules found" in done.stdout


def test_prometheus_scrapes_each_worker_once() -> None:
    """All ranks of a worker hold the same rooms. If each were scraped, a room would count several times."""
    rank_0 = {"leaderworkerset.sigs.k8s.io/worker-index": "0"}
    for case in CASES:
        for each in of_kind(case, "PodMonitor"):
            grouped = case == "disaggregatedset" or (case, each["metadata"]["name"]) == (
                "tp-group",
                "baton-prefill",
            )
            labels = each["spec"]["selector"]["matchLabels"]
            assert (rank_0.items() <= labels.items()) == grouped
            asked = [(one["port"], one["path"]) for one in each["spec"]["podMetricsEndpoints"]]
            sides = (
                ["metrics", "prefill-metrics"] if each["metadata"]["name"] == "baton-both" else ["metrics"]
            )
            assert asked == [(side, "/metrics") for side in sides]


def test_the_rules_and_the_dashboard_are_those_that_are_tested() -> None:
    [rule] = of_kind("tls", "PrometheusRule")
    files = (ROOT / "deploy" / "prometheus" / name for name in ("rules.yml", "alerts.yml"))
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["groups"]]
    assert rule["spec"] == {"groups": groups}
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    [dashboard] = of_kind("tls", "ConfigMap")
    assert dashboard["data"] == {
        "baton.json": (ROOT / "deploy" / "grafana" / "baton.json").read_text().rstrip()
    }


def test_each_alert_leads_to_the_runbook_where_it_is_kept() -> None:
    [plain] = of_kind("tls", "PrometheusRule")
    at = "https://pages.example.org/baton/runbook"
    [told] = of_kind("tls", "PrometheusRule", "--set", f"monitoring.runbookUrl={at}")
    alerts = [rule for group in told["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    assert alerts
    for each in alerts:
        assert each["annotations"]["runbook_url"] == f"{at}#{each['alert'].lower()}"
    assert told == json.loads(json.dumps(plain).replace("docs/runbook.md#", f"{at}#"))


def test_without_a_cluster_the_same_ports_are_scraped() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    [job] = config["scrape_configs"]
    [static] = job["static_configs"]
    scraped = {name.partition(".")[0]: port for name, port in map(split_address, static["targets"])}
    named_ports = {
        pod.component: {port["name"]: port["containerPort"] for port in pod.main["ports"]}
        for pod in pods("default")
    }
    assert scraped == {
        "bootstrap": named_ports["bootstrap"]["http"],
        "prefill-0": named_ports["prefill"]["metrics"],
        "decode-0": named_ports["decode"]["metrics"],
    }


def test_prometheus_scrapes_the_bootstraps_admin_port_the_way_it_is_served() -> None:
    for case, scheme in (("tls", "https"), ("tp-group", "http")):
        [monitor] = of_kind(case, "ServiceMonitor")
        [endpoint] = monitor["spec"]["endpoints"]
        assert (endpoint["port"], endpoint["path"]) == ("admin", "/metrics")
        assert endpoint.get("scheme", "http") == scheme
