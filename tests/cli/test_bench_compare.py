"""Does `baton bench compare` measure systems in turns, tell their ratios, and leave no process behind?"""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from baton.cli.bench.compare_report import write_report
from baton.cli.bench.comparison import Comparison, filled, narrowed, read_comparison
from baton.cli.bench.load_specs import Level, PlannedTrace, TraceLoad, planned
from baton.cli.bench.process_tree import ProcessTree
from baton.cli.bench.systems import System, SystemFailed
from baton.cli.bench.verdicts import judged
from baton.runtime.errors import SettingsError
from tests.cli.stand_ins import PATIENCE_S, gone
from tests.cli.test_bench_serve import paced
from tests.cli.typed import baton
from tests.ports import free_port
from tests.suite.tiers import starts

PAIR = 'systems = [{name = "a", url = "u"}, {name = "b", url = "u"}]'
WISH = '\nwanted = [{{against = "b", {}}}]'
AT_LEAST = 'measure = "ttft_ms.p50", at_least = 1, '
GOOD = 'measure = "goodput.requests_per_s", at_least = 1'
ROOT = Path(__file__).parents[2]
STORED = sorted((ROOT / "docs" / "benchmarks").glob("*.toml"))

# Starts a child in a session of its own, which starts one more and ends: that one is nobody's child.
FAMILY = """
import os, subprocess, sys, time
child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
last = "; import time; time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child + last], start_new_session=True)
subprocess.Popen([sys.executable, "-c", child])
time.sleep(600)
"""


def toml(folder: Path, first: int, second: int) -> Path:
    """Two paced servers, the second three times as slow; the slow one needs a variable."""
    file = folder / "pair.toml"
    file.write_text(
        f"""
[load]
prompt_tokens = "16"
output_tokens = "6"
concurrency = [1, 2]
requests = [2, 4]
warm_up = 1
rounds = 3

[[systems]]
name = "quick <1>"
about = "Paced."
url = "http://127.0.0.1:{first}"
start = ["{sys.executable}", "-m", "tests.cli.paced_server", "{first}", "first_ms=20", "gap_ms=10"]

[[systems]]
name = "slow"
url = "http://127.0.0.1:{second}"
start = ["{sys.executable}", "-m", "tests.cli.paced_server", "{second}", "first_ms=${{SLOW_MS}}", "gap_ms=30"]

[[wanted]]
against = "slow"
measure = "tpot_ms.p50"
concurrency = [1, 2]
at_most = 0.9

[[wanted]]
against = "slow"
measure = "output_tokens_per_s"
concurrency = [2]
at_least = 1000
"""
    )
    return file


def compare(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    starts("bench")
    environ = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environ}
    return baton("bench", "compare", *words, environ=environ, timeout_s=240)


def servers_on(*ports: int) -> list[str]:
    """Command lines of paced servers that still run."""
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
def test_two_systems_are_set_side_by_side_and_both_are_ended(tmp_path: Path) -> None:
    ports = free_port(), free_port()
    out = tmp_path / "out"
    result = compare(str(toml(tmp_path, *ports)), "--out", str(out), SLOW_MS="60")
    assert result.returncode == 0, result.stderr
    assert not servers_on(*ports)
    said = re.findall(r"round (\d)/3, (quick|slow)[^:]*: 16/6, 1 at", result.stderr)
    orders = [("quick", "slow"), ("slow", "quick"), ("quick", "slow")]
    assert said == [(str(number), name) for number, order in enumerate(orders, 1) for name in order]
    body = json.loads(result.stdout)
    assert body == json.loads((out / "compare-pair.json").read_text())
    assert body["systems"] == ["quick <1>", "slow"]
    assert [level["concurrency"] for level in body["levels"]] == [1, 2]
    for level in body["levels"]:
        assert all(len(rounds) == 3 for rounds in level["rounds"].values())
        ratio = level["ratios"]["slow"]["tpot_ms.p50"]
        assert ratio["least"] <= ratio["ratio"] <= ratio["greatest"]
        medians = level["medians"]
        found = medians["quick <1>"]["tpot_ms"]["p50"] / medians["slow"]["tpot_ms"]["p50"]
        assert ratio["ratio"] == pytest.approx(found, abs=1e-3)
    assert [(each["concurrency"], "at_most" in each) for each in body["wanted"]] == [
        (1, True),
        (2, True),
        (2, False),
    ]
    assert not body["wanted"][2]["met"]
    table = (out / "compare-pair.md").read_text()
    assert "| 16/6 | 2 | quick <1> |" in table
    assert "compare-pair.svg" in table
    ElementTree.fromstring((out / "compare-pair.svg").read_text())
    assert "quick &lt;1&gt;" in (out / "compare-pair.html").read_text()


@pytest.mark.bench
def test_a_url_that_is_up_is_compared_with_a_command_that_is_started(tmp_path: Path) -> None:
    mine, theirs = free_port(), free_port()
    serve = f"{sys.executable} -m tests.cli.paced_server"
    running = subprocess.Popen([*serve.split(), str(mine)], cwd=ROOT)
    try:
        words = ["--a", f"http://127.0.0.1:{mine}", "--b", f"{serve} {theirs}"]
        words += [
            "--b-url",
            f"http://127.0.0.1:{theirs}",
            "--rounds",
            "1",
            "--out",
            str(tmp_path),
            "--name",
            "x",
        ]
        result = compare(*words)
        assert result.returncode == 0, result.stderr
        assert running.poll() is None, "what it did not start it does not end"
    finally:
        running.kill()
        running.wait()
    assert not servers_on(theirs)
    assert json.loads((tmp_path / "compare-x.json").read_text())["systems"] == ["a", "b"]


@pytest.mark.bench
def test_no_system_is_asked_otherwise_than_the_others(tmp_path: Path) -> None:
    """One that takes no token ids is compared by texts for all, if somebody wants that."""
    ports = free_port(), free_port()
    file = toml(tmp_path, *ports)
    file.write_text(file.read_text().replace("gap_ms=30", 'gap_ms=30", "takes_ids=0'))
    result = compare(str(file), "--out", str(tmp_path), SLOW_MS="60")
    assert result.returncode == 1
    assert "a prompt of token ids was not answered: HTTP 400: prompt: texts only" in result.stderr
    file.write_text(file.read_text().replace("rounds = 3", 'rounds = 1\nprompts = "text"'))
    result = compare(str(file), "--out", str(tmp_path), SLOW_MS="60")
    assert result.returncode == 0, result.stderr
    body = json.loads(result.stdout)
    assert body["loads"][0]["prompts"] == "text"
    for system in body["systems"]:
        assert body["levels"][0]["medians"][system]["prompt_tokens"] == 2 * 16
    assert not servers_on(*ports)


@pytest.mark.bench
def test_a_system_that_cannot_start_says_why_and_the_others_are_ended(tmp_path: Path) -> None:
    ports = free_port(), free_port()
    result = compare(str(toml(tmp_path, *ports)), "--out", str(tmp_path), SLOW_MS="no-number")
    assert result.returncode == 1
    assert "slow: ended with exit code 1" in result.stderr
    assert "no-number" in result.stderr.splitlines()[-1]
    assert not servers_on(*ports)
    missing = compare(str(toml(tmp_path, *ports)), "--out", str(tmp_path))
    assert missing.returncode == 2
    assert "set the variable SLOW_MS" in missing.stderr


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
    """It is the last of its line."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[2:3] == [b"import time; time.sleep(600)"]


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_system_that_ends_while_it_is_measured_is_told_with_its_log(tmp_path: Path) -> None:
    comparison = Comparison.model_validate(
        {
            "systems": [
                {"name": "a", "url": "http://127.0.0.1:9", "start": ["sh", "-c", "echo ouch; exit 3"]},
                {"name": "b", "url": "http://127.0.0.1:9"},
            ]
        }
    )
    system = System(filled(comparison.systems[0], {}), tmp_path / "log", tmp_path, dict(os.environ))
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
        spec = {"name": "a", "url": url, "ready": [url], "start": ["sh", "-c", "read _ <$PIPE; exit 3"]}
        comparison = Comparison.model_validate({"systems": [spec, {"name": "b", "url": url}]})
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        env = {**os.environ, "PIPE": str(pipe)}
        system = System(filled(comparison.systems[0], {}), tmp_path / "log", tmp_path, env)
        system.start()
        pipe.write_text("now\n")
        with pytest.raises(SystemFailed, match=r"^a: ended with exit code 3"):
            system.go_on()
        system.end()
        other.shutdown()


def summary(ttft: float, output: float, good: float | None = None) -> dict[str, Any]:
    """Of a round."""
    spread = {"p50": ttft, "p99": ttft, "max": ttft}
    return {
        "requests": 4,
        "refused": 1,
        "failed": 0,
        "client_cpu_share": 0.1,
        "ttft_ms": spread,
        "tpot_ms": {},
        "itl_ms": {"chunk": spread},
        "output_tokens_per_s": output,
        "failures": ["x"],
        **({} if good is None else {"goodput": {"requests_per_s": good}}),
    }


def nothing() -> dict[str, Any]:
    """Of a round in which nothing was answered."""
    return {"requests": 0, "refused": 0, "failed": 4, "client_cpu_share": 0.1}


def test_ratios_are_of_medians_and_wishes_are_judged_by_them() -> None:
    comparison = Comparison.model_validate(
        {
            "systems": [{"name": "a", "url": ""}, {"name": "b", "url": ""}],
            "load": {"concurrency": [4], "requests": [4]},
            "wanted": [
                {"against": "b", "measure": "ttft_ms.p50", "concurrency": [4], "at_most": 0.5},
                {"against": "b", "measure": "output_tokens_per_s", "at_least": 2},
            ],
        }
    )
    ours = [summary(10, 150), summary(30, 150), summary(20, 150)]
    theirs = [summary(40, 100), summary(40, 100), summary(400, 100)]
    (level,) = comparison.levels
    body = judged(comparison, {"a": {level: ours}, "b": {level: theirs}})
    assert body["levels"][0]["ratios"]["b"]["ttft_ms.p50"] == {
        "ratio": 0.5,
        "least": 0.05,
        "greatest": 0.75,
    }
    assert body["levels"][0]["counted"]["a"] == {"answered": 12, "refused": 3, "failed": 0}
    assert [(each["ratio"], each["met"]) for each in body["wanted"]] == [(0.5, True), (1.5, False)]


def test_wishes_are_of_the_loads_and_levels_they_name() -> None:
    comparison = Comparison.model_validate(
        {
            "systems": [{"name": "a", "url": ""}, {"name": "b", "url": ""}],
            "load": [
                {"concurrency": [1, 4], "requests": [4, 4]},
                {"name": "t", "trace": "t.csv", "ttft_slo_ms": 9},
            ],
            "wanted": [
                {"against": "b", "measure": "ttft_ms.p50", "at_most": 1},
                {"against": "b", "measure": "ttft_ms.p50", "load": ["512/64"], "at_most": 1},
                {"against": "b", "measure": "ttft_ms.p50", "concurrency": [4], "at_most": 1},
                {"against": "b", "measure": "goodput.requests_per_s", "load": ["t"], "at_least": 1},
            ],
        }
    )
    one, four, trace = Level("512/64", 1), Level("512/64", 4), Level("t")
    assert comparison.levels == (one, four, trace)
    of = [list(filter(each.of, comparison.levels)) for each in comparison.wanted]
    assert of == [[one, four, trace], [one, four], [four], [trace]]


@pytest.mark.parametrize(
    ("ours", "theirs", "met"),
    [
        (summary(5, 9, 3.0), summary(5, 9, 0.0), True),  # by products: nothing is divided by 0
        (summary(5, 9, 0.0), summary(5, 9, 3.0), False),
        (summary(5, 9, 0.0), summary(5, 9, 0.0), True),
        (nothing(), summary(5, 9, 0.0), False),
        (summary(5, 9, 3.0), nothing(), False),
    ],
)
def test_a_figure_that_is_nought_or_missing_is_told_and_breaks_nothing(
    tmp_path: Path, ours: dict[str, Any], theirs: dict[str, Any], met: bool
) -> None:
    comparison = Comparison.model_validate(
        {
            "systems": [{"name": "a", "url": ""}, {"name": "b", "url": ""}],
            "load": {"name": "t", "trace": "t.csv", "ttft_slo_ms": 9},
            "wanted": [{"against": "b", "measure": "goodput.requests_per_s", "at_least": 1}],
        }
    )
    (level,) = comparison.levels
    body = judged(comparison, {"a": {level: [ours]}, "b": {level: [theirs]}})
    assert [each["met"] for each in body["wanted"]] == [met]
    facts = {"date": "", "processor": "", "cores": 2, "load_before": 0}
    paths = write_report(tmp_path, "x", comparison, {"machine": facts, **body})
    assert "| t | – | a |" in paths[1].read_text()
    ElementTree.fromstring(paths[2].read_text())


@pytest.mark.bench
async def test_a_trace_is_asked_of_all_alike_and_what_was_refused_is_told(tmp_path: Path) -> None:
    """Beside a load of another kind, and of fewer rounds."""
    starts("bench")
    trace = [{"timestamp": 10 * each, "input_length": 20, "output_length": 6} for each in range(8)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, trace)))
    async with paced(gap_ms=0) as (ours, at), paced(fails=6, retry_after_s=1, gap_ms=0) as (theirs, there):
        (tmp_path / "two.toml").write_text(
            f"""
            systems = [{{name = "a", url = "{at.url}"}}, {{name = "b", url = "{there.url}"}}]
            [[load]]
            trace = "trace.jsonl"
            requests = 4
            length_scale = 0.5
            priorities = "0,7"
            rounds = 2
            warm_up = 0
            ttft_slo_ms = 900
            [[load]]
            prompt_tokens = "16"
            output_tokens = "2"
            concurrency = [1]
            requests = [1]
            rounds = 1
            warm_up = 0
            """
        )
        words = ["bench", "compare", str(tmp_path / "two.toml"), "--out", str(tmp_path)]
        result = await asyncio.to_thread(baton, *words)
    assert result.returncode == 0, result.stderr
    body = json.loads(result.stdout)
    of_trace, closed = body["levels"]
    assert (of_trace["load"], closed["load"], closed["concurrency"]) == ("trace", "16/2", 1)
    assert of_trace["counted"] == {
        "a": {"answered": 8, "refused": 0, "failed": 0},
        "b": {"answered": 8, "refused": 2, "failed": 0},
    }
    assert [len(each["rounds"]["a"]) for each in body["levels"]] == [2, 1]
    goodputs = [each["goodput"]["share"] for each in of_trace["rounds"]["b"]]
    assert max(goodputs) <= 0.75, "in each round one came too late, since it was refused"
    asked = [{json.dumps(body) for body in each.bodies if "priority" in body} for each in (ours, theirs)]
    assert asked[0] == asked[1]
    assert len(asked[0]) == 2 * 4, "no prompt is asked twice: a prefix cache would know it"
    assert {len(json.loads(each)["prompt"]) for each in asked[0]} == {10}
    table = (tmp_path / "compare-two.md").read_text()
    assert "| trace | – | b |" in table
    assert "goodput is of requests with a TTFT of 900 ms at most" in table


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\n" + PAIR, "x: Extra inputs"),
        ('systems = [{name = "a", url = "u"}]', "at least 2"),
        ('systems = [{name = "a", url = "u"}, {name = "a", url = "u"}]', "different names"),
        ('systems = [{name = "a", url = "u", cpu = [1]}, {name = "b", url = "u"}]', "cpu: Extra inputs"),
        ("load = {requests = [1]}\n" + PAIR, "one number for each"),
        ("load = {concurrency = [4], requests = [3]}\n" + PAIR, "as many as are to be at a time"),
        ("load = {requests = [0, 1, 1]}\n" + PAIR, r"toml: load\.requests\.0: Input should be greater"),
        ('load = {prompt_tokens = "x"}\n' + PAIR, r"load\.prompt_tokens: .*it has to be like 512"),
        ('load = {trace = "t", concurrency = [1]}\n' + PAIR, r"toml: load\.concurrency: Extra inputs"),
        ('load = {trace = "t", length_scale = -1}\n' + PAIR, r"load\.length_scale: .*greater than or equal"),
        (
            'load = {trace = "t", priorities = "high"}\n' + PAIR,
            r"load\.priorities: .*'high': classes",
        ),
        ('load = {trace = "t", ttft_slo_ms = 0}\n' + PAIR, r"load\.ttft_slo_ms: .*greater than 0"),
        ("load = {time_scale = 1}\n" + PAIR, r"load\.time_scale: Extra inputs"),
        ('load = [{}, {trace = "t", rounds = 0}]\n' + PAIR, r"load\.1\.rounds: .*greater than or equal to 1"),
        ("load = [{}, {}]\n" + PAIR, "loads have different names"),
        ("load = []\n" + PAIR, "load: .*at least 1"),
        ("load = 3\n" + PAIR, "load: Input should be"),
        (PAIR + WISH.format('measure = "speed", at_least = 1'), "measure 'speed' is none of ttft_ms.p50"),
        (PAIR + WISH.format('measure = "ttft_ms.p50"'), "at_most or at_least"),
        (PAIR + WISH.format(AT_LEAST + 'load = ["x"]'), r"wanted.load 'x' is none of \['512/64'\]"),
        (PAIR + WISH.format(AT_LEAST + "concurrency = [3]"), "is not all measured"),
        (PAIR + WISH.format(GOOD), "is of loads with a ttft_slo_ms"),
        ("= 1", "cannot be read"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "file.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=says):
        read_comparison(file)


def test_a_trace_that_is_missing_or_too_short_is_named_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"timestamp": 0, "input_length": 9, "output_length": 3}')
    with pytest.raises(SettingsError, match=r"trace .*none\.csv: .*No such file"):
        planned(TraceLoad(trace=Path("none.csv")), tmp_path)
    with pytest.raises(SettingsError, match=r"load t: 2 requests of t\.jsonl, which has 1"):
        planned(TraceLoad(trace=Path("t.jsonl"), requests=2), tmp_path)
    ready = planned(TraceLoad(trace=Path("t.jsonl"), requests=1, priorities="3"), tmp_path)
    assert isinstance(ready, PlannedTrace)
    assert (len(ready.plan.replay.requests), ready.plan.classes) == (1, {3: 1})


@pytest.mark.parametrize(
    "file", sorted((ROOT / "docs" / "benchmarks").glob("*.toml")), ids=lambda file: file.stem
)
def test_the_comparisons_that_lie_here_can_be_asked(file: Path) -> None:
    comparison = read_comparison(file)
    for each in comparison.loads:
        planned(each, file.parent)
    for system in comparison.systems:
        assert not system.start or "/" not in system.start[0] or (file.parent / system.start[0]).exists()


def test_a_comparison_can_be_narrowed(tmp_path: Path) -> None:
    comparison = read_comparison(toml(tmp_path, 1, 2))
    (before,), (after,) = comparison.loads, narrowed(comparison, [], 7).loads
    assert (before.rounds, after) == (3, before.model_copy(update={"rounds": 7}))
    with pytest.raises(SettingsError, match="none of"):
        narrowed(comparison, ["other"], None)
    with pytest.raises(SettingsError, match="at least 2"):
        narrowed(comparison, ["slow"], None)
