"""How does a test hold an endpoint in another process, and stop, cut or kill that process?

The child drives its endpoint all the time, unless told to pause, and answers one call at a time. Both
ends of the pipe are the test's own.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from services.rooms.ids import Incarnation
from services.transfer.host_memory import HostMemory
from services.transfer.interface import Endpoint, Region

ANSWER_S: Final = 60.0
"""How long a child may take before a test gives up on it."""
IDLE_S: Final = 0.0005

FORKS: Final = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.transfer.preloaded"])


class Puppet:
    """A process with one endpoint and one region, "kv"."""

    def __init__(
        self, incarnation: int, agent: str | None, length: int, environment: Mapping[str, str], output: Path
    ) -> None:
        """`length`: bytes of "kv". `output`: where what it says on stdout and stderr goes."""
        self.incarnation = Incarnation(incarnation)
        self._output = output
        self._pipe, theirs = FORKS.Pipe()
        self._process = FORKS.Process(
            target=_live,
            args=(theirs, self.incarnation, agent, length, dict(environment), output),
            daemon=True,
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
        assert self._pipe.poll(ANSWER_S), "the child does not answer"
        outcome = self._pipe.recv()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def ask(self, what: str, *arguments: object) -> Any:
        self.begin(what, *arguments)
        return self.answer()

    def endpoint(self) -> Endpoint:
        endpoint: Endpoint = self.ask("endpoint")
        return endpoint

    def freeze(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(ANSWER_S)

    def end(self) -> int | None:
        """Close the endpoint and leave; the exit code."""
        self.begin("leave")
        self._process.join(ANSWER_S)
        return self._process.exitcode

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid


def _live(
    pipe: Connection,
    incarnation: Incarnation,
    agent: str | None,
    length: int,
    environment: dict[str, str],
    output: Path,
) -> None:
    os.environ.update(environment)
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from services.transfer.nixl import NixlTransfer

    memory = HostMemory(length)
    transfer = NixlTransfer(incarnation, agent)
    transfer.register(Region("kv", memory.address, memory.length))
    taken: list[tuple[str, bytes]] = []
    driving = True

    def drive(on: bool) -> None:
        nonlocal driving
        driving = on

    def fill(byte: int) -> None:
        memory.view[:] = bytes([byte]) * length

    own: dict[str, Callable[..., Any]] = {
        "drive": drive,
        "fill": fill,
        "count": lambda byte: bytes(memory.view).count(byte),
        "taken": lambda: list(taken),
    }
    while True:
        if driving:
            taken.extend(transfer.notices())
        if not pipe.poll(IDLE_S):
            continue
        what, arguments = pipe.recv()
        if what == "leave":
            transfer.close()
            return
        try:
            pipe.send(own[what](*arguments) if what in own else getattr(transfer, what)(*arguments))
        except Exception as error:
            pipe.send(error)
