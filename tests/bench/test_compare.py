"""Tests of `python -m bench compare`, of the systems that it starts, and of the traces that it replays."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Final

import pytest

from baton.runtime.errors import SettingsError
from bench.serving.compare import Comparison, fill, read_comparison, summarise
from bench.serving.process_tree import ProcessTree
from bench.serving.system import System, SystemFailed, SystemSpec
from bench.serving.trace import convert
from tests.bench.commands import run_bench
from tests.launch.stand_ins import PATIENCE_S, gone
from tests.ports import free_port
from tests.suite.marks import starts

ROOT: Final = Path(__file__).parents[2]
BENCHMARKS: Final = ROOT / "docs" / "benchmarks"
STORED: Final = sorted(BENCHMARKS.glob("*.toml"))

# Starts a child in a session of its own, which starts one more and ends: that one is nobody's child.
FAMILY = """
import os, subprocess, sys, time
child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
last = "; import time; time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child + last], start_new_session=True)
subprocess.Popen([sys.executable, "-c", child])
time.sleep(600)
"""


def write_toml(folder: Path, first: int, second: int) -> Path:
    """Write a comparison of two paced servers. The second needs the variable SLOW_MS."""
    serve = f'"{sys.executable}", "-m", "tests.cli.paced_server"'
    file = folder / "pair.toml"
    file.write_text(
        f"""
rounds = 3

[[load]]
prompt_tokens = 16
output_tokens = 6
concurrency = [1, 2]
requests = [2, 4]
warm_up = 1

[[systems]]
name = "quick"
about = "Paced."
url = "http://127.0.0.1:{first}"
start = [{serve}, "{first}", "first_ms=20", "gap_ms=10"]

[[systems]]
name = "slow"
url = "http://127.0.0.1:{second}"
start = [{serve}, "{second}", "first_ms=${{SLOW_MS}}", "gap_ms=30"]
"""
    )
    return file


def compare(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    starts("bench")
    environ = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environ}
    return run_bench("compare", *words, environ=environ)


def servers_on(*ports: int) -> list[str]:
    """Return the command lines of paced servers that still run."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"tests.cli.paced_server" in words and any(str(port).encode() in words for port in ports):
            lines.append(str(words))
    return lines


@pytest.mark.bench
def test_two_systems_are_measured_in_turns_and_both_are_ended(tmp_path: Path) -> None:
    ports = free_port(), free_port()
    out = tmp_path / "out"
    result = compare(str(write_toml(tmp_path, *ports)), "--out", str(out), SLOW_MS="60")
    assert result.returncode == 0, result.stderr
    assert not servers_on(*ports)
    order = re.findall(r"round (\d)/3, (quick|slow), 16/6 at 1:", result.stderr)
    turns = [("quick", "slow"), ("slow", "quick"), ("quick", "slow")]
    assert order == [(str(number), name) for number, each in enumerate(turns, 1) for name in each]
    body = json.loads(result.stdout)
    assert body == json.loads((out / "compare-pair.json").read_text())
    assert list(body["systems"]) == ["quick", "slow"]
    assert list(body["medians"]) == ["16/6 at 1", "16/6 at 2"]
    for level, medians in body["medians"].items():
        assert all(len(rounds) == 3 for rounds in body["rounds"][level].values())
        found = medians["quick"]["tpot_ms.p50"] / medians["slow"]["tpot_ms.p50"]
        assert body["ratios"][level]["slow"]["tpot_ms.p50"] == pytest.approx(found, abs=1e-3)
    assert "| 16/6 at 2 | quick |" in (out / "compare-pair.md").read_text()
    assert sorted(file.suffix for file in out.iterdir()) == [".json", ".md"]


@pytest.mark.bench
def test_a_system_that_cannot_start_is_named_and_the_others_are_ended(tmp_path: Path) -> None:
    ports = free_port(), free_port()
    result = compare(str(write_toml(tmp_path, *ports)), "--out", str(tmp_path), SLOW_MS="no-number")
    assert result.returncode == 1
    assert "slow: ended with exit code 1" in result.stderr
    assert not servers_on(*ports)


def test_a_missing_variable_and_an_unknown_system_are_refused_before_anything_starts(tmp_path: Path) -> None:
    comparison = read_comparison(write_toml(tmp_path, 1, 2))
    with pytest.raises(SettingsError, match="slow: SLOW_MS is not set"):
        fill(comparison.systems[1], {})
    assert fill(comparison.systems[1], {"SLOW_MS": "7"}).start[-2] == "first_ms=7"
    with pytest.raises(SettingsError, match="--only other"):
        read_comparison(tmp_path / "pair.toml", ["other"])
    assert [each.name for each in read_comparison(tmp_path / "pair.toml", ["slow"]).systems] == ["slow"]


def test_every_process_of_a_system_rests_and_ends_orphans_and_other_sessions_too() -> None:
    root = subprocess.Popen([sys.executable, "-c", FAMILY], start_new_session=True)
    tree = ProcessTree(root.pid)

    def until(true: Any) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.02)

    try:
        # Of the five the parent of an orphan ends: before that there are four, too.
        until(lambda: sorted(sleeps(each.pid) for each in tree.living()) == [False, False, True, True])
        family = tree.living()
        tree.pause()
        until(lambda: {state(each.pid) for each in family} == {"T"})
        tree.go_on()
        until(lambda: "T" not in {state(each.pid) for each in family})
        tree.pause()
    finally:
        clean = tree.end(1.0)
        root.wait()
    assert not clean, "one of another session does not hear of the end, and is killed"
    until(lambda: all(gone(each.pid) for each in family))
    assert tree.living() == []


def sleeps(pid: int) -> bool:
    """Return whether the process is the last descendant, which only sleeps."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[2:3] == [b"import time; time.sleep(600)"]


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_system_that_ends_while_it_is_measured_is_told_with_its_log(tmp_path: Path) -> None:
    spec = SystemSpec(name="a", url="http://127.0.0.1:9", start=("sh", "-c", "echo ouch; exit 3"))
    system = System(spec, tmp_path / "log", tmp_path, dict(os.environ))
    with pytest.raises(SystemFailed, match=r"(?s)a: ended with exit code 3.*ouch"):
        system.start()
    system.end()


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def test_a_system_that_ended_is_told_though_another_answers_at_its_address(tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), Answers) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_port}"
        spec = SystemSpec(name="a", url=url, ready=(url,), start=("sh", "-c", "read _ <$PIPE; exit 3"))
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        env = {**os.environ, "PIPE": str(pipe)}
        system = System(spec, tmp_path / "log", tmp_path, env)
        system.start()
        pipe.write_text("now\n")
        with pytest.raises(SystemFailed, match=r"^a: ended with exit code 3"):
            system.go_on()
        system.end()
        other.shutdown()


def test_medians_are_over_rounds_and_ratios_are_of_medians() -> None:
    specs = (SystemSpec(name="a", url=""), SystemSpec(name="b", url=""))
    ours = [{"ttft_ms.p50": ttft, "output_tokens_per_s": 150.0} for ttft in (10.0, 30.0, 20.0)]
    theirs = [{"ttft_ms.p50": ttft, "output_tokens_per_s": 0.0} for ttft in (40.0, 40.0, 400.0)]
    report = summarise(Comparison(systems=specs), {"512/64 at 1": {"a": ours, "b": theirs}})
    assert report["medians"]["512/64 at 1"]["a"] == {"ttft_ms.p50": 20, "output_tokens_per_s": 150}
    assert report["ratios"]["512/64 at 1"] == {"b": {"ttft_ms.p50": 0.5}}, "nothing is divided by 0"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\nsystems = []", "x"),
        ('systems = [{name = "a", url = "u", cpu = [1]}]', "cpu"),
        ('systems = []\nload = [{prompt_tokens = "x"}]', "prompt_tokens"),
        ("systems = []\nload = [{tpot_slo_ms = 9}]", "tpot_slo_ms need a trace"),
        ("= 1", "Invalid"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "file.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=says):
        read_comparison(file)


@pytest.mark.parametrize("file", STORED, ids=lambda file: file.stem)
def test_stored_comparisons_name_files_that_exist(file: Path) -> None:
    comparison = read_comparison(file)
    for load in comparison.load:
        assert not load.trace or convert(file.parent / load.trace, 3, load.length_scale, load.tokens_max)
    for system in comparison.systems:
        assert not system.start or "/" not in system.start[0] or (file.parent / system.start[0]).exists()


def rows(*words: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in convert(*words).splitlines()]


def test_an_azure_trace_becomes_mooncake_lines_in_milliseconds() -> None:
    first, second = rows(BENCHMARKS / "traces" / "azure-conversation-2023.csv", 2, 1.0, None)
    assert first == {"timestamp": 0, "input_length": 374, "output_length": 44}
    assert second == {"timestamp": 4315, "input_length": 396, "output_length": 109}


def test_scaled_requests_fit_the_context_and_lose_their_hashes(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 800, "output_length": 400, "hash_ids": [1]}\n' * 3)
    assert rows(file, 2, 1.0, None)[1]["hash_ids"] == [1]
    (row,) = rows(file, 1, 0.5, 300)
    assert row == {"timestamp": 0, "input_length": 150, "output_length": 150}
    (row,) = rows(file, 1, 0.001, None)
    assert (row["input_length"], row["output_length"]) == (1, 1)
