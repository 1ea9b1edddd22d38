"""Child processes that the launcher starts, with their output and their exits."""

import asyncio
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol

from baton.runtime import child_process
from baton.runtime.child_process import tied_command
from baton.runtime.service_process import ERROR_PREFIX

LINE_BYTES_MAX: Final = 4096
HIDDEN_LINES_MAX: Final = 20
CHUNK_BYTES: Final = 65_536
CRASH: Final = "Fatal Python error: "
"""Beginning of the line that `faulthandler` writes before the stacks of a crashed process."""
OUTPUT_TIMEOUT_S: Final = 2.0
LARGE_PAGES: Final = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Environment variable that makes the C library allocate memory in large pages. Weights of the compiled step
and KV pages request large pages themselves (docs/engine.md). Other C libraries than glibc ignore it."""

Show = Callable[[str], None]
"""Function that shows a line to the user."""
IsShown = Callable[[str], bool]
"""Function that returns whether a line of a child's output is shown to the user."""


class Process(Protocol):
    """A process with the methods that `Child` uses, such as an asyncio subprocess."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class Child:
    """A child process that dies with this process, and whose output lines are shown or hidden.

    A line is shown, prefixed by the child's name, if `is_shown` returns True for it. From the first line of a
    crash report on, all lines are shown.
    """

    def __init__(
        self, name: str, process: Process, output: asyncio.StreamReader, is_shown: IsShown, show: Show
    ) -> None:
        """Store a process that has been started, so that its output and its end can be followed. `output`:
        its stdout and stderr."""
        self.name = name
        self.pid: Final = process.pid
        self.exit_secret = b""
        """Secret whose possession proves a report of this child's exit to be its starter's. If empty, the
        bootstrap accepts no report."""
        self.hidden_lines: deque[str] = deque(maxlen=HIDDEN_LINES_MAX)
        """Lines of the child's output that were not shown, since the last shown line. At most
        HIDDEN_LINES_MAX, oldest first."""
        self._process = process
        self._is_shown = is_shown
        self._show = show
        self._output = asyncio.create_task(self._read(output), name=f"output of {name}")

    async def wait(self) -> int:
        """Wait for the process's end and its last output. Return the exit code, or minus the number of its
        signal."""
        code = await self._process.wait()
        # A grandchild may keep the pipe open for longer. Its output is not worth the wait.
        await asyncio.wait((self._output,), timeout=OUTPUT_TIMEOUT_S)
        self._output.cancel()
        return code

    def terminate(self) -> None:
        """Send SIGTERM to the child process. Do nothing if it has ended."""
        with suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL to the child process. Do nothing if it has ended."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def _read(self, output: asyncio.StreamReader) -> None:
        crashed = False
        async for line in lines(output):
            crashed = crashed or line.startswith(CRASH)
            if (crashed or self._is_shown(line)) and not line.startswith(ERROR_PREFIX):
                self.hidden_lines.clear()
                self._show(f"{self.name}: {line}")
            else:
                self.hidden_lines.append(line)

    def startup_error(self) -> str | None:
        """Return the text with which the process reported why it could not start (`report_startup_error`), or
        None."""
        errors = [line for line in self.hidden_lines if line.startswith(ERROR_PREFIX)]
        return errors[-1].removeprefix(ERROR_PREFIX) if errors else None

    def show_hidden_lines(self) -> None:
        """Show the last lines that were hidden while the process ran."""
        while self.hidden_lines:
            self._show(f"{self.name}: {self.hidden_lines.popleft()}")


async def lines(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yield the lines of a child's output stream, cut to LINE_BYTES_MAX bytes, with undecodable bytes
    replaced."""
    rest = b""
    while chunk := await reader.read(CHUNK_BYTES):
        *whole, rest = (rest + chunk).split(b"\n")
        rest = rest[:LINE_BYTES_MAX]
        for line in whole:
            yield _decode(line)
    if rest:
        yield _decode(rest)


def _decode(line: bytes) -> str:
    return line[:LINE_BYTES_MAX].decode(errors="replace").rstrip("\r")


async def start_child(
    name: str,
    command: Sequence[str],
    environ: Mapping[str, str],
    is_shown: IsShown,
    show: Show,
    files: Sequence[int] = (),
) -> Child:
    """Start `command` as a child process in a session of its own.

    Ctrl-C then reaches only this process, which stops its children in order. The child inherits the open
    files `files` under their numbers.
    """
    process = await asyncio.create_subprocess_exec(
        *tied_command(*command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=child_environ(environ),
        start_new_session=True,
        pass_fds=files,
    )
    assert process.stdout is not None
    return Child(name, process, process.stdout, is_shown, show)


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for a process of the stack: it imports this package and writes its output
    unbuffered."""
    return {**LARGE_PAGES, **child_process.child_environ(environ), "PYTHONUNBUFFERED": "1"}


def describe_exit(code: int) -> str:
    """Return how a process exited as text: `ended with exit code 1`, `was killed by SIGKILL`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
