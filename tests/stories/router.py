"""The router of whole stories: the product's `Registry` and one `OpenedRoom` for each room.

What these request is carried out as `RoomController` and `RoomStream` do: messages go to the workers, tokens
and errors to the client.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from baton.fleet.need import Need
from baton.fleet.registry import Registry
from baton.fleet.retry import RetryBounds, avoided_sides, may_retry
from baton.handover.opened_room import OpenedRoom
from baton.handover.opener_messages import (
    ANSWERED,
    Break,
    EndChoice,
    Fail,
    FailReader,
    FailRest,
    Leave,
    MarkAnswered,
    MarkLocal,
    MarkRetired,
    Open,
    OpenerRequest,
    RoomOutcome,
    RoomTimer,
    Stop,
    WorkerMessage,
)
from baton.handover.requests import StartTimer, StopTimer
from baton.ids import Incarnation, RoomId
from baton.rooms.errors import Cause, Reason
from baton.rooms.phases import Side
from baton.rooms.request import Request, TokenBatch
from baton.rooms.worker_facts import StackFacts, WorkerFacts

FIRST_ROOM: Final = 7
LIMIT_S: Final = 60.0
MODEL: Final = "model"

Post = Callable[[str, str, tuple[Any, ...]], None]
"""Sends a message: from a party, to a party, a verb with its arguments."""


class Router:
    def __init__(self, post: Post, trace: Callable[[str], None]) -> None:
        """Make a router without workers. `post`: sends a message to a worker. `trace`: prints a line."""
        self.registry = Registry(MODEL, FIRST_ROOM, 1, 100, 100)
        self.rooms: dict[RoomId, OpenedRoom] = {}
        self.timers: set[tuple[RoomId, RoomTimer]] = set()
        """Timers that run, with their rooms."""
        self._post = post
        self._trace = trace
        self._live: dict[Side, WorkerFacts] = {}
        self._reading: set[tuple[RoomId, Side]] = set()
        """Streams of workers about rooms that are read."""
        self._given: dict[RoomId, list[int]] = {}
        """Tokens that the client got, by room."""

    # ---- workers

    def join(self, side: Side, incarnation: Incarnation, rooms: int) -> None:
        """Register a ready worker. `rooms`: most rooms that it has."""
        facts = WorkerFacts(
            side.value, side, incarnation, side.value, MODEL, StackFacts(), 1000, rooms, computes=True
        )
        self.registry.register(facts, 0)
        self.registry.mark_proven(incarnation)
        self._live[side] = facts
        for entry in self.registry.ends_to_resend(facts):
            self._post("router", side.value, ("cancel", entry.id, entry.cause or ANSWERED))

    def lose(self, side: Side, proof: str) -> None:
        """Process the end of a worker's process: its streams break, and its rooms end."""
        facts = self._live.pop(side)
        for room, opened in self.rooms.items():
            if (room, side) in self._reading:
                self._reading.discard((room, side))
                opened.broken(side, Break.LOST, "connection closed")
                self._carry_out(room)
        for entry in self.registry.leave(facts.incarnation, proof, 0):
            self.fail(entry.id, facts.loss("its process has exited"))

    def drain(self, side: Side) -> None:
        self.registry.drain(self._live[side].incarnation)

    # ---- rooms

    def open(self, request: Request, avoid: frozenset[Side] = frozenset()) -> None:
        """Open a room for a request on the workers that are ready."""
        need = Need(request.prefill_tokens, request.tokens_max, may_be_local=True)
        pair = self.registry.place(need, [self._live[side].incarnation for side in avoid & self._live.keys()])
        entry = self.registry.open_room(request.request_id, pair, need, 0)
        workers = {side: entry.worker(side).name for side in entry.sides}
        self.rooms[entry.id] = OpenedRoom(entry.id, request, workers, LIMIT_S)
        self._given[entry.id] = []
        self._trace(f"router: room {entry.id} on {' and '.join(sorted(workers.values(), reverse=True))}")
        self.rooms[entry.id].start()
        self._carry_out(entry.id)

    def retry(self, room: RoomId) -> None:
        """Continue the request of a failed room in another room, behind the tokens that its client got."""
        opened, cause = self.rooms[room], self.registry.get(room).cause
        if cause is None or not may_retry(cause.reason, 1, LIMIT_S, RetryBounds()):
            self._trace("router: no other room follows")
            return
        request = replace(opened.request, output=(*opened.request.output, *self._given[room]))
        self.open(request, avoided_sides(cause.reason, opened.reporter))

    def fail(self, room: RoomId, cause: Cause) -> None:
        """End a room for a cause of the router's own, if it has not ended."""
        if self.registry.end(room, cause, 0):
            self._send_end(room, cause)
            self.rooms[room].end(cause)
            self._carry_out(room)

    def hang_up(self, room: RoomId) -> None:
        self.rooms[room].give_up(Cause(Reason.CLIENT_GONE, "the client hung up"))
        self._carry_out(room)

    def end_choice(self, room: RoomId, choice: int) -> None:
        self.rooms[room].end_choice(choice)
        self._carry_out(room)

    def passed(self, room: RoomId, timer: RoomTimer) -> None:
        self.timers.discard((room, timer))
        self.rooms[room].passed(timer)
        self._carry_out(room)

    def receive(self, side: Side, room: RoomId, message: WorkerMessage | Break | str) -> None:
        """Process a worker's message about a room: one for its opener, the way in which it refused the room,
        or that it has retired the room."""
        if message == "retired":
            self.registry.side_retired(room, side)
        elif (room, side) not in self._reading:
            self._trace("    nobody reads it")
        elif isinstance(message, Break):
            self._reading.discard((room, side))
            self.rooms[room].broken(side, message, "it takes no rooms")
        elif not isinstance(message, str):
            if isinstance(message, RoomOutcome):
                self._reading.discard((room, side))
            continued = self.rooms[room].receive(side, message)
            if continued is not None:
                self._give(room, continued)
        self._carry_out(room)

    # ---- requests of a room

    def _carry_out(self, room: RoomId) -> None:
        while requests := self.rooms[room].take_requests():
            for request in requests:
                self._do(room, request)

    def _do(self, room: RoomId, request: OpenerRequest) -> None:
        match request:
            case Open(side):
                self._open_on(room, side)
            case Leave(side, cause):
                self._reading.discard((room, side))
                self._post("router", side.value, ("cancel", room, cause))
            case EndChoice(choice):
                self._post("router", "decode", ("end choice", room, choice))
            case FailReader(cause):
                self._trace(f"client of {room} < {cause.reason.value}: {cause.text}")
            case TokenBatch():
                self._give(room, request)
            case StartTimer(timer):
                self.timers.add((room, timer))
            case StopTimer(timer):
                self.timers.discard((room, timer))
            case _:
                self._record(room, request)

    def _record(self, room: RoomId, request: OpenerRequest) -> None:
        """Record in the registry what a room's opener requests. Other requests are for operators."""
        match request:
            case MarkLocal():
                self.registry.mark_local(room)
                self._trace(f"router: room {room} is local")
            case MarkRetired(side):
                self.registry.side_retired(room, side)
            case MarkAnswered():
                self.registry.end(room, None, 0)
            case Stop():
                self.registry.end(room, None, 0)
                self._send_end(room, ANSWERED)
            case Fail(cause):
                self.registry.end(room, cause, 0)
                self._send_end(room, cause)
            case FailRest(cause):
                self._send_end(room, cause)

    def _open_on(self, room: RoomId, side: Side) -> None:
        entry, opened = self.registry.get(room), self.rooms[room]
        peer = None
        if entry.prefill is not None:
            peer = (entry.decode if side is Side.PREFILL else entry.prefill).incarnation
        self._post("router", side.value, ("open", room, opened.request, peer))
        self._reading.add((room, side))
        self.registry.mark_delivered(room, [side])
        opened.opened(side)

    def _give(self, room: RoomId, batch: TokenBatch) -> None:
        tokens = [token.id for token in batch.tokens]
        self._given[room] += tokens
        choice = f" of choice {batch.choice}" if self.rooms[room].request.choices > 1 else ""
        end = "" if batch.finish is None else f", {batch.finish.value}"
        self._trace(f"client of {room} < {' '.join(map(str, tokens))}{choice}{end}")

    def _send_end(self, room: RoomId, cause: Cause) -> None:
        """Send the end of a room to each worker that may still have it."""
        for side in self.registry.sides_to_end(self.registry.get(room)):
            self._post("router", side.value, ("cancel", room, cause))
