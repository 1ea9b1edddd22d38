"""Grammar states of rooms whose grammar this rank compiles.

A grammar is compiled in parallel with the turns (`no-blocking`), from when its room is opened. Meanwhile
this rank's vote keeps the room from advancing, within the room's deadline. Grammar states are not handed over
between workers. Each choice of a room has its own, which follows from the grammar and the output so far
(`mask-is-fold`).
"""

import asyncio
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from baton.engine_interface import Grammars, Sequence
from baton.grammars.grammar_compiler import GrammarRefused
from baton.grammars.grammar_state import GrammarLost, GrammarState
from baton.ids import RoomId
from baton.rooms.errors import Cause, Reason
from baton.rooms.evidence import Compiled, Failed
from baton.rooms.request import Request
from baton.rooms.room import Room
from baton.runtime.logging import Log

log = Log(__name__)

NOT_HERE: Final = (
    "the grammar that intake took is not compiled here",
    "the output that the room goes on behind is not its grammar's",
)
"""Texts of the two causes of a grammar failure: the grammar does not compile, or the earlier output does not
follow it. The exception itself is only logged, because its text may contain the grammar."""


@dataclass(frozen=True, slots=True)
class _WaitingRoom:
    room: Room
    sequences: abc.Sequence[Sequence]
    folds: "asyncio.Future[list[GrammarState]]"


class GrammarStates:
    """Compilations of grammars that are running, one for each room that waits for its grammar. Used from one
    event loop."""

    def __init__(self, shelf: Grammars | None, wake: Callable[[], None]) -> None:
        """Start without waiting rooms.

        `shelf`: compiler of grammars, or None on a rank that does not sample. `wake`: called when a grammar
        is compiled.
        """
        self._shelf = shelf
        self._wake = wake
        self._waiting: dict[RoomId, _WaitingRoom] = {}

    def __len__(self) -> int:
        """Return the number of rooms that wait for their grammar."""
        return len(self._waiting)

    def needs(self, request: Request) -> bool:
        """Return whether a room with this request has to wait on this rank until its grammar is compiled."""
        return self._shelf is not None and request.grammar is not None

    def begin(self, room: Room, *sequences: Sequence) -> None:
        """Start to compile the grammar of a room, if its request has one and this rank compiles grammars.

        `sequences`: sequences of the room's choices. Each gets a grammar state that has read the earlier
        output.
        """
        grammar = sequences[0].request.grammar
        if self._shelf is None or grammar is None:
            return
        output = tuple(sequences[0].output)
        folds = asyncio.wrap_future(self._shelf.folds(grammar, output, len(sequences)))
        folds.add_done_callback(lambda _: self._wake())
        self._waiting[room.id] = _WaitingRoom(room, sequences, folds)

    def observe(self) -> bool:
        """Give each finished grammar state to the sequences of its room. Return whether some room got its
        states, or failed."""
        if not self._waiting:
            return False
        done = [each for each in self._waiting.values() if each.folds.done()]
        for each in done:
            del self._waiting[each.room.id]
            error = each.folds.exception()
            if error is None:
                for sequence, fold in zip(each.sequences, each.folds.result(), strict=True):
                    sequence.fold = fold
                each.room.note(Compiled())
                continue
            if not isinstance(error, GrammarRefused | GrammarLost):
                log.error("a grammar was not compiled", room=each.room.id, error=error)
            text = f"{each.room.SIDE.value}: {NOT_HERE[isinstance(error, GrammarLost)]}"
            each.room.note(Failed(Cause(Reason.GRAMMAR_FAILED, text)))
        return bool(done)

    def forget(self, room: RoomId) -> None:
        """Drop a room that is over, and cancel the compilation of its grammar."""
        waiting = self._waiting.pop(room, None)
        if waiting is not None:
            waiting.folds.cancel()
