"""Runs of `baton` as a user types it."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from baton.cli.main import main
from tests.forks import clean_environ, fork_call
from tests.suite.marks import ends_by_itself

PLAIN: Final = {"COLUMNS": "200", "NO_COLOR": "1"}


def baton(
    *words: str, environ: Mapping[str, str] | None = None, timeout_s: float = 60
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own and return its output and exit code."""
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
    """Run the command in a forked process, which has everything imported."""
    return forked(_baton, words, environ, timeout_s)


def forked(
    command: Callable[[tuple[str, ...]], None],
    words: tuple[str, ...],
    environ: Mapping[str, str] | None,
    timeout_s: float,
) -> subprocess.CompletedProcess[str]:
    """Call `command` with `words` in a forked process and return its output and exit code."""
    with tempfile.TemporaryDirectory(prefix="baton-typed-") as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = fork_call(_call, (command, words, err), out, {**PLAIN, **(environ or {})})
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
            process.wait()
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())


def _baton(words: tuple[str, ...]) -> None:
    sys.argv[1:] = words
    main()


def _call(command: Callable[[tuple[str, ...]], None], words: tuple[str, ...], err: Path) -> None:
    os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT, 0o600), 2)
    command(words)
