"""Tests of pods run from their rendered command lines: probes, an answer, an orderly end.

They are the pods of deploy/kubernetes/secured.yaml and a worker of both sides, with Secrets as docs/deploy.md
makes them. Each bootstrap has the packages of its image and nothing else, and an address of its own.
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

BOOTSTRAPS = {"bootstrap-0": "127.0.0.1", "bootstrap-1": "127.0.0.2"}
"""Addresses of the bootstraps, which listen on the same ports."""
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
    (folder / "key").write_text("a key that all bootstraps have\n")
    mounts = {each: str(folder) for each in ("api-keys", "reasoning-key")} | {
        "http-tls": str(folder / "http")
    }
    return {f"/etc/baton/{name}": at for name, at in mounts.items()}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, demo_model_dir: Path) -> Iterator[Pods]:
    """Two bootstraps, and each kind of worker once."""
    folder = tmp_path_factory.mktemp("pods")
    ports = {name: free_port() for name in ("http", "admin", "grpc")}
    model = eight_heads(folder / "model", demo_model_dir)
    mounted, packages = secrets(folder), bootstrap_packages(folder / "packages")
    started: dict[str, Running] = {}
    try:
        for name in (*BOOTSTRAPS, "prefill", "decode", "both"):
            component = name.partition("-")[0]
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
                "$(POD_NAME)": f"baton-{component}-7c9d-x2x",
            }
            started[name] = run(
                pod,
                folder / f"{name}-pod",
                replaced,
                packages if component == "bootstrap" else None,
                address=BOOTSTRAPS.get(name, "127.0.0.1"),
                name=("baton-bootstrap-grpc", *BOOTSTRAPS.values()),
            )
        yield started
    finally:
        for each in started.values():
            each.process.kill()
            each.process.wait()
            each.http.close()


def post(bootstrap: Running, body: Mapping[str, object], **headers: str) -> httpx.Response:
    url = f"https://{bootstrap.address}:{bootstrap.port('http')}/v1/completions"
    with httpx.Client(verify=False, trust_env=False, timeout=60) as http:
        return http.post(url, json=body, headers=headers)


def ids(reply: httpx.Response) -> list[str]:
    """Return the ids of a stream's events."""
    assert reply.status_code == 200, reply.text
    return [line.removeprefix("id: ") for line in reply.text.splitlines() if line.startswith("id: ")]


def test_the_secured_pods_start_become_ready_serve_drain_and_write_where_they_may(running: Pods) -> None:
    for each in running.values():
        each.wait("startupProbe")
        assert each.probe("livenessProbe") == 200, each.said()
    for each in running.values():
        each.wait("readinessProbe")
    one, other = (running[name] for name in BOOTSTRAPS)
    key = {"Authorization": f"Bearer {KEY}"}
    listed = one.http.get(f"https://{one.address}:{one.port('http')}/v1/models", headers=key)
    body = {"model": listed.json()["data"][0]["id"], "prompt": [5, 6, 7, 8], "max_tokens": 4}
    body["ignore_eos"] = True
    assert post(one, body).status_code == 401
    for bootstrap in (one, other):
        answer = post(bootstrap, body, **key)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        for asked in (one, other):
            pages = f"https://{asked.address}:{asked.port('admin')}"
            story = asked.http.get(f"{pages}/requests/{answer.headers['x-request-id']}").json()
            at = "" if asked is bootstrap else f"{bootstrap.address}:{bootstrap.port('grpc')}"
            assert (story["state"], story["bootstrap"], story["unanswered"]) == ("answered", at, [])
    streamed = {**body, "stream": True}
    begun = ids(post(one, streamed, **key))
    assert ids(post(other, streamed, **key, **{"Last-Event-ID": begun[1]})) == begun[2:], "the keys are one"

    assert one.stop() == 0, one.said()
    assert other.probe("readinessProbe") == 200, "it has workers of its own"
    for component in ("prefill", "decode", "both"):
        assert running[component].stop() == 0, running[component].said()
    assert other.probe("livenessProbe") == 200
    assert other.stop() == 0, other.said()
    for each in running.values():
        said = each.said()
        assert "WROTE" not in said, [line for line in said.splitlines() if line.startswith("WROTE")]
        assert KEY not in said
