"""Tests that the list of metrics, the rules, alerts, runbook and dashboard match the metrics in the code."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final

import pytest
import yaml
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from baton.api.app import create_app
from baton.api.http.metrics import OTHER, STATUSES
from baton.cli.metric_catalog import QUESTIONS, exported
from baton.cli.metric_page import metric_page
from deploy.grafana import generate
from deploy.grafana.rows import GENERATING, REQUESTS, ROWS
from tests.api import tiny
from tests.api.scripted import ScriptedBackend
from tests.watch.prometheus import RULES, promtool

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "metrics.md"
RUNBOOK: Final = ROOT / "docs" / "runbook.md"


def rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((RULES / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_the_list_of_metrics_is_the_one_that_the_code_makes(rewrite: bool) -> None:
    text = metric_page()
    if rewrite:
        PAGE.write_text(text, encoding="utf-8")
    else:
        assert PAGE.read_text(encoding="utf-8") == text, "run pytest tests/watch/test_pages.py --rewrite"


def test_every_metric_says_what_it_means_and_answers_one_question() -> None:
    metrics = exported()
    asked = [name for names in QUESTIONS.values() for name in names]
    assert sorted(asked) == sorted({each.name for each in metrics})
    for each in metrics:
        assert each.text.endswith("."), each
        assert each.name.startswith(("baton_", "process_", "vllm:")), each
        assert each.name.endswith("_total") is (each.kind == "counter"), each


def test_every_series_of_a_closed_set_is_there_from_the_start() -> None:
    failed = {
        each.role: each.labels["reason"] for each in exported() if each.name == "baton_rooms_failed_total"
    }
    assert "group_broken" in failed["bootstrap"]
    assert failed["bootstrap"] == failed["prefill"] == failed["decode"]
    phases = {
        each.role: each.labels["phase"] for each in exported() if each.name == "baton_room_phase_seconds"
    }
    assert set(phases["prefill"]) - set(phases["decode"]) == {"sealing"}


def test_the_dashboard_is_the_one_that_its_description_makes(rewrite: bool) -> None:
    if rewrite:
        generate.TARGET.write_text(generate.rendered(), encoding="utf-8")
    else:
        told = "run python -m deploy.grafana.generate"
        assert generate.TARGET.read_text(encoding="utf-8") == generate.rendered(), told


def test_the_dashboard_counts_the_requests_of_every_route_that_generates_and_of_no_other() -> None:
    served = generate_routes_of()
    assert {path for path in served if re.fullmatch(GENERATING.removeprefix("~"), path)} == {
        path for path, generates in served.items() if generates
    }


def generate_routes_of() -> Mapping[str, bool]:
    """Return every POST route of the API, and whether it generates text. Only those that do need a worker."""
    with TestClient(create_app(ScriptedBackend(), tiny.model(), CollectorRegistry())) as http:
        paths = http.get("/openapi.json").json()["paths"]
    return {path: "503" in each["post"]["responses"] for path, each in paths.items() if "post" in each}


def test_a_dashboards_panels_do_not_overlap_and_each_is_explained() -> None:
    board = json.loads(generate.TARGET.read_text())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert all(x < 24 for x, _ in cells), panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["description"], panel["title"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert [panel["title"] for panel in board["panels"] if panel["type"] == "row"][1:3] == [
        "Which side is the bottleneck?",
        "Should I add prefill or decode?",
    ]


def told_of(panel: str, series: Mapping[str, str], expected: Mapping[str, Mapping[str, float]]) -> None:
    """Check the values that Prometheus computes for a panel's queries after ten minutes, rounded to about a
    thousandth. `expected`: values by labels, by legend. `series`: values minute by minute, by the series'
    labels."""
    [queries] = [each.queries for row in ROWS.values() for each in row if each.title == panel]
    filled = {"$namespace": ".*", "$worker": ".*", "$__rate_interval": "5m"}

    def query(legend: str) -> str:
        text = queries[legend]
        for name, value in filled.items():
            text = text.replace(name, value)
        return f"round({text}, {2**-10})"

    assert set(queries) == set(expected)
    asked = [
        {
            "expr": query(legend),
            "eval_time": "10m",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in values.items()],
        }
        for legend, values in expected.items()
    ]
    given = [{"series": labels, "values": values} for labels, values in series.items()]
    test = {"tests": [{"interval": "1m", "input_series": given, "promql_expr_test": asked}]}
    with NamedTemporaryFile("w", suffix=".yml") as file:
        yaml.safe_dump(test, file)
        file.flush()
        result = promtool("test", "rules", file.name)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.prometheus
def test_each_request_is_drawn_once_and_a_client_that_hung_up_was_not_refused() -> None:
    """The statuses have rates of one, two, four, … a second, so that a sum shows which of them are in it."""
    labels = (*sorted(map(str, STATUSES)), OTHER)
    each = {status: 2**place for place, status in enumerate(labels)}
    route = "/v1/chat/completions"
    series = {
        f'{REQUESTS}{{route="{route}", status="{status}"}}': f"0+{60 * rate}x10"
        for status, rate in each.items()
    }
    refused = sum(rate for status, rate in each.items() if status.startswith("4") and status != "499")
    failed = sum(rate for status, rate in each.items() if status.startswith("5") or status == OTHER)
    told_of(
        "Requests",
        series,
        {
            "answered": {"{}": each["200"]},
            "refused": {"{}": refused},
            "given up": {"{}": each["499"]},
            "failed": {"{}": failed},
        },
    )


@pytest.mark.prometheus
@pytest.mark.parametrize(("given_up", "computing"), [(0, 0.375), (15, 0.0)])
def test_no_stage_takes_less_than_no_time(given_up: int, computing: float) -> None:
    """One room per second gets its first token after 0.5 s, of which it waits 0.125 s for a destination.
    Rooms whose clients hang up waited 8 s for one."""
    phases = {"bootstrapping": (1 + given_up, 0.125 + 8 * given_up), "waiting_for_input": (1, 0.0)}
    series = {'baton_build_info{role="prefill", worker="prefill-0", rank="0"}': "1x10"}
    series |= {"baton_prefill_first_token_seconds_count": "0+60x10"}
    series |= {"baton_prefill_first_token_seconds_sum": "0+30x10"}
    series |= {"baton_admission_wait_seconds_count": "0+60x10", "baton_admission_wait_seconds_sum": "0x10"}
    for phase, (rooms, seconds) in phases.items():
        series[f'baton_room_phase_seconds_count{{phase="{phase}"}}'] = f"0+{60 * rooms}x10"
        series[f'baton_room_phase_seconds_sum{{phase="{phase}"}}'] = f"0+{60 * seconds}x10"
    told_of(
        "Stages of the first token",
        series,
        {
            "for a pair of workers": {"{}": 0.0},
            "for a destination": {"{}": phases["bootstrapping"][1] / phases["bootstrapping"][0]},
            "for space on prefill": {"{}": 0.0},
            "computing": {"{}": computing},
        },
    )


@pytest.mark.prometheus
def test_routes_without_errors_are_not_among_those_with_the_most() -> None:
    series = {
        f'{REQUESTS}{{route="/v1/completions", status="{status}"}}': values
        for status, values in {"200": "0+60x10", "400": "0+60x10", "500": "0x10", "503": "0+120x10"}.items()
    }
    found = {'{route="/v1/completions", status="400"}': 1.0, '{route="/v1/completions", status="503"}': 2.0}
    told_of("Errors by route", series, {"{{status}} {{route}}": found})


@pytest.mark.parametrize("path", ["prometheus/rules.yml", "prometheus/alerts.yml", "grafana/baton.json"])
def test_what_is_asked_of_prometheus_is_exported(path: str) -> None:
    known = {series for each in exported() for series in each.series}
    recorded = {rule["record"].split(":")[1] for rule in rules("rules.yml")}
    asked = set(re.findall(r"\b(?:baton|process)_[a-z_]+", (ROOT / "deploy" / path).read_text()))
    assert asked
    assert asked <= known | recorded


@pytest.mark.prometheus
def test_the_rules_are_sound() -> None:
    result = promtool("check", "rules", str(RULES / "rules.yml"), str(RULES / "alerts.yml"))
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.prometheus
def test_each_alert_fires_and_resolves_as_its_own_tests_say() -> None:
    result = promtool("test", "rules", str(RULES / "tests.yml"))
    assert result.returncode == 0, result.stdout + result.stderr
    tried = set(re.findall(r'alertname="(\w+)"', (RULES / "tests.yml").read_text()))
    assert tried == {rule["alert"] for rule in rules("alerts.yml")}


def test_each_alert_has_its_section_in_the_runbook_and_no_section_is_without_alert() -> None:
    sections = re.findall(r"^## (\w+)$", RUNBOOK.read_text(encoding="utf-8"), flags=re.MULTILINE)
    alerts = rules("alerts.yml")
    assert sections == [each["alert"] for each in alerts]
    for each in alerts:
        notes = each["annotations"]
        assert notes["runbook_url"] == f"docs/runbook.md#{each['alert'].lower()}"
        assert notes["summary"]
        assert notes["description"]
        assert each["labels"]["severity"] in {"critical", "warning", "info"}
