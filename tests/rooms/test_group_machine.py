"""Random tests that ranks act in step, keep the first cause of each end, and end all rooms."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle as Names
from hypothesis.stateful import RuleBasedStateMachine, consumes, initialize, invariant, rule

from baton.ids import Generation, RoomId
from baton.rooms.errors import Cause, PeerFault, Reason, RoomExists, RosterFull
from baton.rooms.evidence import Connected, Evidence, Failed, Fenced, Finished, Landed, Proof, Sealed
from baton.rooms.phases import AnyEffect, Effect, Phase, ReceiverEffect, Vote
from baton.rooms.receiver import Receiver
from baton.rooms.roster import Capacity, Roster
from tests.rooms.group import LIVE, RosterGroup, receiver

RANKS, PLACES, PAGES, SLOTS = 3, 4, 6, 3
ORDER = list(Phase)


class ReceiversMoveTogether(RuleBasedStateMachine):
    """Three decode ranks. Evidence reaches each rank by itself, commands reach all."""

    rooms = Names("rooms")

    @initialize()
    def start(self) -> None:
        self.group: RosterGroup[Receiver] = RosterGroup([Roster(PLACES) for _ in range(RANKS)])
        self.now_ms = 0
        self.next_room = 1
        self.pages, self.slots = PAGES, SLOTS
        self.seen: dict[tuple[int, int], tuple[Phase, Cause | None]] = {}
        self.ended: set[RoomId] = set()

    @rule(target=rooms, needed=st.integers(1, 4), share=st.integers(0, 4))
    def open_room(self, needed: int, share: int) -> RoomId:
        room = RoomId(self.next_room)
        self.next_room += 1
        try:
            self.group.open(
                room,
                lambda name, place: receiver(
                    name, place, needed=needed, expected=min(share, needed), now_ms=self.now_ms
                ),
                self.now_ms,
            )
        except RosterFull:
            assert len(self.group.rosters[0]) == PLACES
        return room

    @rule(room=rooms)
    def open_again(self, room: RoomId) -> None:
        if room not in self.group.rosters[0] and room not in self.ended:
            return
        for roster in self.group.rosters:
            before = len(roster)
            try:
                roster.open(room, lambda place: receiver(room, place), self.now_ms)
            except (RoomExists, RosterFull):
                assert len(roster) == before
            else:
                raise AssertionError("an id was used twice")

    @rule(room=rooms, rank=st.integers(0, RANKS - 1), what=st.sampled_from(["landed", "sealed", "short"]))
    def write_lands(self, room: RoomId, rank: int, what: str) -> None:
        roster = self.group.rosters[rank]
        if room not in roster or roster.get(room).generation is None:
            return
        held = roster.get(room)
        generation = held.generation or Generation(0)
        self._note(rank, room, Landed(generation, (max(held.pages_expected[0] - (what == "short"), 0),)))
        if what == "sealed":
            self._note(rank, room, Sealed(generation))

    @rule(room=rooms, rank=st.integers(0, RANKS - 1))
    def stale_news(self, room: RoomId, rank: int) -> None:
        self._note(rank, room, Sealed(Generation(10**9)))

    @rule(room=rooms, rank=st.integers(0, RANKS - 1), reason=st.sampled_from(Reason))
    def one_rank_fails(self, room: RoomId, rank: int, reason: Reason) -> None:
        self._note(rank, room, Failed(Cause(reason, f"rank {rank}")))

    @rule(room=rooms, evidence=st.sampled_from([Connected(), Finished(), Fenced(Proof.QUIET)]))
    def all_ranks_hear(self, room: RoomId, evidence: Evidence) -> None:
        held = self.group.rosters[0].get(room) if room in self.group.rosters[0] else None
        if isinstance(evidence, Finished) and (held is None or held.phase is not Phase.SUCCESS):
            return
        for rank in range(RANKS):
            self._note(rank, room, evidence)

    @rule(room=consumes(rooms), reason=st.sampled_from([Reason.CANCELLED, Reason.CLIENT_GONE]))
    def cancel(self, room: RoomId, reason: Reason) -> None:
        for roster in self.group.rosters:
            roster.cancel(room, Cause(reason, "told"), self.now_ms)

    @rule(later_ms=st.sampled_from([1, 10, 60, 150]))
    def turn(self, later_ms: int) -> None:
        self.now_ms += later_ms
        phases = [{room.id: room.phase for room in roster} for roster in self.group.rosters]
        settled = self.group.turn(self.now_ms, [Capacity((self.pages,), self.slots)] * RANKS)
        assert len({tuple((room.id, effect) for room, effect in each) for each in settled.effects}) == 1
        for rank, effects in enumerate(settled.effects):
            for room, effect in effects:
                allowed = room.MOVES[
                    phases[rank][room.id],
                    Vote.ABORT if effect in (Effect.FENCE, Effect.STOP) else Vote.ADVANCE,
                ]
                assert allowed == (room.phase, effect)
                self._perform(rank, room, effect)

    def _perform(self, rank: int, room: Receiver, effect: AnyEffect) -> None:
        match effect:
            case ReceiverEffect.GRANT:
                room.expose(Generation(1000 + room.id), (0,))
                if rank == 0:
                    self.pages -= room.pages_needed[0]
                    self.slots -= 1
            case ReceiverEffect.ADMIT:
                assert room.sealed
                assert room.pages_landed == room.pages_expected
            case Effect.FENCE:
                if room.generation is None:
                    room.note(Fenced(Proof.UNEXPOSED))
            case Effect.RELEASE:
                assert room.proof is not None
                assert self.group.rosters[rank].retire(room.id, self.now_ms)
                self.ended.add(room.id)
                if rank == 0 and room.generation is not None:
                    self.pages += room.pages_needed[0]
                    self.slots += 1
            case _:
                pass

    def _note(self, rank: int, room: RoomId, evidence: Evidence) -> None:
        roster = self.group.rosters[rank]
        held = len(roster)
        try:
            known = roster.note(room, evidence)
        except PeerFault:
            known = True
        assert known == (room in roster)
        assert len(roster) == held

    @invariant()
    def ranks_hold_the_same(self) -> None:
        assert len({roster.digest() for roster in self.group.rosters}) == 1

    @invariant()
    def nothing_is_granted_twice(self) -> None:
        assert self.pages >= 0
        assert self.slots >= 0

    @invariant()
    def phases_only_go_forward_and_causes_stay(self) -> None:
        for rank, roster in enumerate(self.group.rosters):
            for room in roster:
                phase, cause = self.seen.get((rank, room.id), (Phase.BOOTSTRAPPING, None))
                assert ORDER.index(room.phase) >= ORDER.index(phase)
                assert phase in LIVE or room.phase is phase
                assert cause is None or room.cause == cause
                assert room.phase is not Phase.FAILED or room.cause is not None
                self.seen[rank, room.id] = (room.phase, room.cause)

    def teardown(self) -> None:
        """`room-ends`, `zero-at-idle`: with time and a proof every room is gone, and all is back."""
        for _ in range(6):
            for roster in self.group.rosters:
                for room in roster:
                    if room.phase is Phase.FAILED:
                        room.note(Fenced(Proof.DEAD))
            self.turn(150)
        for roster in self.group.rosters:
            assert len(roster) == 0
            assert roster.census() == dict.fromkeys(Phase, 0)
        assert (self.pages, self.slots) == (PAGES, SLOTS)


TestReceiversMoveTogether = ReceiversMoveTogether.TestCase
TestReceiversMoveTogether.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
