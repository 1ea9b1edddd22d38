"""Runs of the benchmarks' command, `python -m bench`."""

import json
import subprocess
from collections.abc import Mapping
from typing import Any, Final

from bench.__main__ import app
from tests.cli.typed import forked
from tests.suite.marks import starts

BENCH_S: Final = 280
"""Longest time of a benchmark of a few runs on a busy machine."""


def run_bench(
    *words: str, environ: Mapping[str, str] | None = None, timeout_s: float = BENCH_S
) -> subprocess.CompletedProcess[str]:
    """Run `python -m bench` with these words in a forked process and return its output and exit code."""
    return forked(_run, words, environ, timeout_s)


def bench(*words: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a benchmark and return the JSON object that it prints. Only for tests marked `bench`."""
    starts("bench")
    result = run_bench(*words, environ={"OMP_NUM_THREADS": "1", **(environ or {})})
    assert result.returncode == 0, result.stderr
    body: dict[str, Any] = json.loads(result.stdout)
    return body


def _run(words: tuple[str, ...]) -> None:
    app(list(words), prog_name="python -m bench")
