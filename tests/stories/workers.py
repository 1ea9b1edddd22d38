"""The two workers of whole stories, of one rank each: the product's sides, turns and sessions.

A worker carries out what these request: messages, writes, steps. Token ids tell positions: the token at
position 0 of an output is 10.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

from baton.handover.early_grants import EarlyGrants
from baton.handover.opener_messages import Accepted, Break, FirstToken, RoomOutcome, TokenMessage
from baton.handover.receiving_session import ReceivingSession
from baton.handover.requests import (
    BeginWrites,
    ClaimRoom,
    Close,
    Connect,
    Forget,
    Grant,
    Join,
    Outcome,
    Retired,
    SendPages,
    SendRecord,
    SendSeal,
    StartTimer,
    StopTimer,
)
from baton.handover.route import Route
from baton.handover.sender_problem import ProblemKind, SenderProblem
from baton.handover.sending_session import (
    AnswerClose,
    AnswerGrant,
    ApplyClose,
    ApplyGrant,
    AwaitQuiet,
    SendingSession,
)
from baton.handover.session_messages import (
    CancelRoom,
    CloseAnswer,
    ConnectAnswer,
    ConnectionFailed,
    ConnectionMade,
    GrantAnswer,
    SenderQuiet,
    Timer,
    TimerKind,
    Unneeded,
)
from baton.handover.turn import Lap, Turn
from baton.ids import NO_PEER, Generation, Incarnation, RoomId
from baton.pages.errors import Truncated
from baton.rooms.errors import Cause, NotConnected, PeerFault, Refusal
from baton.rooms.evidence import Connected, Granted
from baton.rooms.request import Request, Token, TokenBatch
from tests.layouts import group_of
from tests.stories.stage import LAYOUT, DecodeStage, PrefillStage

CONNECT_TIMEOUT_S: Final = 0.05
"""Time for which a sender may refuse to connect: one pause."""
EARLY_MAX: Final = 2
PAGE_TOKENS: Final = group_of(LAYOUT).page_tokens


class World(Protocol):
    """What a worker needs of the world around it."""

    now_ms: int

    def post(self, sender: str, to: str, message: tuple[Any, ...]) -> None: ...
    def trace(self, line: str) -> None: ...
    def is_held(self, what: str) -> bool: ...
    def write(self, room: RoomId, kind: str, pages: int = 0) -> None: ...


def token_at(position: int) -> Token:
    return Token(10 + position)


class Worker(ABC):
    NAME: ClassVar[str]

    def __init__(self, world: World, incarnation: Incarnation, side: Any) -> None:
        self.incarnation = incarnation
        self.side = side
        self.timers: dict[tuple[TimerKind, RoomId], Incarnation] = {}
        """Timers that run, with the peer of their session."""
        self.has_left = False
        self._world = world
        self._turns = 0

    def receive(self, verb: str, *about: Any) -> None:
        getattr(self, f"on_{verb.replace(' ', '_')}")(*about)
        self.carry_out()

    def turn(self) -> bool:
        """Take one turn, with a step. Return whether anything happened."""
        self._observe()
        self.carry_out()
        turn: Turn[Any] = Turn(
            self._turns,
            self.side.roster,
            self._world.now_ms,
            self.side.capacity(),
            ranks=1,
            may_leave=self.side.may_leave(),
            connects=self._connects(),
        )
        self._turns += 1
        turn.agree(turn.ballot.encode())
        acted = self._on_agreement(turn.verdict.connects)
        self.carry_out()
        moves = turn.settle()
        for room, effect in moves:
            self._world.trace(f"{self.NAME}: room {room.id} {effect.value}, {room.phase.value} now")
            self.side.perform(room, effect, self._world.now_ms)
            self.carry_out()
        acted |= turn.computes and not self._world.is_held(f"steps of {self.NAME}") and self._step()
        self.carry_out()
        if turn.end(found=False, more=acted) is Lap.LAST:
            self.has_left = True
            self._world.trace(f"{self.NAME}: leaves")
        return acted or bool(moves)

    # ---- messages of the router

    def on_open(self, room: RoomId, request: Request, peer: Incarnation | None) -> None:
        if self.side.draining:
            self._tell(room, Break.DRAINING)
            return
        try:
            self.side.open(room, request, peer or NO_PEER, self._world.now_ms, peer_name=self._peer_name)
        except Refusal:
            self._tell(room, Break.REFUSED)
        else:
            self._tell(room, Accepted())
            self._opened(room)

    def on_cancel(self, room: RoomId, cause: Cause) -> None:
        self.side.cancel(room, cause, self._world.now_ms)

    def on_depart(self, peer: Incarnation) -> None:
        self.side.depart(peer)

    def on_drain(self) -> None:
        self.side.drain()

    def _tell(self, room: RoomId, message: Any) -> None:
        self._world.post(self.NAME, "router", (room, message))

    def _send(self, *message: Any) -> None:
        """Send a message to the peer, over the present stream."""
        self._world.post(self.NAME, self._peer_name, message)

    @property
    def _peer_name(self) -> str:
        return "decode" if self.NAME == "prefill" else "prefill"

    # ---- requests of the side

    def carry_out(self) -> None:
        """Carry out all requests, until none is left."""
        while requests := self.side.take_requests():
            for request in requests:
                match request:
                    case Outcome(room, cause):
                        self._tell(room, RoomOutcome(cause))
                    case Retired(room):
                        self._retired(room)
                        self._tell(room, "retired")
                    case _:
                        self._do(request)

    def _connects(self) -> int:
        return 0

    @abstractmethod
    def _opened(self, room: RoomId) -> None:
        """Act on a room that was opened here."""

    @abstractmethod
    def _retired(self, room: RoomId) -> None:
        """Act on a room that is over here."""

    @abstractmethod
    def fire(self, timer: Timer) -> None:
        """Continue after the time of a timer is over."""

    @abstractmethod
    def stream_ended(self) -> None:
        """Process the end of the stream to the present process of the peer."""

    @abstractmethod
    def _observe(self) -> None: ...
    @abstractmethod
    def _on_agreement(self, connects: int) -> bool: ...
    @abstractmethod
    def _step(self) -> bool: ...
    @abstractmethod
    def _do(self, request: Any) -> None: ...


class DecodeWorker(Worker):
    NAME = "decode"

    def __init__(
        self, world: World, incarnation: Incarnation, pages: int, slots: int, *, prefixes: str
    ) -> None:
        self.stage = DecodeStage(1, pages, slots, prefixes=prefixes)
        super().__init__(world, incarnation, self.stage.ranks[0])
        self.links: dict[Incarnation, ReceivingSession] = {}

    # ---- messages of prefill

    def on_connected(self, peer: Incarnation, exposure: Incarnation, error: Exception | None) -> None:
        self._answered(peer, ConnectAnswer(exposure, _problem(error)))

    def on_granted(self, peer: Incarnation, room: RoomId, error: Exception | None) -> None:
        self._answered(peer, GrantAnswer(room, _problem(error)))

    def on_closed(
        self, peer: Incarnation, room: RoomId, generation: Generation, error: Exception | None
    ) -> None:
        self._answered(peer, CloseAnswer(room, generation, _problem(error)))

    def _answered(self, peer: Incarnation, answer: Any) -> None:
        if peer in self.links:
            self.links[peer].receive([answer], CONNECT_TIMEOUT_S)

    def on_end_choice(self, room: RoomId, choice: int) -> None:
        self.side.cut(room, choice)

    def claim(self, room: RoomId) -> None:
        """Decide that this worker computes the room's prompt itself."""
        self.side.compute_here(room, PAGE_TOKENS, PAGE_TOKENS, "it is done sooner here")
        self.carry_out()

    def revoke(self) -> None:
        """Take all exposed memory back from all senders."""
        self.stage.revoke(agreed_only=False)
        for link in self.links.values():
            link.exposed_anew(self.stage.exposure)
        self.carry_out()

    def stream_ended(self) -> None:
        for link in list(self.links.values()):
            link.stream_ended(SenderProblem(ProblemKind.LOST, "connection closed"))
        self.carry_out()

    def fire(self, timer: Timer) -> None:
        peer = self.timers.pop((timer.kind, timer.room))
        self.links[peer].fire(timer)
        self.carry_out()

    # ---- a turn

    def _observe(self) -> None:
        for room in self.side.touched():
            self.side.poll(room)

    def _on_agreement(self, connects: int) -> bool:
        self.side.agreed()
        return bool(connects)

    def _step(self) -> bool:
        computable = [room for room in self.side.roster if room.computable]
        for room in computable:
            first = token_at(len(room.request.output))
            self.side.computed(room, room.request.prefill_tokens, first)
        rows = [
            (room, choice, len(room.request.prompt) + len(room.outputs[choice]))
            for room in self.side.roster
            if room.runs
            for choice in sorted(room.ends.going_on)
        ]
        space = self.side.space_for(rows)
        for at in space.computed:
            room, choice, _ = rows[at]
            if choice in room.ends.going_on:
                room.outputs[choice].append(token_at(len(room.outputs[choice])).id)
                self._drawn(room, choice)
        return bool(computable or rows)

    def _drawn(self, room: Any, choice: int) -> None:
        position = len(room.outputs[choice]) - 1
        finish = self.side.drawn(room, choice)
        self._tell(
            room.id,
            TokenMessage(
                TokenBatch((Token(room.outputs[choice][-1]),), finish, choice),
                position,
                room.cached,
                room.local,
            ),
        )

    # ---- requests

    def carry_out(self) -> None:
        super().carry_out()
        for peer in list(self.links):
            self._carry_out_of(peer)

    def _do(self, request: Any) -> None:
        match request:
            case Connect(room, peer):
                if self._link(peer).connect(room):
                    self.side.note(room, Connected())
            case Grant(room, peer) | ClaimRoom(room, peer):
                if isinstance(request, Grant):
                    self.stage.carry_out(0, request)
                self._link(peer).grant(request)
            case Close(room, peer, generation, doubtful):
                self._link(peer).close(room, generation)
                if doubtful:
                    self._link(peer).doubt()
            case Join(room):
                self._drawn(self.side.roster.get(room), 0)
            case Forget(peer):
                self.links.pop(peer, None)
                self.timers = {key: of for key, of in self.timers.items() if of != peer}
            case _:
                pass  # for operators

    def _opened(self, room: RoomId) -> None:
        pass

    def _retired(self, room: RoomId) -> None:
        for link in self.links.values():
            link.over(room)

    def _link(self, peer: Incarnation) -> ReceivingSession:
        return self.links.setdefault(peer, ReceivingSession("prefill", self.stage.exposure))

    def _carry_out_of(self, peer: Incarnation) -> None:
        """Carry out the requests of a session, and send its messages."""
        link = self.links[peer]
        while requests := link.take_requests():
            for request in requests:
                self._do_of(peer, request)
            super().carry_out()
        if link.take_connect():
            self._send("connect", peer, self.incarnation, self.stage.exposure)
        while (message := link.take_grant()) is not None:
            self._send("claim" if isinstance(message, ClaimRoom) else "grant", peer, message)
        for room, generation in link.take_closes():
            self._send("close", peer, room, generation)

    def _do_of(self, peer: Incarnation, request: Any) -> None:
        match request:
            case ConnectionMade(True):
                self.side.connected(peer)
            case ConnectionFailed(problem):
                self._world.trace(f"decode: cannot connect: {problem.text}")
            case CancelRoom(room, cause):
                self._world.trace(f"decode: cancels room {room}, {cause.reason.value}")
                self.side.cancel(room, cause, self._world.now_ms)
            case SenderQuiet(room, generation):
                self.side.quiet(room, generation)
            case StartTimer(timer):
                self.timers[timer.kind, timer.room] = peer
            case StopTimer(timer):
                self.timers.pop((timer.kind, timer.room), None)
            case Unneeded():
                self.links.pop(peer, None)
            case _:
                pass


@dataclass(slots=True)
class RoomWrites:
    """Writes of one room to its receiver."""

    under_way: int = 0
    is_recorded: bool = False
    is_sealed: bool = False
    failure: str | None = None
    moved: bool = False

    @property
    def written(self) -> bool:
        return self.is_recorded and not self.under_way

    @property
    def sealed(self) -> bool:
        return self.is_sealed and not self.under_way


class PrefillWorker(Worker):
    NAME = "prefill"

    def __init__(
        self, world: World, incarnation: Incarnation, pages: int, slots: int, *, prefixes: str
    ) -> None:
        super().__init__(world, incarnation, PrefillStage(1, pages, slots, prefixes=prefixes).ranks[0])
        self.is_reachable = True
        """Whether the receiver's memory can be reached."""
        self.exposure: Incarnation | None = None
        """Exposure to which this worker is connected, or None."""
        self.writes: dict[RoomId, RoomWrites] = {}
        self._early: EarlyGrants[Grant | ClaimRoom] = EarlyGrants(EARLY_MAX)
        self.session: SendingSession[Grant | ClaimRoom] = SendingSession(self._early, self)
        self._connecting: list[Incarnation] = []
        self._awaited: list[tuple[RoomId, Generation]] = []

    # ---- messages of decode

    def on_connect(self, receiver: Incarnation, exposure: Incarnation) -> None:
        self.session.receiver = receiver
        problem = None if self.is_reachable else NotConnected("its memory cannot be reached")
        if problem is None:
            self.exposure = exposure
        self.side.revoke(receiver, exposure)
        self.side.connection(problem)
        self._connecting.append(exposure)

    def on_grant(self, message: Grant | ClaimRoom) -> None:
        self.session.grant(message.room, message)

    on_claim = on_grant

    def on_close(self, room: RoomId, generation: Generation) -> None:
        self.session.close(room, generation)

    def room_opened(self, room: RoomId) -> None:
        self.session.room_opened(room)

    def stream_ended(self) -> None:
        self.session.end()
        self.carry_out()
        receiver, self.session = self.session.receiver, SendingSession(self._early, self)
        self.session.receiver = receiver
        self._awaited.clear()
        self.timers.clear()

    def fire(self, timer: Timer) -> None:
        self.timers.pop((timer.kind, timer.room))
        self.session.fire(timer)
        self.carry_out()

    def landed(self, room: RoomId, failure: str | None = None) -> None:
        """Note that a write has landed or failed."""
        writes = self.writes[room]
        writes.under_way -= 1
        writes.moved, writes.failure = True, writes.failure or failure

    # ---- a turn

    def _observe(self) -> None:
        for room in self.side.sent():
            writes = self.writes[room.id]
            moved, writes.moved = writes.moved, False
            self.side.observe(room, writes, self._world.now_ms, moved=moved)
        for room in self.side.unproven():
            if room.id not in self.writes or not self.writes[room.id].under_way:
                self.side.ended(room)

    def _connects(self) -> int:
        connects: int = self.side.connects()
        return connects

    def _on_agreement(self, connects: int) -> bool:
        answers = self.side.agreed(connects)
        for exposure, problem in zip(self._connecting, answers, strict=True):
            self._send("connected", self.incarnation, exposure, problem)
        self._connecting.clear()
        return bool(answers)

    def _step(self) -> bool:
        computable = [room for room in self.side.roster if room.computable]
        for room in computable:
            request = room.request
            first = token_at(len(request.output))
            if self.side.computed(room, request.prefill_tokens, first, self._world.now_ms):
                finish = request.finish_reason([*request.output, first.id])
                self._tell(room.id, FirstToken(first, finish, room.cached))
        return bool(computable)

    # ---- requests

    def _opened(self, room: RoomId) -> None:
        self._early.apply(room)

    def _retired(self, room: RoomId) -> None:
        pass

    def carry_out(self) -> None:
        super().carry_out()
        for room, generation in [each for each in self._awaited if each[0] not in self.side.roster]:
            self._awaited.remove((room, generation))
            self.session.quiet(room, generation)
        while requests := self.session.take_requests():
            for request in requests:
                self._do_of(request)
            super().carry_out()

    def _do(self, request: Any) -> None:
        match request:
            case BeginWrites(room):
                self.writes[room] = RoomWrites()
            case SendPages(room, tokens, complete):
                held = self.side.roster.get(room)
                prefix = held.grant.prefix_tokens // PAGE_TOKENS
                pages = (-(-tokens // PAGE_TOKENS) if complete else tokens // PAGE_TOKENS) - prefix
                if pages > 0:
                    self._write(room, "pages", pages)
            case SendRecord(room, record):
                self._write(room, "record", sum(record.pages))
                self.writes[room].is_recorded = True
            case SendSeal(room):
                self._write(room, "seal")
                self.writes[room].is_sealed = True
            case Forget():
                self.exposure = None
            case _:
                pass  # for operators

    def _write(self, room: RoomId, kind: str, pages: int = 0) -> None:
        self.writes[room].under_way += 1
        self._world.write(room, kind, pages)

    def _do_of(self, request: Any) -> None:
        me = self.incarnation
        match request:
            case ApplyGrant(room, message):
                error, roster = self._apply(message), self.side.roster
                is_open, is_retired = room in roster, roster.retired(room)
                self.session.grant_applied(room, message, error, is_open=is_open, is_retired=is_retired)
            case ApplyClose(room, generation):
                error = None
                try:
                    self.side.close(room, self.session.receiver, generation, self._world.now_ms)
                except PeerFault as fault:
                    error = fault
                self.session.close_applied(room, generation, error)
                self.carry_out()
            case AwaitQuiet(room, generation):
                self._awaited.append((room, generation))
            case AnswerGrant(room, error):
                self._send("granted", me, room, error)
            case AnswerClose(room, generation, error):
                self._send("closed", me, room, generation, error)
            case StartTimer(timer):
                self.timers[timer.kind, timer.room] = me
            case StopTimer(timer):
                self.timers.pop((timer.kind, timer.room), None)
            case _:
                raise AssertionError(f"nothing here does {request}")

    def _apply(self, message: Grant | ClaimRoom) -> Exception | None:
        room, receiver = message.room, self.session.receiver
        try:
            if isinstance(message, ClaimRoom):
                self.side.claimed(room, receiver)
                return None
            route: Route | NotConnected = NotConnected("connect first")
            if self.exposure == message.exposure:
                route = Route(message.exposure, LAYOUT.page_tokens, ())
            grant = Granted(message.generation, message.pages, message.slot, message.prefix_tokens)
            self.side.grant(room, receiver, grant, route)
        except (Refusal, PeerFault, Truncated) as error:
            return error
        return None


def _problem(error: Exception | None) -> SenderProblem | None:
    """Return a refusal of prefill in the terms of decode's session."""
    if error is None:
        return None
    kind = ProblemKind.NOT_CONNECTED if isinstance(error, NotConnected) else ProblemKind.REFUSED
    return SenderProblem(kind, str(error))
