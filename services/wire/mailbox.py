"""How do calls from outside enter the turn loop?

Handlers put commands in; the leader's turn takes them all, in order, and broadcasts them, so that every
rank applies the same list. A handler may wait for what became of its command: the answer is given by the
leader when it applies it.
"""

import asyncio
from collections import deque

from services.wire.baton.v1 import group_pb2

COMMANDS_MAX = 16_384
"""Far above what the bounded rooms and leases of a worker can produce; reaching it is refused loudly."""


class MailboxFull(Exception):
    """More commands are waiting than the worker can ever need."""


class Mailbox:
    """Used from one event loop, by the leader."""

    def __init__(self) -> None:
        self._waiting: list[group_pb2.Command] = []
        self._answers: list[asyncio.Future[None] | None] = []
        self._asked: deque[asyncio.Future[None] | None] = deque()
        self.news = asyncio.Event()

    def put(self, command: group_pb2.Command) -> None:
        """Enter a command whose fate nobody waits for."""
        self._enter(command, None)

    async def ask(self, command: group_pb2.Command, timeout_s: float) -> None:
        """Enter a command and wait until it was applied. Raises what applying it raised, TimeoutError
        when it was not applied in time."""
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._enter(command, answer)
        async with asyncio.timeout(timeout_s):
            await answer

    def wake(self) -> None:
        """Something other than a command wants a turn."""
        self.news.set()

    def take(self) -> bytes:
        """All waiting commands, serialised for the group. Their answers are awaited in the same order."""
        self.news.clear()
        if not self._waiting:
            return b""
        commands = group_pb2.Commands(commands=self._waiting)
        self._asked.extend(self._answers)
        self._waiting, self._answers = [], []
        return commands.SerializeToString()

    def answer(self, error: Exception | None) -> None:
        """The next taken command was applied, or could not be. Called once per command, in order."""
        if not self._asked:
            return  # a follower: nobody asked here
        waiting = self._asked.popleft()
        if waiting is None or waiting.done():
            return
        if error is None:
            waiting.set_result(None)
        else:
            waiting.set_exception(error)

    async def rest(self, bound_s: float) -> None:
        """Wait for news, `bound_s` at most."""
        try:
            async with asyncio.timeout(bound_s):
                await self.news.wait()
        except TimeoutError:
            return

    def _enter(self, command: group_pb2.Command, answer: asyncio.Future[None] | None) -> None:
        if len(self._waiting) >= COMMANDS_MAX:
            raise MailboxFull(f"{COMMANDS_MAX} commands are waiting")
        self._waiting.append(command)
        self._answers.append(answer)
        self.news.set()
