"""How is a system that is compared brought up, held still while others are measured, and taken down?"""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import httpx

from baton.cli.bench.comparison import SystemSpec
from baton.cli.bench.process_tree import ProcessTree
from baton.runtime import tether
from baton.runtime.errors import StartupError

POLL_S: Final = 0.25
ANSWER_S: Final = 5.0
GO_ON_S: Final = 120.0
"""From being let go on to being ready again: workers may have to register anew."""
SETTLE_S: Final = 2.0
"""From being let go on: what a pause ends, such as a lease, is noticed by then."""
END_S: Final = 30.0
TAIL_BYTES: Final = 2000


class SystemFailed(StartupError):
    """A system did not come up, or is gone. Has the end of its log."""


class System:
    """One of the systems. Whoever starts it ends it."""

    def __init__(self, spec: SystemSpec, log: Path, folder: Path, environ: Mapping[str, str]) -> None:
        """`folder`: where its commands run."""
        self.spec = spec
        self._log = log
        self._folder = folder
        self._environ = {**environ, **spec.env}
        self._process: subprocess.Popen[bytes] | None = None
        self._tree: ProcessTree | None = None

    def start(self) -> None:
        """Return when it is ready. Raises SystemFailed."""
        if self.spec.start:
            # -P: what lies beside that file are no modules of the standard library.
            tied = (sys.executable, "-P", tether.__file__, str(os.getpid()))
            with self._log.open("ab") as sink:
                self._process = subprocess.Popen(  # noqa: S603
                    [*tied, "/usr/bin/env", *self.spec.start],
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    cwd=self._folder,
                    env=self._environ,
                    start_new_session=True,
                    preexec_fn=self._pin,
                )
            self._tree = ProcessTree(self._process.pid)
        self._wait_ready(self.spec.ready_timeout_s)

    def rest(self) -> None:
        """Take no core until `go_on`."""
        if self._tree is not None:
            self._tree.pause()

    def go_on(self) -> None:
        """Return when it is ready again. Raises SystemFailed."""
        if self._tree is not None:
            self._tree.go_on()
            time.sleep(SETTLE_S)
        self._wait_ready(GO_ON_S)

    def end(self) -> None:
        if self._tree is not None and self._process is not None:
            self._tree.end(END_S)
            self._process.wait()
            self._process = self._tree = None

    def _pin(self) -> None:
        if self.spec.cpus:
            os.sched_setaffinity(0, self.spec.cpus)

    def _wait_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with httpx.Client(timeout=ANSWER_S, trust_env=False) as http:
            for address in self.spec.ready:
                while True:
                    # First: another process may answer at its address.
                    if self._process is not None and self._process.poll() is not None:
                        raise self._failed(f"ended with exit code {self._process.returncode}")
                    if (answer := _refusal(http, address)) is None:
                        break
                    if time.monotonic() >= deadline:
                        raise self._failed(f"not ready after {timeout_s:g} s ({address}: {answer})")
                    time.sleep(POLL_S)

    def _failed(self, what: str) -> SystemFailed:
        tail = self._log.read_bytes()[-TAIL_BYTES:].decode(errors="replace") if self._log.exists() else ""
        return SystemFailed(f"{self.spec.name}: {what}; its log, {self._log}, ends: {tail}")


def _refusal(http: httpx.Client, address: str) -> str | None:
    """What it answers, None if that is a success."""
    try:
        reply = http.get(address)
    except httpx.TransportError as error:
        return str(error)
    return None if reply.is_success else f"HTTP {reply.status_code}"
