"""Tests of a real Prometheus that scrapes a real stack under load, and of the alert when decode stops."""

import json
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

import httpx
import pytest

from baton.cli.metric_catalog import Exported, exported
from tests.http import web
from tests.process.stack import Stack, running_stack
from tests.support.shared import Shared
from tests.watch.prometheus import NAMESPACE, PATIENCE_S, Prometheus, promtool, watching

pytestmark = [pytest.mark.stack, pytest.mark.prometheus]

BOARD: Final = Path(__file__).parents[2] / "deploy" / "grafana" / "baton.json"
ROLES: Final = {"bootstrap": "bootstrap", "prefill": "prefill-0", "decode": "decode-0"}
"""The `role` label of each process, and the name of the process in the stack."""
VARIABLES: Final = {"$namespace": NAMESPACE, "$worker": ".*", "$__rate_interval": "20s"}
REFUSED: Final = 8
"""Refused requests in a row, since one alone fires no alert."""
PROMETHEUS_OWN: Final = re.compile(r"up|scrape_\w+|ALERTS\w*|\w+:.*")
"""Names of the series that Prometheus adds to those it scrapes, recording rules included."""


@dataclass(frozen=True)
class Watched:
    stack: Stack
    prometheus: Prometheus

    def instance(self, role: str) -> str:
        return self.stack.services[ROLES[role]].http.removeprefix("http://")

    def complete(self, **more: Any) -> httpx.Response:
        body = {
            "model": self.model(),
            "prompt": "One, two, three,",
            "temperature": 0,
            "max_tokens": 12,
            **more,
        }
        return web().post(f"{self.stack.url}/v1/completions", json=body, timeout=PATIENCE_S)

    def hang_up(self) -> None:
        """Hang up after the first piece of a long answer."""
        body = {
            "model": self.model(),
            "prompt": "Count:",
            "max_tokens": 500,
            "ignore_eos": True,
            "stream": True,
        }
        with web().stream("POST", f"{self.stack.url}/v1/completions", json=body, timeout=PATIENCE_S) as reply:
            next(reply.iter_lines())

    def model(self) -> str:
        name: str = web().get(f"{self.stack.url}/v1/models").json()["data"][0]["id"]
        return name

    def load(self) -> None:
        """Send requests that are answered, one that is refused, and one whose client hangs up."""
        long = "A long story about a river. " * 20
        prompts = ["One, two, three,", long, long + "It ended"]
        with ThreadPoolExecutor(len(prompts)) as callers:
            replies = list(callers.map(lambda prompt: self.complete(prompt=prompt), prompts))
        assert [each.status_code for each in replies] == [200] * len(prompts), replies
        assert self.complete(max_tokens=-1).status_code == 400
        self.hang_up()

    @contextmanager
    def under_load(self) -> Iterator[None]:
        """Send one request after the other while the block runs."""
        answers: list[int] = []
        over = Event()

        def ask() -> None:
            while not over.is_set():
                answers.append(self.complete(prompt=f"Number {len(answers)} is").status_code)

        caller = Thread(target=ask)
        caller.start()
        try:
            yield
        finally:
            over.set()
            caller.join(PATIENCE_S)
        assert {200} <= set(answers) <= {200, 503}, "answered, but for the time in which decode was stopped"


@contextmanager
def watched_stack(demo_model_dir: Path, folder: Path) -> Iterator[Watched]:
    """A stack of one pair of workers under load, with each process scraped every second."""
    with running_stack(
        str(demo_model_dir),
        bootstrap={"retry_wait_ms": "200"},
        dtype="float32",
        kv_cache_memory="128MiB",
    ) as stack:
        targets = {name: service.http for name, service in stack.services.items()}
        with watching(targets, folder) as prometheus:
            at = Watched(stack, prometheus)
            prometheus.until(lambda: len(prometheus.query("up == 1")) == len(targets), "all targets are up")
            at.load()
            gone = 'baton_rooms_failed_total{reason="client_gone"} > 0'
            prometheus.until(lambda: prometheus.query(gone), "the client that went is counted")
            with at.under_load():
                yield at


@pytest.fixture(scope="module")
def stacks(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared[Watched]]:
    with Shared(lambda: watched_stack(demo_model_dir, tmp_path_factory.mktemp("prometheus"))) as shared:
        yield shared


@pytest.fixture
def watched(stacks: Shared[Watched], request: pytest.FixtureRequest) -> Watched:
    return stacks.lend(request.node)


def test_every_target_is_up(watched: Watched) -> None:
    def states() -> dict[str, tuple[str, str]]:
        targets = watched.prometheus.ask("targets")["activeTargets"]
        return {each["labels"]["instance"]: (each["health"], each["lastError"]) for each in targets}

    assert set(states()) == {watched.instance(role) for role in ROLES}
    watched.prometheus.until(lambda: set(states().values()) == {("up", "")}, "all targets are up", states())


def test_each_process_says_who_it_is(watched: Watched) -> None:
    found = watched.prometheus.query("baton_build_info")
    told = {each["metric"]["instance"]: (each["metric"]["role"], each["metric"]["worker"]) for each in found}
    assert told == {watched.instance(role): (role, worker) for role, worker in ROLES.items()}


@pytest.mark.parametrize("role", ROLES)
def test_every_documented_series_is_there_with_its_type_and_no_other(watched: Watched, role: str) -> None:
    instance = watched.instance(role)
    metrics = [each for each in exported() if each.role == role]
    match = f'{{instance="{instance}"}}'
    told = watched.prometheus.ask("targets/metadata", match_target=match)
    kinds = {each["metric"]: each["type"] for each in told}
    series = watched.prometheus.ask("series", **{"match[]": match})
    for metric in metrics:
        # The format of OpenMetrics, in which Prometheus asks, names a counter without its suffix.
        assert kinds[metric.name.removesuffix("_total")] == metric.kind, metric
        for name, labels in product(metric.series, _combinations(metric)):
            assert any(_is(each, name, labels) for each in series), (name, labels)
    known = {name for metric in metrics for name in metric.series}
    seen = {each["__name__"] for each in series}
    assert {name for name in seen - known if not PROMETHEUS_OWN.fullmatch(name)} == set()


def _combinations(metric: Exported) -> list[Mapping[str, str]]:
    """Return all combinations of the metric's label values, for labels whose values are known beforehand."""
    closed = {label: values for label, values in metric.labels.items() if values}
    return [dict(zip(closed, values, strict=True)) for values in product(*closed.values())]


def _is(series: Mapping[str, str], name: str, labels: Mapping[str, str]) -> bool:
    return series["__name__"] == name and all(series.get(label) == value for label, value in labels.items())


@pytest.mark.parametrize("role", ROLES)
def test_the_text_of_each_endpoint_is_what_prometheus_recommends(watched: Watched, role: str) -> None:
    text = web().get(f"http://{watched.instance(role)}/metrics").text
    assert "baton_build_info" in text
    # promtool keeps names with a colon for rules. Gateways read vLLM's names, which have one.
    ours = "".join(line for line in text.splitlines(keepends=True) if "vllm:" not in line)
    assert ("vllm:" in text) is (role == "bootstrap")
    result = promtool("check", "metrics", text=ours)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_the_rules_are_loaded_and_can_be_evaluated(watched: Watched) -> None:
    groups = watched.prometheus.ask("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["name"] for rule in rules} > {"BatonNoWorker", "worker:baton_kv_pages:ratio"}
    watched.prometheus.until(lambda: _states(watched.prometheus) == {"ok"}, "every rule is evaluated")
    for rule in rules:
        if rule["type"] == "recording":
            # A rate has a value once its second scrape is there.
            watched.prometheus.until(partial(watched.prometheus.query, rule["name"]), rule["name"])


def _states(prometheus: Prometheus) -> set[str]:
    groups = prometheus.ask("rules")["groups"]
    return {rule["health"] for group in groups for rule in group["rules"]}


def test_an_alert_fires_when_decode_is_stopped_and_resolves_after(watched: Watched) -> None:
    prometheus, decode = watched.prometheus, watched.stack.services["decode-0"].process
    assert prometheus.firing("BatonNoWorker") == []
    answers: list[httpx.Response] = []
    asking = Thread(target=lambda: answers.append(watched.complete(max_tokens=400, ignore_eos=True)))
    running = "baton_decode_running_requests > 0"
    asking.start()
    prometheus.until(lambda: prometheus.query(running), "decode has the request")
    decode.send_signal(signal.SIGSTOP)
    try:
        prometheus.until(lambda: prometheus.firing("BatonNoWorker"), "the alert fires")
        assert [each["side"] for each in prometheus.firing("BatonNoWorker")] == ["decode"]
        prometheus.until(lambda: prometheus.firing("BatonDown"), "that decode is down is told")
        prometheus.until(lambda: prometheus.firing("BatonWorkerSilent"), "that it is silent is told")
        refused = [watched.complete().status_code for _ in range(REFUSED)]
        assert refused == [503] * REFUSED
        prometheus.until(lambda: prometheus.firing("BatonRefusing"), "that requests are refused is told")
    finally:
        decode.send_signal(signal.SIGCONT)
    asking.join(PATIENCE_S)
    assert [each.status_code for each in answers] == [503], answers
    watched.stack.wait_ready()
    prometheus.until(lambda: not prometheus.firing("BatonNoWorker"), "the alert resolves")
    prometheus.until(lambda: not prometheus.firing("BatonDown"), "decode is up again")
    assert watched.complete().status_code == 200


def test_every_query_of_the_dashboard_returns_data(watched: Watched) -> None:
    board = json.loads(BOARD.read_text())
    queries = _queries(board)
    assert len(queries) > 50
    waiting = dict(queries)

    def all_return_data() -> bool:
        for title, query in queries:
            if title in waiting and watched.prometheus.values(query):
                del waiting[title]
        return not waiting

    watched.prometheus.until(all_return_data, "each query returns data, but not", waiting)


def _queries(board: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    """Return title and query of each annotation and of each legend of each panel."""
    found = [(each["name"], each["expr"]) for each in board["annotations"]["list"]]
    for panel in board["panels"]:
        found += [
            (f"{panel['title']}: {each['legendFormat']}", each["expr"]) for each in panel.get("targets", ())
        ]
    return [(title, _substituted(query)) for title, query in found]


def _substituted(query: str) -> str:
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    assert "$" not in query, query
    return query
