"""What does a command answer, typed as a user types it?"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from baton.cli.main import main
from tests.forks import clean_environ, fork_call
from tests.suite.tiers import ends_by_itself, starts

BENCH_S: Final = 280
"""The longest that a benchmark of a few runs may take on a busy machine."""
PLAIN: Final = {"COLUMNS": "200", "NO_COLOR": "1"}


def baton(
    *words: str, environ: Mapping[str, str] | None = None, timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    with ends_by_itself():
        return subprocess.run(
            [sys.executable, "-m", "baton.cli.main", *words],
            env={**clean_environ(), **PLAIN, **(environ or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


def forked_baton(
    *words: str, environ: Mapping[str, str] | None = None, timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """The same without the imports: where it is not the command line that is tested."""
    with tempfile.TemporaryDirectory(prefix="baton-typed-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = fork_call(_run, (words, err), out, {**PLAIN, **(environ or {})})
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
            process.wait()
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())


def _run(words: tuple[str, ...], err: Path) -> None:
    os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT, 0o600), 2)
    sys.argv[1:] = words
    main()


def bench(*words: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The object that a benchmark prints."""
    starts("bench")
    environ = {"OMP_NUM_THREADS": "1", **(environ or {})}
    result = forked_baton("bench", *words, environ=environ, timeout_s=BENCH_S)
    assert result.returncode == 0, result.stderr
    body: dict[str, Any] = json.loads(result.stdout)
    return body
