"""What is one child process doing, and what did it say last?"""

import asyncio
import signal
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol

from baton.runtime import child_process
from baton.runtime.child_process import tied_command
from baton.runtime.service_process import TOLD

LINE_BYTES_MAX: Final = 4096
LINES_KEPT: Final = 20
CHUNK_BYTES: Final = 65_536
CRASH: Final = "Fatal Python error: "
"""How `faulthandler` begins to tell where a process was that a signal is about to end."""
OUTPUT_TIMEOUT_S: Final = 2.0
LARGE_PAGES: Final = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""The C library's memory in large pages, too; weights of the compiled step and pages of KV ask by themselves
(docs/engine.md). Other systems do not look at it."""

Say = Callable[[str], None]
Worth = Callable[[str], bool]


class Process(Protocol):
    """As asyncio's own."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class Child:
    """A process that dies with this one. Its lines that `worth` picks go to `say`, prefixed by `name`, and
    all from the first of a crash on."""

    def __init__(
        self, name: str, process: Process, output: asyncio.StreamReader, worth: Worth, say: Say
    ) -> None:
        """`output`: what it writes."""
        self.name = name
        self.pid: Final = process.pid
        self.exit_secret = b""
        """Drawn when the child was started, to report its exit. Empty: nobody believes a report."""
        self.held_back: deque[str] = deque(maxlen=LINES_KEPT)
        """What it wrote since the last line that was shown, oldest first."""
        self._process = process
        self._worth = worth
        self._say = say
        self._output = asyncio.create_task(self._read(output), name=f"output of {name}")

    async def wait(self) -> int:
        """Wait for its end and for what it wrote before that. Returns the exit code, < 0 for a signal."""
        code = await self._process.wait()
        # A grandchild may hold the pipe open for longer; its words are not worth waiting for.
        await asyncio.wait((self._output,), timeout=OUTPUT_TIMEOUT_S)
        self._output.cancel()
        return code

    def ask_to_stop(self) -> None:
        """Send SIGTERM. Does nothing if it has ended."""
        with suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL. Does nothing if it has ended."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def _read(self, output: asyncio.StreamReader) -> None:
        crashed = False
        async for line in lines(output):
            crashed = crashed or line.startswith(CRASH)
            if (crashed or self._worth(line)) and not line.startswith(TOLD):
                self.held_back.clear()
                self._say(f"{self.name}: {line}")
            else:
                self.held_back.append(line)

    def own_words(self) -> str | None:
        """The line with which it said why it could not start (`service_process.tell`), if it did."""
        told = [line for line in self.held_back if line.startswith(TOLD)]
        return told[-1].removeprefix(TOLD) if told else None

    def show_hidden_lines(self) -> None:
        """Show what was not worth showing while it ran."""
        while self.held_back:
            self._say(f"{self.name}: {self.held_back.popleft()}")


async def lines(reader: asyncio.StreamReader) -> AsyncIterator[str]:
    """The lines of a stream, cut to LINE_BYTES_MAX bytes, undecodable bytes replaced."""
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
    worth: Worth,
    say: Say,
    files: Sequence[int] = (),
) -> Child:
    """Start `command` apart from the terminal: Ctrl-C reaches this process only, which stops it in order. It
    inherits `files`, by their numbers."""
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
    return Child(name, process, process.stdout, worth, say)


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a part of the stack. It runs this package, and writes its lines at once."""
    return {**LARGE_PAGES, **child_process.child_environ(environ), "PYTHONUNBUFFERED": "1"}


def describe_exit(code: int) -> str:
    """`ended with exit code 1`, `was killed by SIGKILL`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
