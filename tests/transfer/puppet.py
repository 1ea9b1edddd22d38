"""How does a test hold an endpoint in another process, and stop, cut or kill that process?

The child drives its endpoint all the time, unless told to pause, and answers one call at a time. Both
ends of the pipe are the test's own.
"""

import multiprocessing
import os
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from services.rooms.ids import Incarnation
from services.transfer.host_memory import HostMemory
from services.transfer.interface import Endpoint, Region

ANSWER_S = 60.0
"""How long a child may take before a test gives up on it."""
IDLE_S = 0.0005


class Puppet:
    """A process with one endpoint and one region, "kv"."""

    def __init__(
        self,
        incarnation: int,
        agent: str | None = None,
        length: int = 4096,
        environment: Mapping[str, str] = {},
    ) -> None:
        self.incarnation = Incarnation(incarnation)
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(
            target=_live, args=(theirs, self.incarnation, agent, length, dict(environment)), daemon=True
        )
        self._process.start()
        theirs.close()

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
    pipe: Connection, incarnation: Incarnation, agent: str | None, length: int, environment: dict[str, str]
) -> None:
    os.environ.update(environment)
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

    own = {
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
