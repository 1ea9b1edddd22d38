"""Mailbox of commands from handlers to the turn loop.

Handlers put commands in. The leader's turn takes them all, in order, and broadcasts them, so that every
rank applies the same list (`commands-ordered`). A handler may wait for the result of its command, which the
leader sets when it applies the command.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from baton.wire.baton.v1 import group_pb2
from baton.wire.errors import CommandTooLong, MailboxFull
from baton.wire.message_limits import TAKEN_BYTES_MAX

COMMANDS_MAX: Final = 16_384
"""Most waiting commands whose results are awaited. It is far above the number that a worker's rooms and
leases can produce. As many commands again may wait whose results are not awaited."""

TURN_COMMANDS_MAX: Final = 64
TURN_OPENINGS_MAX: Final = 8
TURN_BYTES_MAX: Final = 64 << 10
"""Most bytes of several commands that one turn takes and broadcasts. The rest waits for the next turn.

To open a room takes some hundred microseconds, and as much again for a prompt of thousands of tokens. Any
other command takes a tenth of that. So no burst makes a turn long, and handlers run between its turns.
"""
OPENINGS: Final = frozenset({"run", "stream"})

FRAME_BYTES: Final = 8
"""Most bytes that each command adds to a serialised list of commands, in addition to the command's own
bytes."""


Answer = Callable[[Exception | None], None]
"""Function that sets the result of a command: None if it succeeded, or the error. Only the first call has an
effect."""


class News:
    """Event for which a turn loop waits with a time limit. When time is up, the wait returns normally,
    without a cancelled task or an exception."""

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
        """Wait until the event is set, at most `bound_s` seconds. Return whether it is set."""
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
    """Queue of commands from gRPC handlers to the leader's turns. Used from one event loop."""

    def __init__(self) -> None:
        self.waiting: deque[tuple[group_pb2.Command, asyncio.Future[None] | None]] = deque()
        self.unanswered: deque[asyncio.Future[None] | None] = deque()
        self.news = News()
        self._end: Exception | None = None

    @property
    def empty(self) -> bool:
        """Whether no command waits for a turn."""
        return not self.waiting

    def put(self, command: group_pb2.Command) -> None:
        """Add a command whose result is not awaited. Raises MailboxFull at twice COMMANDS_MAX waiting
        commands."""
        self._append(command, None, 2 * COMMANDS_MAX)

    def enter(self, command: group_pb2.Command) -> asyncio.Future[None]:
        """Add a command. Return a future of its result: None, or the exception of applying it or of `fail`.

        Commands that are added without a pause enter the same turn, as far as a turn can carry them. Raises
        MailboxFull or CommandTooLong if the command was not added, and the exception of `fail`.
        """
        if self._end is not None:
            raise self._end
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._append(command, answer, COMMANDS_MAX)
        return answer

    async def submit(self, command: group_pb2.Command) -> None:
        """Add a command and wait until a turn has applied it, for as long as the caller waits.

        A wait for a turn of this process proves nothing about any peer (`live-is-not-lost`). The worker's
        health page shows turns that stand still, and `fail` ends all waits. Raises the exception of applying
        the command, and the errors of `enter`.
        """
        await self.enter(command)

    def wake(self) -> None:
        """Ask the turn loop to take a turn soon, although there is no new command."""
        self.news.set()

    def take(self) -> bytes:
        """Remove the oldest waiting commands, as many as one turn carries. Return them serialised, for the
        broadcast to all ranks.

        The results are expected in the same order (`answer`).
        """
        self.news.clear()
        if not self.waiting:
            return b""
        commands, length, openings = group_pb2.Commands(), 0, 0
        while self.waiting:
            command, answer = self.waiting[0]
            length += command.ByteSize() + FRAME_BYTES
            openings += command.WhichOneof("what") in OPENINGS
            taken = len(commands.commands)
            full = taken == TURN_COMMANDS_MAX or openings > TURN_OPENINGS_MAX or length > TURN_BYTES_MAX
            if taken and full:
                self.news.set()
                break
            commands.commands.append(command)
            self.unanswered.append(answer)
            self.waiting.popleft()
        return commands.SerializeToString()

    def answer(self, error: Exception | None) -> None:
        """Set the result of a command: of the oldest one that a turn has taken and that has no result yet.
        Called once for each command, in order."""
        if not self.unanswered:
            return  # a follower has no callers
        _answer(self.unanswered.popleft(), error)

    def hold(self) -> Answer:
        """Postpone the result of a command: of the oldest one that a turn has taken and that has no result
        yet. Return the function that sets the result later."""
        waiting = self.unanswered.popleft() if self.unanswered else None
        return lambda error: _answer(waiting, error)

    def fail(self, error: Exception) -> None:
        """Close the mailbox, because no turn will take a command any more. Present and later waits for
        results raise this exception."""
        self._end = error
        for answer in (*self.unanswered, *(answer for _, answer in self.waiting)):
            _answer(answer, error)
        self.unanswered.clear()
        self.waiting.clear()

    async def rest(self, bound_s: float) -> bool:
        """Wait for a command or a request for a turn (`wake`), at most `bound_s` seconds. Return whether one
        came."""
        return await self.news.wait(bound_s)

    def _append(self, command: group_pb2.Command, answer: asyncio.Future[None] | None, limit: int) -> None:
        if len(self.waiting) >= limit:
            raise MailboxFull(f"{len(self.waiting)} commands wait for this worker's turn: try again later")
        if command.ByteSize() + FRAME_BYTES > TAKEN_BYTES_MAX:
            raise CommandTooLong(
                f"the {command.WhichOneof('what')} takes {command.ByteSize()} bytes, at most"
                f" {TAKEN_BYTES_MAX - FRAME_BYTES} are taken"
            )
        self.waiting.append((command, answer))
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
