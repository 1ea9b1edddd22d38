"""Tests that the chart renders valid manifests, and refuses wrong values."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from baton.bootstrap.settings import BootstrapSettings
from baton.both.settings import BothSettings
from baton.decode.settings import DecodeSettings
from baton.prefill.settings import PrefillSettings
from baton.runtime.settings import settings_of
from tests.deploy.chart import CASES, CHART, ROOT, helm, named, objects, of_kind, pods, template, values_file

OTHERS = frozenset(
    {"LeaderWorkerSet", "DisaggregatedSet", "ScaledObject", "ServiceMonitor", "PodMonitor"}
) | {"PrometheusRule"}
"""Kinds that Kubernetes itself does not have: see test_custom_resources.py."""

PLAIN = ("demo", "secured")
"""deploy/kubernetes/CASE.yaml are rendered from these."""

SAID_BY_THE_CHART = {
    "bootstrap": {"http_port", "grpc_port", "admin_host", "admin_port", "served_model_name", "http_tls_cert"}
    | {
        "http_tls_key",
        "api_key_file",
        "admin_api_key_file",
        "grpc_host",
        "reasoning_key_file",
        "peer_bootstraps",
    },
    "worker": {"name", "advertise", "bootstrap", "grpc_port", "metrics_port", "device"}
    | {"tp", "pp", "rank", "world", "rendezvous", "meet_timeout_ms", "machines", "machine"}
    | {"side", "prefill_grpc_port", "prefill_metrics_port", "exit_file"},
    "all": {"host", "model", "drain_timeout_ms", "log_level", "log_format", "otlp_endpoint"}
    | {"tls_cert", "tls_key", "tls_ca"},
}
"""Settings that follow from other values: not free to be set again."""


NAMED = {"bootstrap": "a", "prefill": "b", "decode": "c"}
"""Names of the Secrets, by component."""

DECODE_BATCH = DecodeSettings().max_running
"""Default batch size of a decode worker, which the chart has to know."""


@pytest.mark.parametrize("case", CASES)
def test_helm_finds_nothing_to_say(case: str) -> None:
    helm("lint", "--strict", str(CHART), "--values", values_file(case))


@pytest.mark.parametrize("case", CASES)
def test_what_is_rendered_is_valid_for_the_current_kubernetes(case: str) -> None:
    version = kubernetes_validate.latest_version()
    for each in objects(case):
        if each["kind"] not in OTHERS:
            kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize(
    ("where", "wrong"),
    [(("spec", "replicaz"), 1), (("spec", "template", "spec", "containers", 0, "livenessProb"), {})],
)
def test_a_misspelt_field_of_a_manifest_is_found(where: tuple[Any, ...], wrong: object) -> None:
    [found, *_] = [each for each in objects("default") if each["kind"] == "Deployment"]
    planted = json.loads(json.dumps(found))
    at = planted
    for step in where[:-1]:
        at = at[step]
    at[where[-1]] = wrong
    with pytest.raises(kubernetes_validate.ValidationError, match=str(where[-1])):
        kubernetes_validate.validate(planted, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize(
    ("case", "flag", "name"),
    [
        ("tls", "--admin-api-key-file=/etc/baton/admin-keys/keys", "admin-keys"),
        ("secured", "", "admin-keys"),
        ("secured", "--reasoning-key-file=/etc/baton/reasoning-key/key", "reasoning-key"),
        ("tls", "", "reasoning-key"),
    ],
)
def test_the_bootstrap_gets_further_keys_from_their_secret_if_there_is_one(
    case: str, flag: str, name: str
) -> None:
    [pod] = [each for each in pods(case) if each.component == "bootstrap"]
    start = "--admin-api" if name == "admin-keys" else "--reasoning"
    assert [each for each in pod.main["args"] if each.startswith(start)] == ([flag] if flag else [])
    mounted = [each["mountPath"] for each in pod.main["volumeMounts"] if each["name"] == name]
    secrets = [each["secret"]["secretName"] for each in pod.spec["volumes"] if each["name"] == name]
    assert (mounted, secrets) == (([f"/etc/baton/{name}"], [f"baton-{name}"]) if flag else ([], []))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "security.apiKeys must be said"),
        ({"security": {"apiKeys": False}}, "security.tls must be said"),
        ({"security": {"apiKeys": "off", "tls": {"grpc": "off"}}}, "security.tls.http must be said"),
        ({"security": {"apiKeys": True, "tls": "off"}}, "apiKeys"),
        ({"security": {"apiKeys": {"secretNam": "x"}, "tls": "off"}}, "apiKeys"),
        ({"security": {"apiKeys": "off", "tls": {"grpc": {"bootstrap": "x"}, "http": "off"}}}, "grpc"),
        ({"security": {"apiKeys": "off", "adminKeys": {"secretNam": "x"}, "tls": "off"}}, "adminKeys"),
        ({"security": {"apiKeys": "off", "adminKeys": True, "tls": "off"}}, "adminKeys"),
        ({"security": {"apiKeys": "off", "reasoningKey": True, "tls": "off"}}, "reasoningKey"),
        ({"bootstrap": {"replicas": 2}}, "security.reasoningKey must be said"),
        ({"bootstrap": {"replicas": 0}}, "replicas"),
        ({"prefil": {"replicas": 2}}, "prefil"),
        ({"decode": {"settings": {"max-roms": 3}}}, "max-roms"),
        ({"decode": {"settings": {"tp": 2}}}, "tp"),
        ({"decode": {"replicas": "two"}}, "replicas"),
        ({"decode": {"autoscaling": {"kind": "vpa"}}}, "kind"),
        ({"image": {"worker": {"tag": "latest"}}}, "tag"),
        ({"prefill": {"pods": 2}}, "prefill.pods: 2 pods cannot share tp 1 × pp 1 ranks equally"),
        ({"decode": {"pp": 2}}, "decode.pp: only prefill has pipeline stages"),
        ({"prefill": {"tp": 4, "gpu": {"count": 1}}}, "prefill.gpu.count: 1 for the 4 ranks of a pod"),
        ({"decode": {"tp": 4, "pods": 2, "gpu": {"count": 4}}}, "decode.gpu.count: 4 for the 2 ranks"),
        (
            {"prefill": {"autoscaling": {"kind": "keda", "minReplicas": 5}}},
            "prefill.autoscaling: minReplicas 5 is more than maxReplicas 4",
        ),
        (
            {"decode": {"autoscaling": {"kind": "hpa"}, "settings": {"max-running": 48}}},
            "decode.autoscaling.running: 48 is never passed by a batch of 48 places",
        ),
        (
            {"decode": {"autoscaling": {"kind": "keda", "running": DECODE_BATCH}}},
            f"decode.autoscaling.running: {DECODE_BATCH} is never passed by a batch of {DECODE_BATCH} places",
        ),
        ({"monitoring": {"runbookUrl": "two words"}}, "runbookUrl"),
        ({"service": {"port": 0}}, "port"),
        ({"disaggregatedSet": {"enabled": True}, "prefill": {"autoscaling": {"kind": "hpa"}}}, "choose one"),
        ({"decode": {"replicas": 0}}, "decode.replicas and both.replicas are 0: nobody would decode"),
        ({"both": {"replicas": 1, "tp": 2}}, "both.tp, pp and pods: 2, 1 and 1, and a worker of both sides"),
        (
            {"both": {"autoscaling": {"kind": "hpa", "running": DECODE_BATCH}}},
            f"both.autoscaling.running: {DECODE_BATCH} is never passed by a batch of {DECODE_BATCH} places",
        ),
        ({"both": {"autoscaling": {"kind": "keda"}, "tp": 2}}, "both.tp, pp and pods: 2, 1 and 1"),
        (
            {"both": {"replicas": 1}, "security": {"apiKeys": "off", "tls": {"grpc": NAMED, "http": "off"}}},
            "security.tls.grpc.both must be said",
        ),
        ({"both": {"replicas": 1, "settings": {"side": "decode"}}}, "side"),
        ({"both": {"replicas": 1}, "ports": {"metrics": 8201}}, "no two may be equal"),
        (
            {"disaggregatedSet": {"enabled": True}, "prefill": {"replicas": 0}},
            "none of prefill.replicas and decode.replicas may be 0, or both",
        ),
    ],
    ids=str,
)
def test_what_is_misspelt_contradictory_or_left_open_is_refused_by_name(
    given: Mapping[str, Any], says: str, tmp_path: Path
) -> None:
    off = {"apiKeys": "off", "tls": "off"}
    values = {"model": {"path": "demo"}, **({"security": off} if given else {}), **given}
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    done = helm("template", "baton", str(CHART), "--values", str(file), check=False)
    assert done.returncode != 0
    assert says in done.stderr


NOTES_RENDERED = '{{ define "notes" }}%s{{ end }}\nkind: Notes\ntext: {{ include "notes" . | toJson }}\n'
"""Template that renders Helm's installation notes as an object, which `helm template` leaves out."""


@pytest.mark.parametrize("case", CASES)
def test_what_is_printed_after_an_installation_can_be_typed(case: str, tmp_path: Path) -> None:
    chart = shutil.copytree(CHART, tmp_path / "baton")
    notes = (chart / "templates" / "NOTES.txt").read_text()
    (chart / "templates" / "notes.yaml").write_text(NOTES_RENDERED % notes)
    said = ("--values", values_file(case), "--show-only", "templates/notes.yaml")
    told: str = yaml.safe_load(helm("template", "baton", str(chart), *said).stdout)["text"]
    [deployment] = [each for each in of_kind(case, "Deployment") if "bootstrap" in each["metadata"]["name"]]
    flags = " ".join(deployment["spec"]["template"]["spec"]["containers"][0]["args"])
    api = named(case, "Service", "baton")
    assert f"service/baton 8000:{api['spec']['ports'][0]['port']}\n" in told
    asked = [line for line in told.splitlines() if line.startswith("  curl ")]
    assert len(asked) == 2
    for line in asked:
        assert ("curl -k https://" in line) == ("--http-tls-cert" in flags)
        keyed = "--api-key-file" in flags and "/v1/" in line
        assert ('-H "Authorization: Bearer KEY"' in line) == keyed
    assert ("KEY is a line of keys in the Secret baton-api-keys." in told) == ("--api-key-file" in flags)


def test_off_without_quotes_is_off(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text("model: {path: demo, gguf: true}\nsecurity: {apiKeys: off, tls: off}\n")
    arguments = ("--namespace", "baton", "--values", str(file))
    assert helm("template", "baton", str(CHART), *arguments).stdout == template("default")


def test_a_model_has_to_be_named() -> None:
    off = ("--set", "security.apiKeys=off,security.tls=off")
    done = helm("template", "baton", str(CHART), *off, check=False)
    assert "model.path must be said" in done.stderr


@pytest.mark.parametrize("case", PLAIN)
def test_the_plain_manifests_are_what_the_chart_renders(case: str, rewrite: bool) -> None:
    head = (
        f"# Rendered from deploy/helm/baton with ci/{case}-values.yaml, for the namespace baton. Not to be\n"
        "# edited, but written anew: pytest tests/deploy --rewrite\n"
    )
    path = ROOT / "deploy" / "kubernetes" / f"{case}.yaml"
    rendered = head + template(case)
    if rewrite:
        path.write_text(rendered)
    assert path.read_text() == rendered, "the chart has changed: pytest tests/deploy --rewrite"


@pytest.mark.parametrize(
    "cls", [BootstrapSettings, PrefillSettings, DecodeSettings, BothSettings], ids=lambda cls: cls.role
)
def test_the_schema_knows_every_setting_of_a_service_that_is_free(cls: Any, rewrite: bool) -> None:
    path = CHART / "values.schema.json"
    schema = json.loads(path.read_text())
    kind = "bootstrap" if cls is BootstrapSettings else "worker"
    taken = SAID_BY_THE_CHART[kind] | SAID_BY_THE_CHART["all"]
    value = {"$ref": "#/definitions/settingValue"}
    free = {
        each.flag.removeprefix("--"): value
        for each in settings_of(cls)
        if each.name not in taken and not each.secret
    }
    place = schema["definitions"][f"{cls.role}Settings"]
    if rewrite:
        place["properties"] = free
        path.write_text(json.dumps(schema, indent=2, ensure_ascii=False) + "\n")
    assert place["properties"] == free, "the settings have changed: pytest tests/deploy --rewrite"
    assert place["additionalProperties"] is False


def test_every_value_has_its_line_in_the_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def resolved(part: Any) -> Any:
        name = part.get("$ref", "").rpartition("/")[2]
        return schema["definitions"][name] if name else part

    def compare(value: Any, part: Any, path: str) -> None:
        part = resolved(part)
        if isinstance(value, dict) and part.get("additionalProperties") is False:
            if path.endswith((".settings", ".resources")):
                return
            missing = {"global"} if not path else set()
            assert set(part["properties"]) - missing == set(value), path
            for name, each in value.items():
                compare(each, part["properties"][name], f"{path}.{name}")

    compare(values, schema, "")
