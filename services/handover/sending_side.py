"""What does one rank of a prefill worker do in a hand-over?

It takes memory to compute a prompt into, says what may be written to the receiver and when, and holds its own
pages until nothing reads them any more. Commands, evidence and time come in; requests to the world go out
(`baton.handover.requests`). Pure: the workers, the model checker, the simulation and the stories drive
this very class.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import lcm
from operator import gt
from typing import Final, Protocol, TypeVar, assert_never

from baton.handover.handover_side import HandOverSide
from baton.handover.requests import (
    BeginWrites,
    Forget,
    Outcome,
    SenderRequest,
    SendPages,
    SendRecord,
    SendSeal,
    SideRequest,
)
from baton.handover.route import Route
from baton.ids import Generation, Incarnation, PageTables, RoomId
from baton.pages.errors import Truncated, added
from baton.pages.holdings import Holdings
from baton.pages.layout import KvLayout
from baton.pages.record import ALTERNATIVES_MAX, MetadataRecord
from baton.rooms.deadlines import Deadlines
from baton.rooms.errors import Cause, NotConnected, PeerFault, Reason, Refusal, UnknownRoom
from baton.rooms.evidence import Evidence, Failed, Fenced, Finished, Granted, Proof, Sealed, Written
from baton.rooms.phases import GATED, Effect, Phase, SenderEffect
from baton.rooms.plurals import counted
from baton.rooms.request import Request, Token
from baton.rooms.sender import Sender
from baton.rooms.timeline import Moment
from baton.rooms.worker_load import WorkerLoad

CLAIMED: Final = Cause(Reason.LOCAL, "the decode worker computes the prompt itself")
GIVEN_UP: Final = Cause(Reason.RECEIVER_CLOSED, "the decode worker gave the room up")


class Writes(Protocol):
    """How far the room's writes have come."""

    @property
    def failure(self) -> str | None: ...
    @property
    def written(self) -> bool:
        """All pages and records of this rank were ready, and their writes are DONE."""

    @property
    def sealed(self) -> bool:
        """The seals' writes are DONE."""


@dataclass(slots=True, eq=False)
class SendingRoom(Sender):
    """What a prefill rank keeps of a room. A shell's record adds its own to it."""

    request: Request = field(kw_only=True)
    peer_name: str = field(default="", kw_only=True)
    route: Route | None = field(default=None, init=False)
    """Where its grant leads."""
    pages: PageTables = field(default=(), init=False)
    """By group, in the order of its tokens, once it has some."""
    begun: bool = field(default=False, init=False)
    """It has its pages, and may be written."""
    computed: int = field(default=0, init=False)
    """Leading tokens whose KV is in the pages."""
    cached: int = field(default=0, init=False)
    """Leading tokens whose KV was in the pages when they were taken."""
    first: Token | None = field(default=None, init=False)
    likely_cached: int | None = field(default=None, init=False)
    """Leading tokens whose KV was held here when this was asked, before it had its pages."""

    @property
    def complete(self) -> bool:
        """All that is known was computed."""
        return self.computed == self.request.prefill_tokens

    @property
    def urgency(self) -> tuple[int, int, RoomId]:
        return self.request.priority, self.request.arrived_ms, self.id

    @property
    def reusable(self) -> tuple[int, ...]:
        """Its first tokens, to be begun behind where their KV is there already. The last token is computed in
        any case: what follows it is drawn from that. Of a prompt that is scored all are
        (`scored-is-computed`)."""
        return self.request.tokens[:-1] if self.request.prompt_logprobs is None else ()

    @property
    def succeeded(self) -> bool:
        """Whatever happens now, it is handed over."""
        return self.phase is Phase.SUCCESS

    @property
    def computable(self) -> bool:
        return self.phase is Phase.TRANSFERRING and not self.complete

    @property
    def record(self) -> MetadataRecord:
        """What the receiver is to know beside the pages, once all is computed."""
        if self.first is None or self.grant is None:
            raise AssertionError(f"room {self.id} has a record before it was computed")
        return MetadataRecord(
            room=self.id,
            generation=self.grant.generation,
            prompt_tokens=self.request.prefill_tokens,
            cached_tokens=self.cached,
            pages=tuple(map(len, self.grant.pages)),
            first_token=self.first.id,
            first_logprob=self.first.logprob,
            # What it cannot hold, the bootstrap hears from here alone (`record-fits`).
            alternatives=self.first.top[:ALTERNATIVES_MAX],
        )


S = TypeVar("S", bound=SendingRoom)


class SendingSide(HandOverSide[S, SenderRequest]):
    """Invariants:
    authorised-writer   only the receiver that the registry named grants and closes a room
    written-before-sent a page leaves when it is computed, and not before
    seal-last           the seal leaves when every rank has written the rest
    one-writer          one rank writes records and seals
    source-pinned       a room keeps its pages until its writes, which read them, have ended
    """

    def __init__(
        self,
        make: Callable[..., S],
        places: int,
        holdings: Holdings,
        layout: KvLayout,
        deadlines: Deadlines,
        *,
        elected: bool,
    ) -> None:
        """`elected`: this rank writes the records and seals of its worker."""
        super().__init__(make, places, holdings, layout, deadlines)
        self.elected = elected
        self._connections: list[Exception | None] = []
        """The turn's, and what became of each on this rank."""
        self._sealing: list[S] = []
        """The turn's, that are not kept yet."""

    def take_requests(self) -> list[SenderRequest | SideRequest]:
        """As its own. What is for later is done once all has been carried out: a seal is waited for."""
        if self._sealing and not self._requests:
            self._keep_sealed()
        return super().take_requests()

    # ---- commands, the same on every rank

    def open(
        self,
        room: RoomId,
        request: Request,
        receiver: Incarnation,
        now_ms: int,
        *,
        ends_ms: int | None = None,
        peer_name: str = "",
        compiled: bool = True,
    ) -> S:
        """Enter a room that the registry opened. Raises Refusal."""
        pages = self.layout.pages_for(request.prefill_tokens)
        if any(map(gt, pages, self.holdings.sizes)):
            raise Refusal(
                f"{request.prefill_tokens} tokens to compute: the cache of this worker never holds it"
            )

        opened = self._enter(
            room,
            request,
            receiver,
            pages,
            now_ms,
            ends_ms=ends_ms,
            peer_name=peer_name,
            compiled=compiled,
            elected=self.elected,
        )
        needs = f"{counted(request.prefill_tokens, 'token')} to compute, {counted(sum(pages), 'page')}"
        self._report(opened, Moment.ACCEPTED, needs)
        return opened

    def connection(self, problem: Exception | None) -> None:
        """One of the turn's connections was made on this rank, or `problem` is why not."""
        self._connections.append(problem)

    def revoke(self, receiver: Incarnation, exposure: Incarnation) -> None:
        """The receiver exposed its memory anew: whoever writes to what it exposed before ends, proven quiet.
        A write that still reads its source pages reaches nobody, so that they may be used anew
        (`source-pinned`)."""
        for room in self.roster:
            if room.peer == receiver and room.route is not None and room.route.revoked_by(exposure):
                text = f"decode worker {room.peer_name} took its memory back"
                self.fail(room, Reason.MEMORY_REVOKED, text)
                room.note(Fenced(Proof.REVOKED))

    def grant(self, room: RoomId, receiver: Incarnation, grant: Granted, route: Route | NotConnected) -> None:
        """The receiver tells where the room may be written. `route`: to the exposure that it names, or why
        there is none. Raises UnknownRoom, PeerFault, NotConnected, Truncated."""
        held = self._answered(room, receiver, grant)
        if isinstance(route, NotConnected):
            if not self.elected:
                # The leader answers the grant, and may have taken it: this rank alone ends the room.
                self.fail(held, Reason.CONNECT_FAILED, f"prefill: {route}")
            raise route
        known = held.request.prefill_tokens
        # `promise-kept`: what the receiver holds already are whole pages, which are not written over.
        if grant.prefix_tokens % lcm(*route.page_tokens) or grant.prefix_tokens > known:
            raise PeerFault(
                f"room {room}: a prefix of {grant.prefix_tokens} tokens does not end with a page of its"
                f" {known}"
            )
        expected = tuple(-(-(known - grant.prefix_tokens) // size) for size in route.page_tokens)
        granted = tuple(map(len, grant.pages))
        if granted != expected:
            raise Truncated(f"room {room}: {added(granted)} pages granted, {added(expected)} to be sent")
        held.note(grant)
        held.route = route

    def claimed(self, room: RoomId, receiver: Incarnation) -> None:
        """The receiver computes the prompt itself, and grants nothing (`mine-or-granted`). Raises
        UnknownRoom, PeerFault."""
        claim = Failed(CLAIMED)
        held = self._answered(room, receiver, claim)
        if held.grant is not None:
            raise PeerFault(f"room {room}: claimed by a receiver that has granted it")
        held.note(claim)

    def close(self, room: RoomId, receiver: Incarnation, generation: Generation, now_ms: int) -> None:
        """The receiver gave the room up. What answers it is a proof (`ack-is-proof`), so it is for the room's
        own receiver and tenancy alone. Raises PeerFault."""
        if room in self.roster:
            held = self.roster.get(room)
            if held.peer != receiver:
                raise PeerFault(f"room {room}: the registry named another receiver")
            if held.grant is not None and held.grant.generation != generation:
                raise PeerFault(f"room {room}: generation {generation} was not granted")
        self.roster.cancel_by_peer(room, receiver, GIVEN_UP, now_ms)

    def depart(self, receiver: Incarnation) -> None:
        """A decode process is known to be gone: nothing can land in it any more."""
        for room in self.roster:
            if room.peer == receiver:
                self.fail(room, Reason.DECODE_LOST, f"decode worker {room.peer_name} is gone")
                room.note(Fenced(Proof.DEAD))
        self._ask(Forget(receiver))

    # ---- what is known on this rank alone

    def stepping(self, now_ms: int) -> None:
        """A step goes on, or has ended: progress of all that it is for, and that wait for the next."""
        for room in self.roster:
            if room.computable:
                room.progressed(now_ms)

    def computed(self, room: S, tokens: int, first: Token | None, now_ms: int) -> bool:
        """A step ended: the first `tokens` tokens are in the pages. `first`: the token that was drawn behind
        them all. False, and nothing follows, where the room has failed meanwhile."""
        room.busy = False
        room.computed = tokens
        if not room.begun or room.phase is not Phase.TRANSFERRING:
            return False
        self._ask(SendPages(room.id, tokens, room.complete))
        room.progressed(now_ms)
        if first is not None:
            room.first = first
            if room.elected:
                self._ask(SendRecord(room.id, room.record))
        return True

    def sent(self) -> Iterator[S]:
        """Rooms of which something may be written, or is being written."""
        for room in self.roster:
            if room.phase in GATED and room.begun and not room.sealed and room.cause is None:
                yield room

    def observe(self, room: S, writes: Writes, now_ms: int, *, moved: bool) -> bool:
        """See how far the room's writes have come. `moved`: something was posted or has ended. True when
        something is known that was not."""
        if room.grant is None:
            raise AssertionError(f"room {room.id} is written without a destination")
        if writes.failure is not None:
            self.fail(room, Reason.TRANSFER_FAILED, writes.failure)
            return True
        if moved:
            room.progressed(now_ms)
        if writes.written and not room.written:
            room.note(Written())
            told = f"what this rank sends of {room.computed} tokens"
            self._report(room, Moment.WRITTEN, told, of_rank=True)
            moved = True
        if room.written and (room.phase is Phase.TRANSFERRING or not room.elected):
            room.progressed(now_ms)  # only another rank can be late now, and it counts that itself
        if writes.sealed:
            room.note(Sealed(room.grant.generation))
        return moved

    def unproven(self) -> list[S]:
        """Rooms that failed, and of which nothing says yet that their writes have ended. Nothing more is
        posted for them; until their writes have ended they keep their pages, which those read."""
        return [
            room
            for room in self.roster
            if room.phase is Phase.FAILED and room.proof is None and not room.busy
        ]

    def ended(self, room: S) -> None:
        """All that was posted for a failed room has ended."""
        room.note(Fenced(Proof.QUIET if room.begun else Proof.UNEXPOSED))

    def load(self, tokens_per_s: int, score_price: int = 0) -> WorkerLoad:
        """By what prompts are expected to be computed here. What is cached is looked up once for each room:
        it may be more or less by the time that it begins. Both arguments: as of a `WorkerLoad`."""
        waiting = scored = 0
        for room in self.roster:
            if room.begun:
                if room.computable:
                    waiting += room.request.prefill_tokens - room.computed
                    scored += max(room.request.scores - room.computed, 0)
            elif room.phase in (Phase.BOOTSTRAPPING, Phase.WAITING_FOR_INPUT):
                if room.likely_cached is None:
                    room.likely_cached = self.holdings.cached(room.reusable, room.request.salt)
                waiting += room.request.prefill_tokens - room.likely_cached
                scored += room.request.scores
        waiting += scored * score_price // 1000
        entered = max((room.id for room in self.roster), default=RoomId(0))
        return WorkerLoad(
            (),
            (),
            0,
            0,
            0,
            entered,
            tokens_waiting=waiting,
            tokens_per_s=tokens_per_s,
            score_price=score_price,
        )

    # ---- a turn

    def connects(self) -> int:
        """How many of the turn's connections, from the first on, this rank could make."""
        problems = [problem is not None for problem in self._connections]
        return problems.index(True) if True in problems else len(problems)

    def agreed(self, connects: int) -> Sequence[Exception | None]:
        """What to answer to each of the turn's connections. So many of them every rank could make; behind the
        first that failed it is not known of the others what became of them: asked again, a connection that
        was made is found."""
        made, self._connections = self._connections, []
        unknown = NotConnected("not every rank of this prefill worker reaches the decode worker")
        return [
            unknown if place >= connects and problem is None else problem
            for place, problem in enumerate(made)
        ]

    def perform(self, room: S, effect: Effect | SenderEffect, now_ms: int) -> None:
        if self._sealing:
            self._keep_sealed()
        match effect:
            case Effect.QUEUE:
                self._report(room, Moment.DESTINATION_KNOWN)
            case SenderEffect.COMPUTE:
                self._begin(room)
            case SenderEffect.SEAL:
                if room.elected:
                    self._ask(SendSeal(room.id))
                self._sealing.append(room)
            case SenderEffect.REPORT:
                self._ask(Outcome(room.id, None))
                room.note(Finished())
            case Effect.RELEASE:
                self._release(room, now_ms)
            case Effect.STOP:
                self._distrust(room)
                self._report(room, Moment.STOPPED, "after its outcome was reported")
            case Effect.FENCE:
                self._distrust(room)
                if room.cause is None:
                    raise AssertionError(f"room {room.id} failed without a cause")
                self._ask(Outcome(room.id, room.cause))
            case _:
                assert_never(effect)

    def _answered(self, room: RoomId, receiver: Incarnation, answer: Evidence) -> S:
        """The room that a receiver answers, by a grant or by a claim. Raises UnknownRoom, PeerFault."""
        if room not in self.roster:
            self.roster.note(room, answer)  # counted, and creates nothing
            raise UnknownRoom(f"room {room} is not known here")
        held = self.roster.get(room)
        if receiver != held.peer:
            raise PeerFault(f"room {room}: the registry named another receiver")  # `authorised-writer`
        return held

    # ---- what moves do

    def _begin(self, room: S) -> None:
        if room.route is None:
            raise AssertionError(f"room {room.id} computes without a destination")
        holding = self.holdings.take(room.id, room.pages_needed, room.reusable, room.request.salt)
        room.pages, room.begun = holding.pages, True
        room.cached = room.computed = holding.shared_tokens
        self._ask(BeginWrites(room.id, holding.slot))
        if room.computed:
            self._ask(SendPages(room.id, room.computed, complete=False))
        detail = f"{counted(sum(map(len, holding.pages)), 'page')}, {counted(room.cached, 'token')} cached"
        self._report(room, Moment.COMPUTING, detail)

    def _keep_sealed(self) -> None:
        """The pages of every rank are there, and none of them is read any more: the seal is the slot's."""
        for room in self._sealing:
            self.holdings.keep(room.id, room.request.tokens)
        self._sealing.clear()
