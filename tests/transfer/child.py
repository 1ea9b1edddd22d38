"""A child process that a test asks questions, stops, continues or kills.

Both ends of the pipe are the test's own. A child answers one question at a time, in order."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.forks import fork_answering

ANSWER_S: Final = 60.0
"""Longest time for one answer of a child before a test gives up, seconds."""


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
        self._process, self._pipe = fork_answering(target, arguments, output, environment)

    def said(self) -> str:
        """Return all that the process wrote to stdout and stderr."""
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
        os.kill(self._process.pid, signal.SIGSTOP)

    @property
    def frozen(self) -> bool:
        stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        return stat[stat.rindex(")") + 2] == "T"

    def thaw(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(ANSWER_S)

    def end(self) -> int:
        """Let it leave by itself; the exit code."""
        self.begin("leave")
        return self._process.wait(ANSWER_S)
