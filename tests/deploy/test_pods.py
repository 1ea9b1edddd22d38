"""Tests of pods run from their rendered command lines: probes, an answer, an orderly end.

As they are secured in deploy/kubernetes/secured.yaml, and a worker of both sides beside them, with Secrets as
docs/deploy.md makes them; the bootstrap has the packages of its image and nothing else.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from baton.cli.certs import BOTH, make_certs
from baton.wire.service_role import ServiceRole
from tests.deploy.chart import pods
from tests.deploy.packages import bootstrap_packages
from tests.deploy.running import Running, run
from tests.models.eight_heads import eight_heads
from tests.ports import free_port

pytestmark = pytest.mark.stack

Pods = Mapping[str, Running]
"""Running pods by component."""

WORKER_PORTS = ("worker", "metrics", "prefillWorker", "prefillMetrics")
KEY = "a-key-of-the-deployment-tests"


def secrets(folder: Path) -> dict[str, str]:
    """Directories as pods mount them, by what the chart calls them."""
    certs = folder / "certs"
    make_certs(certs, ["127.0.0.1"])
    for component, name in (*((each, each) for each in (*ServiceRole, "http")), ("both", BOTH)):
        mounted = folder / component
        mounted.mkdir()
        for to, of in (("tls.crt", f"{name}.crt"), ("tls.key", f"{name}.key"), ("ca.crt", "ca.crt")):
            (mounted / to).write_bytes((certs / of).read_bytes())
    (folder / "keys").write_text(KEY + "\n")
    return {"/etc/baton/http-tls": str(folder / "http"), "/etc/baton/api-keys": str(folder)}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, demo_model_dir: Path) -> Iterator[Pods]:
    """The four kinds of pods, each once."""
    folder = tmp_path_factory.mktemp("pods")
    ports = {name: free_port() for name in ("http", "admin", "grpc")}
    model = eight_heads(folder / "model", demo_model_dir)
    mounted = secrets(folder)
    started: dict[str, Running] = {}
    try:
        for component in ("bootstrap", "prefill", "decode", "both"):
            # Workers on one machine: each with ports of its own.
            own = ports | {name: free_port() for name in WORKER_PORTS}
            given = {f"ports.{name}": str(port) for name, port in own.items()}
            given |= {f"{side}.settings.kv-cache-memory": "64MiB" for side in ("prefill", "decode", "both")}
            given |= {"both.replicas": "1", "security.tls.grpc.both": "baton-worker-tls"}
            settings = ",".join(f"{name}={value}" for name, value in given.items())
            [pod] = [
                each
                for each in pods("secured", "--set", f"model.path={model},{settings}")
                if each.component == component
            ]
            replaced = {
                **mounted,
                "/etc/baton/grpc-tls": str(folder / component),
                "baton-bootstrap-grpc:": "127.0.0.1:",
                "0.0.0.0": "127.0.0.1",
                "$(POD_IP)": "127.0.0.1",
                "$(POD_NAME)": f"baton-{component}-7c9d-x2x",
            }
            packages = bootstrap_packages(folder / "packages") if component == "bootstrap" else None
            started[component] = run(pod, folder / f"{component}-pod", replaced, packages)
        yield started
    finally:
        for each in started.values():
            each.process.kill()
            each.process.wait()
            each.http.close()


def test_the_secured_pods_start_become_ready_serve_drain_and_write_where_they_may(running: Pods) -> None:
    for each in running.values():
        each.wait("startupProbe")
        assert each.probe("livenessProbe") == 200, each.said()
    for each in running.values():
        each.wait("readinessProbe")
    [port] = [
        each["containerPort"] for each in running["bootstrap"].pod.main["ports"] if each["name"] == "http"
    ]
    url = f"https://127.0.0.1:{port}/v1/completions"
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 4, "ignore_eos": True}
    with httpx.Client(verify=False, trust_env=False, timeout=60) as http:
        model = http.get(f"https://127.0.0.1:{port}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
        asked = {**body, "model": model.json()["data"][0]["id"]}
        assert http.post(url, json=asked).status_code == 401
        answer = http.post(url, json=asked, headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 4
    for component in ("prefill", "decode", "both"):
        assert running[component].stop() == 0, running[component].said()
    assert running["bootstrap"].probe("livenessProbe") == 200
    assert running["bootstrap"].stop() == 0, running["bootstrap"].said()
    for each in running.values():
        said = each.said()
        assert "WROTE" not in said, [line for line in said.splitlines() if line.startswith("WROTE")]
        assert KEY not in said
