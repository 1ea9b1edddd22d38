"""Tests of the kit on a CPU: it finds what is right, reports what is wrong, and ends in time."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.gpu import __main__ as kit
from tests.gpu import engine
from tests.gpu.findings import CannotRun, Finding, Findings, FindingVerdict, read
from tests.gpu.kit import Kit
from tests.gpu.report import Report
from tests.inference.engine_worker import ShuffledWorker, Tenant

BUDGET_S = 240


@pytest.mark.stack
@pytest.mark.timeout(BUDGET_S + 60)
def test_all_of_it_runs_and_nothing_is_wrong(tmp_path: Path) -> None:
    words = ("--device", "cpu", "--out", str(tmp_path), "--budget-s", str(BUDGET_S), "--name", "tried")
    ran = subprocess.run(
        [sys.executable, "-m", "tests.gpu", *words],
        capture_output=True,
        text=True,
        timeout=BUDGET_S + 30,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = json.loads((tmp_path / "gpu-tried.json").read_text())
    found = [(each["part"], each["verdict"]) for each in told["findings"]]
    not_run = {"vllm-engine", "vllm-speed", "checks"}
    assert {part for part, verdict in found if verdict in ("right", "measured")} == kit.PARTS.keys() - not_run
    why = {each["part"]: each["detail"] for each in told["findings"] if each["verdict"] == "not run"}
    assert why.keys() == not_run
    assert "install baton-serve[vllm]" in why["vllm-engine"]
    table = (tmp_path / "gpu-tried.md").read_text()
    assert all(each["what"] in table for each in told["findings"][1:])


def test_a_token_that_differs_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Off(ShuffledWorker):
        def run(self, tenants: Sequence[Tenant], chunk: int) -> list[list[int]]:
            return [[*output[:-1], (output[-1] + 1) % 100] for output in super().run(tenants, chunk)]

    monkeypatch.setattr(engine, "ShuffledWorker", Off)
    monkeypatch.setattr(engine, "MODELS_ON_CPU", 1)
    file = tmp_path / "found"
    engine.run(Kit("cpu", tmp_path, Findings("engine", file, float("inf"))))
    found, _ = read(file)
    assert [each.verdict for each in found] == [FindingVerdict.WRONG, FindingVerdict.WRONG]
    assert "8 of 8 outputs, the first prompt of 1, at 15" in found[0].detail


def test_what_cannot_run_says_why_and_the_next_one_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "found"
    findings = Findings("part", file, float("inf"))

    def cannot(_: Finding) -> None:
        raise CannotRun("there is no such thing here")

    def fails(_: Finding) -> None:
        raise AssertionError("3 of 4")

    def measures(found: Finding) -> None:
        found.figures = {"took_ms": 3}

    for what, look in {"a": cannot, "b": fails, "c": measures, "d": lambda _: None}.items():
        findings.note(what, look)
    Findings("part", file, 0.0).note("e", lambda _: pytest.fail("it is begun"))
    found, begun = read(file)
    assert begun == ""
    assert [(each.what, each.verdict.value) for each in found] == [
        ("a", "not run"),
        ("b", "wrong"),
        ("c", "measured"),
        ("d", "right"),
        ("e", "not run"),
    ]
    assert (found[0].detail, found[1].detail) == ("there is no such thing here", "AssertionError: 3 of 4")
    assert "0 s are left" in found[4].detail


def test_a_part_that_hangs_is_ended_and_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = tmp_path / "hangs"
    hangs.write_text("#!/bin/sh\necho $$\nexec sleep 100\n")
    hangs.chmod(0o700)
    (tmp_path / "findings.jsonl").write_text(json.dumps({"begun": "late writes"}) + "\n")
    monkeypatch.setattr(kit, "GRACE_S", 0.5)
    monkeypatch.setattr(sys, "executable", str(hangs))
    [found] = kit.run("memory", "cpu", tmp_path, 0.5, tmp_path / "log")
    assert (found.part, found.what, found.verdict) == ("memory", "late writes", FindingVerdict.WRONG)
    assert "did not end in 1 s" in found.detail
    assert not Path("/proc", (tmp_path / "log").read_text().strip()).exists()


def test_a_part_that_breaks_is_wrong_and_names_what_it_was_at(tmp_path: Path) -> None:
    file = tmp_path / "findings.jsonl"
    file.write_text(json.dumps({"begun": "the first"}) + "\n")
    [found] = kit.run("no_such_part", "cpu", tmp_path, 60, tmp_path / "log")
    assert (found.what, found.verdict) == ("the first", FindingVerdict.WRONG)
    assert "ended with exit code 1" in found.detail
    assert "No module named" in found.detail


def test_a_report_says_how_many_and_is_wrong_where_one_is(tmp_path: Path) -> None:
    right, wrong = (
        Finding("engine", f"{verdict.value} one", verdict, "a | b")
        for verdict in (FindingVerdict.RIGHT, FindingVerdict.WRONG)
    )
    machine = {"device": "NVIDIA H100", "packages": {"torch": "2.11"}}
    assert not Report("x", "cuda:0", machine, 3.0, [right]).wrong
    report = Report("x", "cuda:0", machine, 3.0, [right, wrong])
    assert report.wrong
    assert report.summary == "1 right, 1 wrong in 3 s on NVIDIA H100"
    paths = report.write(tmp_path)
    assert [path.name for path in paths] == ["gpu-x.json", "gpu-x.md"]
    assert json.loads(paths[0].read_text())["findings"][1]["verdict"] == "wrong"
    assert "| engine | wrong one | **wrong** | 0 | a \\| b |" in paths[1].read_text()


def test_without_a_gpu_it_says_so_and_is_no_success(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert kit.main(["--device", "cuda", "--out", str(tmp_path), "--budget-s", "60"]) == kit.NO_DEVICE
    told = json.loads((tmp_path / "gpu-cuda-0.json").read_text())
    assert "has no CUDA device that PyTorch can use" in told["findings"][0]["detail"]
