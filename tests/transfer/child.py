"""How does a test hold a process of its own, ask it things, and stop, continue or kill it?

Both ends of the pipe are the test's own. A child answers one question at a time, in order.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

ANSWER_S: Final = 60.0
"""How long a child may take before a test gives up on it."""

FORKS: Final = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.transfer.preloaded"])


class Child:
    """A process that runs `target(pipe, *arguments)`; its stdout and stderr go to `output`."""

    def __init__(
        self,
        target: Callable[..., None],
        arguments: tuple[object, ...],
        environment: dict[str, str],
        output: Path,
    ) -> None:
        self._output = output
        self._pipe, theirs = FORKS.Pipe()
        self._process = FORKS.Process(
            target=_live, args=(target, theirs, arguments, environment, output), daemon=True
        )
        self._process.start()
        theirs.close()

    def said(self) -> str:
        """What the process wrote to stdout and stderr."""
        return self._output.read_text() if self._output.exists() else ""

    def begin(self, what: str, *arguments: object) -> None:
        """Ask without waiting for the answer."""
        self._pipe.send((what, arguments))

    def answer(self) -> Any:
        """The answer to the oldest question that has none. Raises what the call raised, or EOFError if
        the process died."""
        assert self._pipe.poll(ANSWER_S), f"the child does not answer: {self.said()}"
        outcome = self._pipe.recv()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def ask(self, what: str, *arguments: object) -> Any:
        self.begin(what, *arguments)
        return self.answer()

    def freeze(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    @property
    def frozen(self) -> bool:
        stat = Path(f"/proc/{self._pid}/stat").read_text()
        return stat[stat.rindex(")") + 2] == "T"

    def thaw(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(ANSWER_S)

    def end(self) -> int | None:
        """Let it leave by itself; the exit code."""
        self.begin("leave")
        self._process.join(ANSWER_S)
        return self._process.exitcode

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid


def _live(
    target: Callable[..., None],
    pipe: Connection,
    arguments: tuple[object, ...],
    environment: dict[str, str],
    output: Path,
) -> None:
    os.environ.update(environment)
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    target(pipe, *arguments)
