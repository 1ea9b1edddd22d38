"""Processes that tests fork from one process with everything imported, each in some ten milliseconds.

Each pytest process starts such a server (`tests/preloaded.py`) when it first needs one. A forked process has
its own arguments, environment, session and output. It is a child of the test, and ends with it. Tests of
command lines start real commands instead.
"""

import base64
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Protocol

from baton.launch.fork_server import BEGIN, READY, ForkOrder
from baton.runtime.parent_watch import adopting_orphans
from tests.preloaded import BOOTSTRAP, CALL, WORKERS
from tests.suite.marks import SERVICES, starts

ROOT: Final = Path(__file__).parents[1]
LOAD_S: Final = 120.0
FORK_S: Final = 30.0
ANSWER_BYTES: Final = 4096
POLL_S: Final = 0.005


class Process(Protocol):
    """A child of the test, forked or started by its command (`subprocess.Popen`)."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | Any: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, sig: int) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class ForkedProcess:
    """A forked process, with what tests use of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return its exit code, or a signal's number below 0, or None while it runs."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit code. `timeout`: seconds. Raises subprocess.TimeoutExpired."""
        ends = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if timeout is not None and ends is not None and time.monotonic() > ends:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(POLL_S)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Parent:
    """Server process that has everything imported."""

    def __init__(self, of: str) -> None:
        """Start it and wait until it is ready. `of`: WORKERS or BOOTSTRAP.

        Raises AssertionError with its output if it ends instead.
        """
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.preloaded", str(theirs.fileno()), of],
                cwd=ROOT,
                env=clean_environ() | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,  # what cannot be sought: a fork may write to a file or to a pipe
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._control.settimeout(LOAD_S)
        assert self._control.recv(ANSWER_BYTES) == READY, self._why()
        self._control.settimeout(FORK_S)

    def fork(self, words: tuple[str, ...], environ: Mapping[str, str], output: int) -> ForkedProcess:
        """Return a child that runs `baton WORDS`, or the call that CALL gives, and writes to the file
        `output`.

        Raises AssertionError if there is none.
        """
        begins, begin = os.pipe()
        order = ForkOrder(words, dict(environ), os.getpid()).write()
        try:
            with adopting_orphans():
                try:
                    socket.send_fds(self._control, [b"o"], [order, output, begins])
                    answer = self._control.recv(ANSWER_BYTES).decode()
                except OSError:
                    answer = ""
            pid, _, why = answer.partition(" ")
            assert int(pid or 0) > 0, f"nothing can be forked: {why}\n{self._why()}"
            os.write(begin, BEGIN)
        finally:
            for each in (order, begins, begin):
                os.close(each)
        return ForkedProcess(int(pid))

    def close(self) -> None:
        self._control.close()
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _why(self) -> str:
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        said = (self.process.stdout.read() or b"").decode(errors="replace")
        return f"the process that tests are forked from: {self.process.poll()}\n{said}"


class OwnServer:
    """Server of this process. After a failure the next request starts another one."""

    def __init__(self, of: str) -> None:
        self._of = of
        self._lock = threading.Lock()
        self.parent: Parent | None = None

    def fork(self, words: tuple[str, ...], environ: Mapping[str, str], output: int) -> ForkedProcess:
        with self._lock:
            if self.parent is None:
                self.parent = Parent(self._of)
            try:
                return self.parent.fork(words, environ, output)
            except BaseException:
                self.parent.close()
                self.parent = None
                raise


@cache
def own_server(_pid: int, of: str) -> OwnServer:
    """Return the server of this process. A process that was forked from another has none yet."""
    return OwnServer(of)


def clean_environ() -> dict[str, str]:
    """Return the environment of this process without Baton's variables."""
    return {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}


def fork_baton(words: tuple[str, ...], environ: Mapping[str, str], output: int) -> ForkedProcess:
    """Return a child that runs `baton WORDS` in `environ` and writes to the open file `output`.

    Raises AssertionError.
    """
    if words[0] in SERVICES:
        starts("stack")
    return own_server(os.getpid(), words[0] if words[0] == BOOTSTRAP else WORKERS).fork(
        words, environ, output
    )


def fork_call(
    function: Callable[..., object],
    arguments: tuple[object, ...],
    output: Path | None = None,
    environ: Mapping[str, str] | None = None,
    of: str = WORKERS,
) -> ForkedProcess:
    """Return a child that calls a module's function with arguments that can be pickled.

    It writes to the end of the file `output`, or nowhere. `environ`: variables added to this process's. `of`:
    server to fork from. Raises AssertionError.
    """
    packed = base64.b64encode(pickle.dumps((function, arguments))).decode()
    sink = os.open(output or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        words = (CALL, packed)
        return own_server(os.getpid(), of).fork(words, clean_environ() | dict(environ or {}), sink)
    finally:
        os.close(sink)


def fork_answering(
    function: Callable[..., object],
    arguments: tuple[object, ...],
    output: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[ForkedProcess, Connection]:
    """Return a child as `fork_call` does, for a function whose first argument is a pipe, and this end of the
    pipe.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # where no file is
        listener.listen(1)
        listener.settimeout(FORK_S)
        process = fork_call(_answer, (function, listener.getsockname(), arguments), output, environ)
        try:
            return process, Connection(listener.accept()[0].detach())
        except BaseException:
            process.kill()
            process.wait()
            raise


def _answer(function: Callable[..., object], address: bytes, arguments: tuple[object, ...]) -> None:
    asker = socket.socket(socket.AF_UNIX)
    asker.connect(address)
    function(Connection(asker.detach()), *arguments)
