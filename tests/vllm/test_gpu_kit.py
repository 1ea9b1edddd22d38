"""Tests of the GPU kit's parts for vLLM's engine, on a CPU (`tests/gpu/test_kit.py` has the others)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import __main__ as kit
from tests.gpu.findings import Finding, FindingVerdict
from tests.gpu.vllm_engine import LLAMA, Case, judge

BUDGET_S = 480
STACK = (
    "baton serve --engine vllm --device cpu gets ready",
    "16 requests, 16 at a time: each output is the reference's",
    "a decode worker killed in mid-stream is not noticed",
    "zero at idle: every gauge is back",
)


@pytest.mark.timeout(2 * BUDGET_S)
def test_all_of_it_runs_and_nothing_is_wrong(tmp_path: Path) -> None:
    words = ["--device", "cpu", "--out", str(tmp_path), "--budget-s", str(BUDGET_S), "--name", "tried"]
    words += ["--only", "vllm-engine", "--only", "vllm-speed"]
    command = [sys.executable, "-m", "tests.gpu", *words]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=BUDGET_S + 30)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told: dict[str, Any] = json.loads((tmp_path / "gpu-tried.json").read_text())
    found = {each["what"]: each for each in told["findings"] if each["part"] != "machine"}
    tokens, *stack, steps, hand_over = found
    assert tokens == "llama, float32: each token is that of vLLM alone"
    assert "handed over 1 of 1" in found[tokens]["detail"]
    assert tuple(stack) == STACK
    assert {each["verdict"] for each in found.values()} == {"right", "measured"}, ran.stdout
    assert found[steps]["figures"]["ratios"].keys() == {"1", "8"}
    assert found[hand_over]["figures"]["bytes"] > 0


def test_torch_s_parts_say_what_is_missing(tmp_path: Path) -> None:
    [found] = kit.run("engine", "cpu", tmp_path, 60, tmp_path / "log")
    assert found.verdict is FindingVerdict.NOT_RUN
    assert "the torch engine needs transformers" in found.detail


@pytest.mark.parametrize("name", ["alone", "handed over", "drawn"])
def test_a_token_that_differs_is_wrong_where_that_is_promised(name: str) -> None:
    alone = [[1, 2], [3, 4]]
    told: dict[str, Any] = {
        "answers": {"alone": [[1, 2], [3, 4]], "handed over": [[3, 4]]},
        "drawn": {"alone": [[5]], "together": [[5]]},
        "facts": {"graphs": 0, "encoding": "vllm-cpu", "device": "cpu"},
    }
    found = Finding("vllm-engine", "", FindingVerdict.RIGHT)
    judge(found, Case(LLAMA, "float32", is_invariant=True), alone, told)
    (told["drawn"]["together"] if name == "drawn" else told["answers"][name])[-1][-1] = 9
    counts = r"alone . of 2, handed over . of 1, drawn together . of 1"
    with pytest.raises(AssertionError, match=counts):
        judge(found, Case(LLAMA, "float32", is_invariant=True), alone, told)
    judge(found, Case(LLAMA, "bfloat16", is_invariant=False), alone, told)
    assert sum(found.figures["equal"].values()) == 3
