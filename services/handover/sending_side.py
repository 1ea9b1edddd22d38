"""Hand-over decisions of one rank of a prefill worker.

The rank reserves memory for a prompt, and decides which data may be written to the receiver, and when. Its
own pages stay reserved until no write reads them any more. See the package's docstring for how it is driven.
"""

from collections.abc import Callable, Iterator, Sequence
from math import lcm
from operator import add, gt
from typing import Final, TypeVar, assert_never

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
from baton.handover.sending_room import SendingRoom
from baton.handover.writes import Writes
from baton.ids import NO_OPENER, Generation, Incarnation, Opener, RoomId
from baton.pages.errors import Truncated, added
from baton.pages.holdings import Holdings
from baton.pages.layout import KvLayout
from baton.rooms.deadlines import Deadlines
from baton.rooms.errors import Cause, NotConnected, PeerFault, Reason, Refusal, UnknownRoom
from baton.rooms.evidence import Evidence, Failed, Fenced, Finished, Granted, Proof, Sealed, Written
from baton.rooms.phases import GATED, Effect, Phase, SenderEffect
from baton.rooms.plurals import counted
from baton.rooms.request import Request, Token
from baton.rooms.timeline import Moment
from baton.rooms.worker_load import WorkerLoad

CLAIMED: Final = Cause(Reason.LOCAL, "the decode worker computes the prompt itself")
GIVEN_UP: Final = Cause(Reason.RECEIVER_CLOSED, "the decode worker gave the room up")


S = TypeVar("S", bound=SendingRoom)


class SendingSide(HandOverSide[S, SenderRequest]):
    """State machine of one prefill rank for all hand-overs that it sends.

    Invariants:

    * `authorised-writer`: only the receiver that the bootstrap named grants and closes a room.
    * `written-before-sent`: a page is sent after it was computed.
    * `seal-last`: the seal is sent after every rank has written the rest.
    * `one-writer`: one rank writes records and seals.
    * `source-pinned`: a room's pages stay reserved until the writes that read them have ended.
    """

    def __init__(
        self,
        make: Callable[..., S],
        room_limit: int,
        holdings: Holdings,
        layout: KvLayout,
        deadlines: Deadlines,
        *,
        elected: bool,
    ) -> None:
        """Make a side without rooms. `elected`: whether this rank is the one that writes its worker's records
        and seals."""
        super().__init__(make, room_limit, holdings, layout, deadlines)
        self.elected = elected
        self._connections: list[Exception | None] = []
        """Result of each connect that a decode worker requested in this turn: None, or the error on this
        rank."""
        self._sealing: list[S] = []
        """Rooms sealed in this turn whose pages are not yet added to the prefix cache."""

    def take_requests(self) -> list[SenderRequest | SideRequest]:
        """Return the requests that this side has made to its driver since the last call, in order.

        The pages of sealed rooms enter the prefix cache only when all requests of the turn are carried out.
        """
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
        opener: Opener = NO_OPENER,
    ) -> S:
        """Add a room that the bootstrap opened on this worker. Return its record. Raises Refusal."""
        pages = self.layout.pages_for(request.prefill_tokens)
        if any(map(gt, pages, self.holdings.sizes)):
            raise Refusal(
                f"{request.prefill_tokens} tokens to compute: the cache of this worker never holds it"
            )

        opened = self._enter(
            room,
            request,
            receiver,
            # A cached state that the computation begins with is not available to others meanwhile.
            tuple(map(add, pages, self.holdings.prefixes.state_counts(1))),
            now_ms,
            ends_ms=ends_ms,
            peer_name=peer_name,
            compiled=compiled,
            opener=opener,
            elected=self.elected,
        )
        needs = f"{counted(request.prefill_tokens, 'token')} to compute, {counted(sum(pages), 'page')}"
        self._report(opened, Moment.ACCEPTED, needs)
        return opened

    def connection(self, problem: Exception | None) -> None:
        """Record the result of one connect of this turn on this rank. A decode worker requested it.
        `problem`: error of the connect, or None."""
        self._connections.append(problem)

    def revoke(self, receiver: Incarnation, exposure: Incarnation) -> None:
        """End all rooms that write to an earlier exposure of the receiver's memory. None of their writes can
        still reach memory in use.

        A write that is still under way fails or lands in unused memory. So its source pages may be reused
        (`source-pinned`).
        """
        for room in self.roster:
            if room.peer == receiver and room.route is not None and room.route.revoked_by(exposure):
                text = f"decode worker {room.peer_name} took its memory back"
                self.fail(room, Reason.MEMORY_REVOKED, text)
                room.note(Fenced(Proof.REVOKED))

    def grant(self, room: RoomId, receiver: Incarnation, grant: Granted, route: Route | NotConnected) -> None:
        """Record the receiver's grant of a room: the memory to write the room to.

        `route`: route to the exposure that the grant names, or the error that prevents one. Raises
        UnknownRoom, PeerFault, NotConnected, Truncated.
        """
        found = self._answered(room, receiver, grant)
        if isinstance(route, NotConnected):
            if not self.elected:
                # The leader may have accepted the grant. So this rank ends the room by its vote.
                self.fail(found, Reason.CONNECT_FAILED, f"prefill: {route}")
            raise route
        known = found.request.prefill_tokens
        # `promise-kept`: cached pages of the receiver are whole, and are not overwritten.
        block = lcm(
            *(size for group, size in enumerate(route.page_tokens) if group not in self.layout.states)
        )
        if grant.prefix_tokens % block or grant.prefix_tokens > known:
            raise PeerFault(
                f"room {room}: a prefix of {grant.prefix_tokens} tokens does not end with a page of its"
                f" {known}"
            )
        expected = tuple(-(-(known - grant.prefix_tokens) // size) for size in route.page_tokens)
        granted = tuple(map(len, grant.pages))
        if granted != expected:
            raise Truncated(f"room {room}: {added(granted)} pages granted, {added(expected)} to be sent")
        found.note(grant)
        found.route = route

    def claimed(self, room: RoomId, receiver: Incarnation) -> None:
        """End a room on this prefill worker, because its decode worker computes the prompt itself
        (`mine-or-granted`). Raises UnknownRoom, PeerFault."""
        claim = Failed(CLAIMED)
        found = self._answered(room, receiver, claim)
        if found.grant is not None:
            raise PeerFault(f"room {room}: claimed by a receiver that has granted it")
        found.note(claim)

    def close(self, room: RoomId, receiver: Incarnation, generation: Generation, now_ms: int) -> None:
        """End a room that its receiver gave up.

        The answer to a close is a proof that this worker writes nothing more (`ack-is-proof`). Raises
        PeerFault unless the room's own receiver and generation are named.
        """
        if room in self.roster:
            found = self.roster.get(room)
            if found.peer != receiver:
                raise PeerFault(f"room {room}: the registry named another receiver")
            if found.grant is not None and found.grant.generation != generation:
                raise PeerFault(f"room {room}: generation {generation} was not granted")
        self.roster.cancel_by_peer(room, receiver, GIVEN_UP, now_ms)

    def depart(self, receiver: Incarnation) -> None:
        """Record that a decode process is gone, and fail all its rooms: none can be handed over any more."""
        for room in self.roster:
            if room.peer == receiver:
                self.fail(room, Reason.DECODE_LOST, f"decode worker {room.peer_name} is gone")
                room.note(Fenced(Proof.DEAD))
        self._ask(Forget(receiver))

    # ---- what is known on this rank alone

    def store_states(self) -> None:
        """Decide for each room that computes its first chunk next which states it stores for others.

        Call it before a step is chosen, on all ranks in the same turn.
        """
        for room in self.roster if self.holdings.prefixes.has_states else ():
            if room.computable and room.begun and room.stored is None:
                room.stored = dict(self.holdings.store_states(room.id, room.reusable))

    def stepping(self, now_ms: int) -> None:
        """Record that an engine step is running or has ended. It counts as progress for the rooms in it and
        for those that wait for the next step, and postpones their deadlines."""
        for room in self.roster:
            if room.computable:
                room.progressed(now_ms)

    def computed(self, room: S, tokens: int, first: Token | None, now_ms: int) -> bool:
        """Record that the first `tokens` tokens of a room are in its pages, and request to send them.

        `first`: token sampled after the whole prompt, or None. Return False, without effect, if the room has
        failed meanwhile.
        """
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
        """Yield the rooms of which this rank has writes under way, or may start some."""
        for room in self.roster:
            if room.phase in GATED and room.begun and not room.sealed and room.cause is None:
                yield room

    def observe(self, room: S, writes: Writes, now_ms: int, *, moved: bool) -> bool:
        """Record the progress of a room's writes. Return True if this gives new evidence for the rank's next
        vote.

        `moved`: whether a write was posted or has ended.
        """
        if room.grant is None:
            raise AssertionError(f"room {room.id} is written without a destination")
        if writes.failure is not None:
            self.fail(room, Reason.TRANSFER_FAILED, writes.failure)
            return True
        if moved:
            room.progressed(now_ms)
        if writes.written and not room.written:
            room.note(Written())
            detail = f"what this rank sends of {room.computed} tokens"
            self._report(room, Moment.WRITTEN, detail, of_rank=True)
            moved = True
        if room.written and (room.phase is Phase.TRANSFERRING or not room.elected):
            room.progressed(now_ms)  # from now on only another rank can be late, which has its own deadline
        if writes.sealed:
            room.note(Sealed(room.grant.generation))
        return moved

    def unproven(self) -> list[S]:
        """Return the failed rooms whose writes to the receiver may still be under way.

        No more writes are started for them. Their pages stay reserved, because the writes under way read
        them.
        """
        return [
            room
            for room in self.roster
            if room.phase is Phase.FAILED and room.proof is None and not room.busy
        ]

    def ended(self, room: S) -> None:
        """Record that all writes of a failed room have ended, so that nothing reads its pages any more."""
        room.note(Fenced(Proof.QUIET if room.begun else Proof.UNEXPOSED))

    def load(self, tokens_per_s: int, score_price: int = 0, opener: Opener | None = None) -> WorkerLoad:
        """Return this worker's load, by which the router decides which prompts it gets. Arguments: see
        `WorkerLoad`. `opener`: the router, for the ids of its own rooms (see `entered`).

        How many tokens of a room are cached is looked up once. The number may have changed when the room
        begins.
        """
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
        return WorkerLoad(
            (),
            (),
            0,
            0,
            0,
            self.entered(opener),
            tokens_waiting=waiting,
            tokens_per_s=tokens_per_s,
            score_price=score_price,
            other_rooms=self.others(opener),
        )

    # ---- a turn

    def connects(self) -> int:
        """Return how many connects of this turn succeeded on this rank before the first that failed. Decode
        workers request them."""
        problems = [problem is not None for problem in self._connections]
        return problems.index(True) if True in problems else len(problems)

    def agreed(self, connects: int) -> Sequence[Exception | None]:
        """Return the answer to each connect of this turn: None, or its error.

        `connects`: number of connects, from the first, that succeeded on every rank. After the first failure,
        the result on other ranks is unknown. A caller that retries finds a connection that was made.
        """
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
        """Return the room that a message of its receiver grants or claims. Raises UnknownRoom or PeerFault if
        there is none, or it has another receiver."""
        if room not in self.roster:
            self.roster.note(room, answer)  # counted, and creates nothing
            raise UnknownRoom(f"room {room} is not known here")
        found = self.roster.get(room)
        if receiver != found.peer:
            raise PeerFault(f"room {room}: the registry named another receiver")  # `authorised-writer`
        return found

    # ---- what moves do

    def _begin(self, room: S) -> None:
        if room.route is None:
            raise AssertionError(f"room {room.id} computes without a destination")
        pages = self.layout.pages_for(room.request.prefill_tokens)
        holding = self.holdings.take(room.id, pages, room.reusable, room.request.salt, computes=True)
        room.pages, room.begun = holding.pages, True
        room.restored = holding.restored
        room.cached = room.computed = holding.shared_tokens
        self._ask(BeginWrites(room.id, holding.slot))
        if room.computed:
            self._ask(SendPages(room.id, room.computed, complete=False))
        detail = f"{counted(sum(map(len, holding.pages)), 'page')}, {counted(room.cached, 'token')} cached"
        self._report(room, Moment.COMPUTING, detail)

    def _keep_sealed(self) -> None:
        """Add the pages of sealed rooms to the prefix cache. All ranks have computed them, and no write reads
        them any more."""
        for room in self._sealing:
            self.holdings.keep(room.id, room.request.tokens)
        self._sealing.clear()
