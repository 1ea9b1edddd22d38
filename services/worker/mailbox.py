"""How do calls from outside enter the turn loop?

Handlers put commands in; the leader's turn takes them all, in order, and broadcasts them, so that every
rank applies the same list (`commands-ordered`). A handler may wait for what became of its command: the
answer is given by the leader when it applies it.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from baton.wire.baton.v1 import group_pb2
from baton.wire.errors import CommandTooLong, MailboxFull
from baton.wire.message_limits import TAKEN_BYTES_MAX

COMMANDS_MAX: Final = 16_384
"""Most commands that wait, for those who ask: far above what a worker's rooms and leases can produce. What
follows from something accepted (a cancel, a departed peer) may wait beside as many again."""

TURN_COMMANDS_MAX: Final = 64
TURN_OPENINGS_MAX: Final = 8
TURN_BYTES_MAX: Final = 64 << 10
"""What a turn takes, and broadcasts, of several commands; the rest waits for the next turn. To open a room
takes some hundred microseconds, and as much again for a prompt of thousands of tokens; anything else takes a
tenth of it. So no burst makes a turn long, and handlers have their share between its turns."""
OPENINGS: Final = frozenset({"run", "stream"})

FRAME_BYTES: Final = 8
"""What a command in a list takes beside itself, at most."""


Answer = Callable[[Exception | None], None]
"""Gives a command's answer to whoever asked; only the first counts."""


class News:
    """Something has come, or not yet. An event that is waited for within a bound: turns wait for it all the
    time, so that no task is cancelled and no exception raised where the time is over."""

    def __init__(self) -> None:
        self._there = False
        self._waiters: set[asyncio.Future[None]] = set()

    def is_set(self) -> bool:
        return self._there

    def set(self) -> None:
        self._there = True
        for waiter in self._waiters:
            _end_wait(waiter)

    def clear(self) -> None:
        self._there = False

    async def wait(self, bound_s: float) -> bool:
        """Whether something has come, at once or within `bound_s` seconds."""
        if self._there:
            return True
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.add(waiter)
        timer = loop.call_later(bound_s, _end_wait, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiters.discard(waiter)
        return self._there


class Mailbox:
    """Used from one event loop, by the leader."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[group_pb2.Command, asyncio.Future[None] | None]] = deque()
        self._asked: deque[asyncio.Future[None] | None] = deque()
        self.news = News()
        self._end: Exception | None = None

    @property
    def empty(self) -> bool:
        """No command waits to be taken."""
        return not self._waiting

    def put(self, command: group_pb2.Command) -> None:
        """Enter a command whose fate nobody waits for. Raises MailboxFull at twice COMMANDS_MAX."""
        self._append(command, None, 2 * COMMANDS_MAX)

    def enter(self, command: group_pb2.Command) -> asyncio.Future[None]:
        """Enter a command. Done when it was applied, with what applying it raised or the mailbox ended with.
        What is entered without a pause between enters one turn, as far as a turn carries it. Raises
        MailboxFull and CommandTooLong when it was not entered, and what the mailbox has ended with."""
        if self._end is not None:
            raise self._end
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._append(command, answer, COMMANDS_MAX)
        return answer

    async def ask(self, command: group_pb2.Command) -> None:
        """Enter a command and wait until it was applied, for as long as the caller does. That it waits for a
        turn of this very process says nothing about anybody (`live-is-not-lost`): turns that stand still are
        told of by the worker's health, and end by `fail`. Raises what applying it raised, MailboxFull and
        CommandTooLong when it was not entered, and what the mailbox ended with."""
        await self.enter(command)

    def wake(self) -> None:
        """Something other than a command wants a turn."""
        self.news.set()

    def take(self) -> bytes:
        """The waiting commands, oldest first and as many as a turn carries, serialised for the group. Their
        answers are awaited in the same order."""
        self.news.clear()
        if not self._waiting:
            return b""
        commands, length, openings = group_pb2.Commands(), 0, 0
        while self._waiting:
            command, answer = self._waiting[0]
            length += command.ByteSize() + FRAME_BYTES
            openings += command.WhichOneof("what") in OPENINGS
            taken = len(commands.commands)
            full = taken == TURN_COMMANDS_MAX or openings > TURN_OPENINGS_MAX or length > TURN_BYTES_MAX
            if taken and full:
                self.news.set()
                break
            commands.commands.append(command)
            self._asked.append(answer)
            self._waiting.popleft()
        return commands.SerializeToString()

    def answer(self, error: Exception | None) -> None:
        """The next taken command was applied, or could not be. Called once per command, in order."""
        if not self._asked:
            return  # a follower: nobody asked here
        _answer(self._asked.popleft(), error)

    def hold(self) -> Answer:
        """Instead of `answer`: the next taken command's answer is given later, by what is returned."""
        waiting = self._asked.popleft() if self._asked else None
        return lambda error: _answer(waiting, error)

    def fail(self, error: Exception) -> None:
        """No turn takes or applies anything any more: who waits for an answer, or asks for one from now on,
        gets this one."""
        self._end = error
        for answer in (*self._asked, *(answer for _, answer in self._waiting)):
            _answer(answer, error)
        self._asked.clear()
        self._waiting.clear()

    async def rest(self, bound_s: float) -> bool:
        """Wait for news, `bound_s` at most. True when there is some."""
        return await self.news.wait(bound_s)

    def _append(self, command: group_pb2.Command, answer: asyncio.Future[None] | None, limit: int) -> None:
        if len(self._waiting) >= limit:
            raise MailboxFull(f"{len(self._waiting)} commands wait for this worker's turn: try again later")
        if command.ByteSize() + FRAME_BYTES > TAKEN_BYTES_MAX:
            raise CommandTooLong(
                f"the {command.WhichOneof('what')} takes {command.ByteSize()} bytes, at most"
                f" {TAKEN_BYTES_MAX - FRAME_BYTES} are taken"
            )
        self._waiting.append((command, answer))
        self.news.set()


def _end_wait(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _answer(waiting: asyncio.Future[None] | None, error: Exception | None) -> None:
    if waiting is None or waiting.done():
        return
    if error is None:
        waiting.set_result(None)
    else:
        waiting.set_exception(error)
