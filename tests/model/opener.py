"""The opener of a room: the product's own `OpenedRoom`, and the streams of both workers to it.

What a worker sends arrives at once, and in order. What it sends behind its last message is not read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from baton.handover.adopted_room import AdoptedRoom
from baton.handover.opened_room import OpenedRoom
from baton.handover.opener_messages import (
    Adopt,
    Break,
    Fail,
    Leave,
    MarkAnswered,
    Open,
    OpenerRequest,
    RoomOutcome,
    Stop,
    Stream,
    WorkerMessage,
)
from baton.handover.requests import StartTimer, StopTimer
from baton.ids import RoomId
from baton.rooms.errors import Cause
from baton.rooms.phases import Side
from baton.rooms.request import Request
from tests.model.laws import Broken, Law

SIDES: Final = (Side.PREFILL, Side.DECODE)
TOKENS: Final = 2
"""Tokens of each choice."""

Requests = tuple[OpenerRequest, ...]


@dataclass(frozen=True, slots=True)
class OpenerStanding:
    over: bool
    """Whether the room has an outcome."""
    settled: bool
    """Whether both streams have ended, too."""
    local: bool
    read: frozenset[int]
    """Sides whose streams are read."""


class Opener:
    def __init__(self, choices: int, *, is_adopted: bool = False) -> None:
        request = Request("request", (1,), TOKENS, further_seeds=(0,) * (choices - 1))
        workers = {side: side.value for side in SIDES}
        made = AdoptedRoom if is_adopted else OpenedRoom
        self.room: OpenedRoom = made(RoomId(1), request, workers, 1.0)
        self._read: set[Side] = set()

    def start(self) -> Requests:
        return self._does(self.room.start)

    def receive(self, side: int, *messages: WorkerMessage) -> Requests:
        done: Requests = ()
        for message in messages:
            if SIDES[side] in self._read:
                if isinstance(message, RoomOutcome):
                    self._read.discard(SIDES[side])
                done += self._does(self.room.receive, SIDES[side], message)
        return done

    def broken(self, side: int, how: Break) -> Requests:
        if SIDES[side] not in self._read:
            return ()
        self._read.discard(SIDES[side])
        return self._does(self.room.broken, SIDES[side], how, "")

    def end(self, cause: Cause) -> Requests:
        return self._does(self.room.end, cause)

    def give_up(self, cause: Cause) -> Requests:
        return self._does(self.room.give_up, cause)

    def end_choice(self, choice: int) -> Requests:
        return self._does(self.room.end_choice, choice)

    def _does(self, deed: Callable[..., object], *about: Any) -> Requests:
        """Return what the room requests, without what only its reader, operators and timers get."""
        was_over, done = self.room.is_over, list[OpenerRequest]()
        deed(*about)
        while requests := self.room.take_requests():
            for each in requests:
                if isinstance(each, Open | Adopt):
                    self._read.add(each.side)
                    self.room.opened(each.side)
                elif isinstance(each, Leave):
                    self._read.discard(each.side)
            done += requests
        ends = [each for each in done if isinstance(each, MarkAnswered | Stop | Fail)]
        if len(ends) + was_over > 1:
            raise Broken(Law.FIRST_CAUSE_WINS, f"a room has ended, and ends again: {ends}")
        return tuple(each for each in done if not isinstance(each, Stream | StartTimer | StopTimer | tuple))

    def standing(self) -> OpenerStanding:
        read = frozenset(SIDES.index(side) for side in self._read)
        return OpenerStanding(self.room.is_over, self.room.is_settled, self.room.is_local, read)


def check_opener(before: OpenerStanding, after: OpenerStanding, did: tuple[Any, ...]) -> None:
    if before.over and not after.over:
        raise Broken(Law.TERMINAL_ABSORBS, f"a room goes on behind its end by a {did[0]}")
