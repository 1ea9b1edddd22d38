"""What does a command answer, typed as a user types it?"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, Final

from tests.suite.tiers import ends_by_itself, starts

BENCH_S: Final = 280
"""The longest that a benchmark of a few runs may take on a busy machine."""


def baton(
    *words: str, environ: Mapping[str, str] | None = None, timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
    with ends_by_itself():
        return subprocess.run(
            [sys.executable, "-m", "services.cli.main", *words],
            env={**clean, "COLUMNS": "200", "NO_COLOR": "1", **(environ or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


def bench(*words: str) -> dict[str, Any]:
    """The object that a benchmark prints."""
    starts("bench")
    result = baton("bench", *words, environ={"OMP_NUM_THREADS": "1"}, timeout_s=BENCH_S)
    assert result.returncode == 0, result.stderr
    body: dict[str, Any] = json.loads(result.stdout)
    return body
