"""Comparison of systems that serve the same model on the same cores.

All systems are started. Each is measured while the processes of the others are stopped (SIGSTOP).
Each round begins with another system, so that none is always measured first. A TOML file names them:

    model = "demo"                      # its directory is $MODEL_DIR, its file $MODEL_FILE
    rounds = 3

    [[load]]                            # by `baton bench serve`
    prompt_tokens = 512
    output_tokens = 64
    concurrency = [1, 4, 8]
    requests = [4, 8, 16]               # of one round, for each concurrency

    [[load]]                            # by aiperf, which has to be on the PATH
    trace = "traces/azure-conversation-2023.csv"
    requests = [120]
    length_scale = 0.25
    tokens_max = 1024
    ttft_slo_ms = 2000
    tpot_slo_ms = 60

    [[systems]]                         # the first is divided by each of the others
    name = "Baton"
    url = "http://127.0.0.1:8000"
    start = ["baton", "serve", "--model", "${MODEL_DIR}"]     # none: it runs already
    ready = ["http://127.0.0.1:8000/ready"]
    cpus = [0, 1]
    env = { OMP_NUM_THREADS = "1" }

Commands run in the file's folder; `${NAME}` is read from the environment.
"""

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import uvloop
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from baton.cli.load_benchmark import NotMeasurable, Workload, find_model, measure
from baton.cli.load_client import LoadResult, connect
from baton.models.model_files import prepare, resolve
from baton.runtime.errors import SettingsError, StartupError
from baton.runtime.service_process import report_startup_error
from bench.serving.system import System, SystemSpec, ended_systems
from bench.serving.trace import convert

VARIABLE: Final = re.compile(r"\$\{(\w+)\}")
DEFAULT_OUT: Final = Path("docs/benchmarks")
Figures = dict[str, float]
"""Values of one round by their names in MEASURES."""

MEASURES: Final = {
    "ttft_ms.p50": "time_to_first_token.p50",
    "ttft_ms.p99": "time_to_first_token.p99",
    "tpot_ms.p50": "inter_token_latency.p50",
    "tpot_ms.p99": "inter_token_latency.p99",
    "itl_ms.p99": "inter_chunk_latency.p99",
    "itl_ms.max": "inter_chunk_latency.max",
    "output_tokens_per_s": "output_token_throughput.avg",
    "goodput.requests_per_s": "goodput.avg",
    "requests": "request_count.avg",
    "failed": "error_request_count.avg",
}
"""Figures of `baton bench serve`, each with the same figure's name in aiperf's report."""


class Load(BaseModel):
    """Requests of one kind, closed or by a trace."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt_tokens: int = 512
    output_tokens: int = 64
    vocabulary: int = 32_000
    concurrency: tuple[int, ...] = (1,)
    requests: tuple[int, ...] = (32,)
    warm_up: int = 2
    trace: str = ""
    length_scale: float = 1.0
    tokens_max: int | None = None
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None

    @model_validator(mode="after")
    def _has_goodput(self) -> "Load":
        if not self.trace and (self.ttft_slo_ms, self.tpot_slo_ms) != (None, None):
            raise ValueError("ttft_slo_ms and tpot_slo_ms need a trace: aiperf measures goodput")
        return self

    @property
    def levels(self) -> tuple[str, ...]:
        if self.trace:
            return (Path(self.trace).stem,)
        sizes = f"{self.prompt_tokens}/{self.output_tokens}"
        return tuple(f"{sizes} at {each}" for each in self.concurrency)


class Comparison(BaseModel):
    """Contents of the TOML file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    systems: tuple[SystemSpec, ...]
    load: tuple[Load, ...] = (Load(),)
    model: str = ""
    rounds: int = 3


def compare(
    file: Annotated[Path, typer.Argument(help="A TOML file of systems and loads.")],
    rounds: Annotated[int | None, typer.Option(min=1, max=1000, help="In place of the file's.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only these systems; repeat it.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for compare-NAME.json and .md.")] = DEFAULT_OUT,
    name: Annotated[str, typer.Option(help="Default: the TOML file's name.")] = "",
    logs: Annotated[Path | None, typer.Option(help="Folder for the systems' logs.")] = None,
) -> None:
    """Measure systems in turns under the same loads, and write a table and its numbers."""
    try:
        comparison = read_comparison(file, only or ())
        environ = _environment(comparison)
        folder = logs or Path(tempfile.mkdtemp(prefix="baton-compare-"))
        folder.mkdir(parents=True, exist_ok=True)
        typer.echo(f"logs: {folder}", err=True)
        systems = [
            System(fill(spec, environ), folder / f"{index}.log", file.resolve().parent, environ)
            for index, spec in enumerate(comparison.systems)
        ]
        results = measure_in_turns(systems, comparison, rounds or comparison.rounds, file.resolve().parent)
    except StartupError as error:
        raise typer.Exit(report_startup_error(error)) from None
    report = summarise(comparison, results)
    target = out / f"compare-{name or file.stem}"
    out.mkdir(parents=True, exist_ok=True)
    target.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    target.with_suffix(".md").write_text(markdown(name or file.stem, report))
    print(json.dumps(report))


def read_comparison(file: Path, only: Sequence[str] = ()) -> Comparison:
    """Read the TOML file, with `only` some of its systems. Raises SettingsError."""
    try:
        comparison = Comparison.model_validate(tomllib.loads(file.read_text("utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise SettingsError(f"{file}: {error}") from None
    names = [each.name for each in comparison.systems]
    if unknown := set(only).difference(names):
        raise SettingsError(f"--only {min(unknown)}: the file has {', '.join(names)}")
    systems = tuple(each for each in comparison.systems if not only or each.name in only)
    return comparison.model_copy(update={"systems": systems})


def fill(spec: SystemSpec, environ: Mapping[str, str]) -> SystemSpec:
    """Return `spec` with its `${NAME}` replaced. Raises SettingsError for a missing variable."""

    def filled(text: str) -> str:
        try:
            return VARIABLE.sub(lambda match: environ[match[1]], text)
        except KeyError as error:
            raise SettingsError(f"{spec.name}: {error.args[0]} is not set in the environment") from None

    return spec.model_copy(update={"start": tuple(map(filled, spec.start)), "about": filled(spec.about)})


def _environment(comparison: Comparison) -> dict[str, str]:
    programs = str(Path(sys.executable).parent)  # so that `baton` is this one
    environ = {**os.environ, "PATH": os.pathsep.join((programs, os.environ.get("PATH", os.defpath)))}
    if comparison.model:
        source = resolve(comparison.model)
        environ |= {"MODEL_FILE": str(source.path), "MODEL_DIR": str(prepare(source, _log))}
    return environ


Results = dict[str, dict[str, list[Figures]]]
"""Figures by level and system, one entry a round."""


def measure_in_turns(systems: Sequence[System], comparison: Comparison, rounds: int, folder: Path) -> Results:
    """Start all systems, measure them in turns, and end them whatever happens. Raises StartupError."""
    levels = [level for load in comparison.load for level in load.levels]
    results: Results = {level: {each.spec.name: [] for each in systems} for level in levels}
    with ended_systems(systems):
        for system in systems:
            _log(f"starting {system.spec.name}")
            system.start()
            system.rest()
        for number in range(rounds):
            first = number % len(systems)
            for system in (*systems[first:], *systems[:first]):
                system.go_on()
                for load in comparison.load:
                    for level, figures in _measure(system, load, number, folder):
                        results[level][system.spec.name].append(figures)
                        _log(f"round {number + 1}/{rounds}, {system.spec.name}, {level}: {figures}")
                system.rest()
    return results


def _measure(system: System, load: Load, number: int, folder: Path) -> Iterator[tuple[str, Figures]]:
    if load.trace:
        yield load.levels[0], _replay(system, load, number, folder)
        return
    workload = Workload(load.prompt_tokens, load.output_tokens, vocabulary=load.vocabulary)
    for level, concurrency, requests in zip(load.levels, load.concurrency, load.requests, strict=True):
        run = f"{number} at {concurrency}"
        result = uvloop.run(_load(system.spec.url, workload, requests, concurrency, load.warm_up, run))
        yield level, _values(result.summary(), {name: name for name in MEASURES})


async def _load(
    url: str, workload: Workload, requests: int, concurrency: int, warm_up: int, run: str
) -> LoadResult:
    async with connect(url) as client:
        _, result = await measure(client, workload, requests, concurrency, warm_up=warm_up, run=run)
    return result


def _replay(system: System, load: Load, number: int, folder: Path) -> Figures:
    """Replay a trace with aiperf. Raises NotMeasurable."""

    async def served_model() -> str:
        async with connect(system.spec.url) as client:
            return await find_model(client)

    with tempfile.TemporaryDirectory(prefix="baton-aiperf-") as scratch:
        lines = Path(scratch, "trace.jsonl")
        lines.write_text(convert(folder / load.trace, load.requests[0], load.length_scale, load.tokens_max))
        limits = {"time_to_first_token": load.ttft_slo_ms, "inter_token_latency": load.tpot_slo_ms}
        goodput = " ".join(f"{name}:{limit:g}" for name, limit in limits.items() if limit is not None)
        command = ["aiperf", "profile", "--url", system.spec.url, "--model", uvloop.run(served_model())]
        command += ["--endpoint-type", "completions", "--streaming", "--use-server-token-count"]
        command += ["--tokenizer", system.environ["MODEL_DIR"], "--extra-inputs", "ignore_eos:true"]
        command += ["--custom-dataset-type", "mooncake_trace", "--fixed-schedule", "--input-file", str(lines)]
        command += ["--random-seed", str(number), "--ui", "none", "--artifact-dir", scratch]
        command += ["--goodput", goodput] if goodput else []
        ran = subprocess.run(command, env=system.environ, capture_output=True, text=True, check=False)  # noqa: S603
        report = Path(scratch, "profile_export_aiperf.json")
        if not report.exists():
            raise NotMeasurable(f"aiperf ended with {ran.returncode}: {(ran.stderr or ran.stdout)[-500:]}")
        return _values(json.loads(report.read_text()), MEASURES)


def _values(report: Mapping[str, Any], names: Mapping[str, str]) -> Figures:
    """Return those figures that the report has."""
    figures: Figures = {}
    for name, path in names.items():
        value: Any = report
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, int | float):
            figures[name] = round(float(value), 3)
    return figures


def summarise(comparison: Comparison, results: Results) -> dict[str, Any]:
    """Return medians over the rounds, and the first system's medians divided by each other's."""
    medians = {
        level: {
            name: {
                measure_name: round(statistics.median(each[measure_name] for each in rounds), 3)
                for measure_name in MEASURES
                if rounds and all(measure_name in each for each in rounds)
            }
            for name, rounds in by_system.items()
        }
        for level, by_system in results.items()
    }
    first = comparison.systems[0].name
    ratios = {
        level: {
            name: {key: round(by_system[first][key] / value, 3) for key, value in figures.items() if value}
            for name, figures in by_system.items()
            if name != first
        }
        for level, by_system in medians.items()
    }
    return {
        "benchmark": "compare",
        "machine": machine(),
        "systems": {each.name: each.about for each in comparison.systems},
        "load": [each.model_dump(mode="json") for each in comparison.load],
        "medians": medians,
        "ratios": ratios,
        "rounds": results,
    }


def machine() -> dict[str, Any]:
    """Return what the numbers depend on: date, processor, cores, load average."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "processor": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
    }


def markdown(name: str, report: Mapping[str, Any]) -> str:
    """Return the tables of medians and ratios."""
    on, first = report["machine"], next(iter(report["systems"]))
    parts = [
        f"# Comparison: {name}",
        f"Measured {on['date']} on {on['cores']} cores, {on['processor']}. Medians over the rounds.",
        *(f"* {each}: {about}" for each, about in report["systems"].items() if about),
    ]
    titles = (("Medians", "medians"), (f"{first}, divided by each other system", "ratios"))
    for title, key in titles:
        rows = [
            [level, system, *(f"{figures[each]:.4g}" if each in figures else "–" for each in MEASURES)]
            for level, by_system in report[key].items()
            for system, figures in by_system.items()
        ]
        head = ["load", "system", *MEASURES]
        lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
        parts += [f"## {title}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _log(line: str) -> None:
    typer.echo(line, err=True)
