"""Servers that a benchmark starts, stops for a while (SIGSTOP), continues and ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

import httpx
from pydantic import BaseModel, ConfigDict

from baton.runtime import parent_watch
from baton.runtime.errors import StartupError
from bench.serving.process_tree import ProcessTree

POLL_S: Final = 0.25
ANSWER_S: Final = 5.0
GO_ON_S: Final = 120.0
"""Longest time from being continued to being ready. Workers may have to register again."""
SETTLE_S: Final = 2.0
"""Pause after being continued. What the stop ended, such as a lease, is noticed by then."""
END_S: Final = 30.0
TAIL_BYTES: Final = 2000


class SystemSpec(BaseModel):
    """How a system is started, and when it is ready."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    url: str
    start: tuple[str, ...] = ()
    """Command line. Empty: the system runs already."""
    ready: tuple[str, ...] = ()
    """URLs that have to answer with a success. Empty: its /health."""
    ready_timeout_s: float = 600
    cpus: tuple[int, ...] = ()
    env: dict[str, str] = {}
    about: str = ""
    """One sentence for readers of the table."""

    @property
    def probes(self) -> tuple[str, ...]:
        return self.ready or (f"{self.url}/health",)


class SystemFailed(StartupError):
    """A system did not get ready, or has ended. Has the end of its log."""


class System:
    """One server. Its starter has to end it."""

    def __init__(self, spec: SystemSpec, log: Path, folder: Path, environ: Mapping[str, str]) -> None:
        """`folder`: working directory of its command."""
        self.spec = spec
        self._log = log
        self._folder = folder
        self.environ = {**environ, **spec.env}
        self._process: subprocess.Popen[bytes] | None = None
        self._tree: ProcessTree | None = None

    def start(self) -> None:
        """Start it and wait until it is ready. Raises SystemFailed."""
        if self.spec.start:
            # -P keeps the files beside tether.py from hiding modules of the standard library.
            tied = (sys.executable, "-P", parent_watch.__file__, str(os.getpid()))
            with self._log.open("ab") as sink:
                self._process = subprocess.Popen(  # noqa: S603
                    [*tied, "/usr/bin/env", *self.spec.start],
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    cwd=self._folder,
                    env=self.environ,
                    start_new_session=True,
                    preexec_fn=self._pin,
                )
            self._tree = ProcessTree(self._process.pid)
        self._wait_ready(self.spec.ready_timeout_s)

    def rest(self) -> None:
        """Stop its processes until `go_on`."""
        if self._tree is not None:
            self._tree.pause()

    def go_on(self) -> None:
        """Continue its processes and wait until it is ready again. Raises SystemFailed."""
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
            for address in self.spec.probes:
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
    """Return why the address is not ready, or None if it answers with a success."""
    try:
        reply = http.get(address)
    except httpx.TransportError as error:
        return str(error)
    return None if reply.is_success else f"HTTP {reply.status_code}"


@contextmanager
def ended_systems(systems: Sequence[System]) -> Iterator[None]:
    """End all systems on leaving, also on SIGTERM."""
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        for system in systems:
            system.end()
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
