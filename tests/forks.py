"""How does a test start a process that has nothing to import?

It is forked, in some ten milliseconds, from one process that has everything imported (`tests/preloaded.py`):
each pytest process starts one when it first needs it. What is forked has its own arguments, environment,
session and output, is a child of the test, and ends with it. Real command lines stay where they are what is
tested.
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

from baton.launch.fork_server import BEGIN, READY, Order
from baton.runtime.parent_watch import adopting
from tests.preloaded import BOOTSTRAP, CALL, WORKERS
from tests.suite.tiers import SERVICES, starts

ROOT: Final = Path(__file__).parents[1]
LOAD_S: Final = 120.0
FORK_S: Final = 30.0
ANSWER_BYTES: Final = 4096
POLL_S: Final = 0.005


class Process(Protocol):
    """A child of the test, whether it was forked or started by its command (`subprocess.Popen`)."""

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
    """As `subprocess.Popen`, as far as tests ask."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Its exit code, < 0 for a signal; None while it runs."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code. `timeout` in seconds. Raises subprocess.TimeoutExpired."""
        ends = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if timeout is not None and ends is not None and time.monotonic() > ends:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(POLL_S)
        return code

    def send_signal(self, sig: int) -> None:
        """Does nothing once it has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Parent:
    """One process that has everything imported."""

    def __init__(self, of: str) -> None:
        """`of`: WORKERS or BOOTSTRAP. Returns when it has. Raises AssertionError with what it said where it
        ends instead."""
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
        """A child that runs `baton WORDS`, or calls what CALL says, and writes to the file `output`. Raises
        AssertionError where there is none."""
        begins, begin = os.pipe()
        order = Order(words, dict(environ), os.getpid()).write()
        try:
            with adopting():
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


class _Own:
    """This process's parent of forks. One that failed is replaced for whoever asks next."""

    def __init__(self, of: str) -> None:
        self._of = of
        self._lock = threading.Lock()
        self._parent: Parent | None = None

    def fork(self, words: tuple[str, ...], environ: Mapping[str, str], output: int) -> ForkedProcess:
        with self._lock:
            if self._parent is None:
                self._parent = Parent(self._of)
            try:
                return self._parent.fork(words, environ, output)
            except BaseException:
                self._parent.close()
                self._parent = None
                raise


@cache
def _own(_pid: int, of: str) -> _Own:
    """Of the process that asks: one that was forked from another has none yet."""
    return _Own(of)


def clean_environ() -> dict[str, str]:
    """This process's, without what is set for Baton."""
    return {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}


def fork_baton(words: tuple[str, ...], environ: Mapping[str, str], output: int) -> ForkedProcess:
    """A child that runs `baton WORDS` in `environ` and writes to the open file `output`. Raises
    AssertionError."""
    if words[0] in SERVICES:
        starts("stack")
    return _own(os.getpid(), words[0] if words[0] == BOOTSTRAP else WORKERS).fork(words, environ, output)


def fork_call(
    function: Callable[..., object],
    arguments: tuple[object, ...],
    output: Path | None = None,
    environ: Mapping[str, str] | None = None,
    of: str = WORKERS,
) -> ForkedProcess:
    """A child that calls a module's function with what can be pickled; `environ` comes beside this process's.
    It writes to the end of the file `output`, or nowhere. `of`: where the function is to find itself. Raises
    AssertionError."""
    packed = base64.b64encode(pickle.dumps((function, arguments))).decode()
    sink = os.open(output or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        words = (CALL, packed)
        return _own(os.getpid(), of).fork(words, clean_environ() | dict(environ or {}), sink)
    finally:
        os.close(sink)


def fork_answering(
    function: Callable[..., object],
    arguments: tuple[object, ...],
    output: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> tuple[ForkedProcess, Connection]:
    """As `fork_call`, of a function whose first argument is a pipe, and this process's end of it."""
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
