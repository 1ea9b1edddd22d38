"""What would the checker not see, if it were blind? Small faults put into the product for the length of a
test, each with the law that must be found broken and the scope that finds it.

The five field defects are those of `tests.model.defects`; the others are each law's likeliest slip.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pytest

from services.pages.holdings import Holding, Holdings, Standing
from services.pages.plan import TransferPlan
from services.pages.pool import PagePool
from services.pages.record import seal_bytes
from services.pages.runs import PageRun
from services.prefill import push
from services.prefill.push import SLOTS, Push, Quota
from services.rooms.errors import Cause, PeerFault, Reason
from services.rooms.evidence import Evidence, Failed, Fenced, Granted, Proof
from services.rooms.ids import Incarnation, RoomId
from services.rooms.phases import RECEIVER_MOVES, Effect, Phase, Vote
from services.rooms.receiver import Receiver
from services.rooms.room import Room
from services.rooms.roster import Capacity, Roster, Tombstone
from services.rooms.sender import Sender
from tests.model import defects, events, handover, slips_groups, slips_workers
from tests.model.laws import Law
from tests.model.world import ASKED

Patch = pytest.MonkeyPatch


def free_on_a_timer(patch: Patch) -> None:
    """A quarantined room gives its memory back when it has waited long enough."""
    vote = Receiver.vote

    def waited_enough(room: Receiver, now_ms: int, *, has_capacity: bool) -> Vote:
        if room.phase is Phase.FAILED and now_ms >= room.deadline_ms:
            return Vote.ADVANCE
        return vote(room, now_ms, has_capacity=has_capacity)

    patch.setattr(Receiver, "vote", waited_enough)


def lost_lease_is_death(patch: Patch) -> None:
    """A sender whose lease ran out is taken for dead, and with it its writes."""
    cancel = Roster.cancel

    def it_must_be_dead(roster: Roster[Any], room: RoomId, cause: Cause, now_ms: int) -> bool:
        here = cancel(roster, room, cause, now_ms)
        if here and cause.reason is Reason.PREFILL_LOST:
            roster.note(room, Fenced(Proof.DEAD))
        return here

    patch.setattr(Roster, "cancel", it_must_be_dead)


def no_fence_on_abort(patch: Patch) -> None:
    """An aborted room's memory goes back to the pool at once."""
    quarantine = Holdings.quarantine

    def give_back_at_once(holdings: Holdings, room: int) -> bool:
        quarantine(holdings, room)
        holdings.give_back(room)
        return False

    patch.setattr(Holdings, "quarantine", give_back_at_once)


def grant_before_expose(patch: Patch) -> None:
    """A peer is told where memory is that is not marked as exposed."""

    def only_name_it(holdings: Holdings, room: int, pages: int) -> Holding:
        holding = holdings.get(room)
        holding.exposed = holding.pages[:pages]
        return holding

    patch.setattr(Holdings, "expose", only_name_it)


def exposed_pages_are_counted_free(patch: Patch) -> None:
    """Exposed pages go back to the free list when their room fails, beside being quarantined."""
    quarantine = PagePool.quarantine

    def and_free_them(pool: PagePool, pages: Sequence[int]) -> None:
        quarantine(pool, pages)
        pool.release(pages)

    patch.setattr(PagePool, "quarantine", and_free_them)


def acknowledge_at_once(patch: Patch) -> None:
    """A close is answered when it has arrived, not when the room's writes have ended."""
    patch.setattr(events, "can_acknowledge", lambda world, state, close: close.asked == ASKED)


def only_the_leader_closes(patch: Patch) -> None:
    """Whether to ask the sender to be quiet is decided by what one rank lacks, not by what any lacks."""
    patch.setattr(handover, "must_close", lambda told: bool(told[0]))


def drained_while_writes_fly(patch: Patch) -> None:
    """A sender takes what it posted for ended, because it posts no more."""
    patch.setattr(Push, "drain", lambda push, count_bytes: True)


def seal_with_the_pages(patch: Patch) -> None:
    """The seal is posted behind record and pages without waiting for them to be DONE."""

    def posted(push: Push) -> bool:
        return push._complete and push.failure is None and not push._unposted

    def in_order_is_enough(push: Push, quota: Quota) -> bool:
        flying, push._in_flight = push._in_flight, {}
        try:
            return post(push, quota)
        finally:
            push._in_flight = flying | push._in_flight

    post = Push._post
    patch.setattr(Push, "written", property(posted))
    patch.setattr(Push, "_post", in_order_is_enough)


def a_page_is_not_sent(patch: Patch) -> None:
    """The last page of every run is left out, and its record is sent all the same."""
    runs = TransferPlan.runs

    def all_but_the_last(
        plan: TransferPlan, source: Sequence[int], target: Sequence[int], first: int, start: int, stop: int
    ) -> list[PageRun]:
        return runs(plan, source, target, first, start, max(start, stop - 1))

    patch.setattr(TransferPlan, "runs", all_but_the_last)


def written_to_the_next_slot(patch: Patch) -> None:
    """The record goes to another slot than the one that was granted."""
    put = Push._put

    def one_further(push: Push, peer: Incarnation, region: str, runs: list[Any], of_pages: int = 0) -> None:
        if region == SLOTS:
            runs = [(source, target + 256, size) for source, target, size in runs]
        put(push, peer, region, runs, of_pages)

    patch.setattr(Push, "_put", one_further)


def sealed_under_another_generation(patch: Patch) -> None:
    """The seal names the tenancy before."""
    patch.setattr(push, "seal_bytes", lambda room, generation: seal_bytes(room, generation - 1))


def sent_before_computed(patch: Patch) -> None:
    """A room's pages leave when it has been given them."""
    begin = Push.__init__

    def all_at_once(push: Push, *args: Any) -> None:
        begin(push, *args)
        push.ready(len(push._source))

    patch.setattr(Push, "__init__", all_at_once)


def news_makes_a_room(patch: Patch) -> None:
    """What is heard of a room that has not come is written down, and takes it for failed when it comes."""
    defects.terminal_creates_nothing(patch)


def a_failed_rank_refuses_the_grant(patch: Patch) -> None:
    """A rank that has seen a failure answers a command otherwise than the others."""
    note = Sender._note

    def not_any_more(room: Sender, evidence: Evidence) -> None:
        if isinstance(evidence, Granted) and room.cause is not None:
            raise PeerFault(f"room {room.id}: too late")
        note(room, evidence)

    patch.setattr(Sender, "_note", not_any_more)


def what_one_rank_saw_is_in_the_digest(patch: Patch) -> None:
    """Ranks compare what they have seen, not what they have agreed on."""
    digest = Roster.digest
    patch.setattr(
        Roster, "digest", lambda roster: digest(roster) + sum(room.cause is not None for room in roster)
    )


def each_admits_what_it_has(patch: Patch) -> None:
    """A rank that sees pages and record takes the room, whatever was agreed."""
    settle = Roster.settle

    def mine_is_ready(
        roster: Roster[Any], verdicts: Sequence[Vote], now_ms: int, reasons: Mapping[int, Reason]
    ) -> list[tuple[Any, Effect]]:
        mine = list(verdicts)
        for room in roster:
            if isinstance(room, Receiver) and room.phase is Phase.TRANSFERRING and room._ready():
                mine[room.place] = Vote.ADVANCE
        return settle(roster, mine, now_ms, reasons)

    patch.setattr(Roster, "settle", mine_is_ready)


def the_last_cause_wins(patch: Patch) -> None:
    """Whatever is heard last about a room is why it failed."""
    note = Room.note

    def overwrite(room: Room, evidence: Evidence) -> None:
        if isinstance(evidence, Failed):
            room.cause = evidence.cause
        note(room, evidence)

    patch.setattr(Room, "note", overwrite)


def failed_rooms_start_again(patch: Patch) -> None:
    """A failed room is used for the next attempt."""
    moves = dict(RECEIVER_MOVES) | {(Phase.FAILED, Vote.ADVANCE): (Phase.BOOTSTRAPPING, Effect.QUEUE)}
    patch.setattr(Receiver, "MOVES", moves)


def a_phase_set_on_the_side(patch: Patch) -> None:
    """A failure that is noted moves its room at once."""
    note = Room.note

    def at_once(room: Room, evidence: Evidence) -> None:
        note(room, evidence)
        if isinstance(evidence, Failed) and room.phase is not Phase.SUCCESS:
            room.phase = Phase.FAILED

    patch.setattr(Room, "note", at_once)


def early_cancels_are_dropped(patch: Patch) -> None:
    """A cancel of a room that is not here yet is not kept."""
    cancel = Roster.cancel

    def only_what_is_here(roster: Roster[Any], room: RoomId, cause: Cause, now_ms: int) -> bool:
        return room in roster and cancel(roster, room, cause, now_ms)

    patch.setattr(Roster, "cancel", only_what_is_here)


def retired_and_forgotten(patch: Patch) -> None:
    """Nothing is remembered of a room that was retired."""

    def only_cancels(roster: Roster[Any], room: RoomId, grave: Tombstone) -> None:
        if grave.cause is not None:
            roster._tombstones[room] = grave

    patch.setattr(Roster, "_bury", only_cancels)


def memory_stays_behind(patch: Patch) -> None:
    """A failed room leaves the roster, and its memory stays."""
    give_back = Holdings.give_back

    def but_not_from_quarantine(holdings: Holdings, room: int) -> bool:
        if room in holdings and holdings.get(room).standing is Standing.QUARANTINED:
            return False
        return give_back(holdings, room)

    patch.setattr(Holdings, "give_back", but_not_from_quarantine)


def capacity_is_not_asked(patch: Patch) -> None:
    """A room is granted memory whether or not there is any."""
    votes = Roster.votes

    def there_will_be(roster: Roster[Any], now_ms: int, capacity: Capacity) -> list[Vote]:
        return votes(roster, now_ms, Capacity(1 << 20, 1 << 20))

    patch.setattr(Roster, "votes", there_will_be)


def released_under_a_step(patch: Patch) -> None:
    """A room's memory goes although a step that is running reads it."""
    vote = Room.vote

    def never_mind(room: Room, now_ms: int, *, has_capacity: bool) -> Vote:
        busy, room.busy = room.busy, False
        wish = vote(room, now_ms, has_capacity=has_capacity)
        room.busy = busy
        return wish

    patch.setattr(Room, "vote", never_mind)


def quiet_is_not_heard(patch: Patch) -> None:
    """The acknowledgement of a close proves nothing to its receiver."""
    note = Receiver.note

    def not_that(room: Room, evidence: Evidence) -> None:
        if evidence != Fenced(Proof.QUIET) or not isinstance(room, Receiver):
            note(room, evidence)

    patch.setattr(Room, "note", not_that)


def no_deadlines(patch: Patch) -> None:
    """Nothing ends a room but news, and news can be lost."""
    patch.setattr(Room, "ending", lambda room, now_ms: room.cause or room._contradiction())


@dataclass(frozen=True, slots=True)
class Slip:
    make: Callable[[Patch], None]
    law: Law
    scope: str


SLIPS: Final[Mapping[str, Slip]] = {
    slip.make.__name__: slip
    for slip in (
        Slip(defects.slot_zero, Law.SLOT_ZERO, "calm"),
        Slip(defects.terminal_creates_nothing, Law.TERMINAL_CREATES_NOTHING, "ranks-differ"),
        Slip(defects.gate_before_agree, Law.GATE_BEFORE_AGREE, "zero-pages"),
        Slip(defects.one_retire, Law.ONE_RETIRE, "abort"),
        Slip(defects.failure_is_agreed, Law.FAILURE_IS_AGREED, "ranks-differ"),
        Slip(free_on_a_timer, Law.PROOF_NOT_TIME, "abort"),
        Slip(lost_lease_is_death, Law.NO_FREE_UNDER_WRITE, "silence"),
        Slip(no_fence_on_abort, Law.NO_FREE_UNDER_WRITE, "abort"),
        Slip(grant_before_expose, Law.EXPOSURE_ON_PAGE, "calm"),
        Slip(exposed_pages_are_counted_free, Law.MOVES_LISTED, "abort"),
        Slip(acknowledge_at_once, Law.ACK_IS_PROOF, "abort"),
        Slip(only_the_leader_closes, Law.ROOM_ENDS, "ranks-differ"),
        Slip(drained_while_writes_fly, Law.SOURCE_PINNED, "abort"),
        Slip(seal_with_the_pages, Law.SEAL_LAST, "calm"),
        Slip(a_page_is_not_sent, Law.STALE_NEVER_SERVED, "pages"),
        Slip(written_to_the_next_slot, Law.NO_FREE_UNDER_WRITE, "pages"),
        Slip(sealed_under_another_generation, Law.SLOT_OWNER, "calm"),
        Slip(sent_before_computed, Law.WRITTEN_BEFORE_SENT, "steps"),
        Slip(news_makes_a_room, Law.ROOM_ISSUED, "rumours"),
        Slip(a_failed_rank_refuses_the_grant, Law.COMMANDS_ORDERED, "ranks-differ"),
        Slip(what_one_rank_saw_is_in_the_digest, Law.DIVERGENCE_DETECTED, "ranks-differ"),
        Slip(each_admits_what_it_has, Law.APPLY_VERDICT, "calm"),
        Slip(the_last_cause_wins, Law.FIRST_CAUSE_WINS, "ranks-differ"),
        Slip(failed_rooms_start_again, Law.TERMINAL_ABSORBS, "abort"),
        Slip(a_phase_set_on_the_side, Law.APPLY_VERDICT, "abort"),
        Slip(early_cancels_are_dropped, Law.CANCEL_REMEMBERED, "abort"),
        Slip(retired_and_forgotten, Law.TERMINAL_CREATES_NOTHING, "calm"),
        Slip(memory_stays_behind, Law.ONE_RETIRE, "abort"),
        Slip(capacity_is_not_asked, Law.ADMISSION_AGREED, "overlap"),
        Slip(released_under_a_step, Law.EXITS_RELEASE_ALL, "steps"),
        Slip(quiet_is_not_heard, Law.ROOM_ENDS, "ranks-differ"),
        Slip(no_deadlines, Law.ROOM_ENDS, "losses"),
        Slip(slips_groups.sealed_when_its_own_is_written, Law.SEAL_LAST, "calm"),
        Slip(slips_groups.every_rank_seals, Law.ONE_WRITER, "calm"),
        Slip(slips_groups.one_head_is_sent_by_all_who_hold_it, Law.ONE_WRITER, "replicated"),
        Slip(slips_groups.paired_by_position, Law.LAYERS_BY_ID, "pipeline-tensor"),
        Slip(slips_groups.sealing_is_past_failing, Law.MOVES_LISTED, "pipeline"),
        Slip(slips_groups.the_first_rank_is_told, Law.GATE_BEFORE_AGREE, "split"),
        Slip(slips_groups.later_ranks_keep_what_fails, Law.FAILURE_IS_AGREED, "pipeline"),
        Slip(slips_groups.each_record_at_once, Law.SOURCE_PINNED, "split"),
        Slip(slips_groups.told_when_the_leader_has_exposed, Law.NO_FREE_UNDER_WRITE, "lags"),
        Slip(slips_groups.connected_here_is_enough, Law.APPLY_VERDICT, "connects"),
        Slip(slips_workers.no_revocation, Law.ROOM_ENDS, "revocation"),
        Slip(slips_workers.sealed_here_is_enough, Law.ROOM_ENDS, "revocation-ranks"),
        Slip(slips_workers.revoked_in_name_only, Law.NO_FREE_UNDER_WRITE, "revocation"),
        Slip(slips_workers.proof_before_the_move, Law.NO_FREE_UNDER_WRITE, "revocation-steps"),
        Slip(slips_workers.granted_before_the_move, Law.EXPOSURE_ON_PAGE, "revocation-steps"),
        Slip(slips_workers.a_rank_revokes_alone, Law.APPLY_VERDICT, "revocation-ranks"),
        Slip(slips_workers.revoked_under_a_step, Law.APPLY_VERDICT, "revocation-steps"),
        Slip(slips_workers.any_exposure_will_do, Law.NO_FREE_UNDER_WRITE, "revocation"),
        Slip(slips_workers.heard_last_is_newest, Law.SOURCE_PINNED, "revocation-strays"),
        Slip(slips_workers.the_slots_stay_behind, Law.SLOT_ZERO, "revocation"),
        Slip(slips_workers.moved_without_its_contents, Law.STALE_NEVER_SERVED, "revocation-steps"),
        Slip(slips_workers.connected_for_good, Law.RECONNECT, "revocation"),
        Slip(slips_workers.an_id_is_issued_again, Law.ROOM_UNIQUE, "draining"),
        Slip(slips_workers.the_last_outcome_wins, Law.FIRST_CAUSE_WINS, "orphans"),
        Slip(slips_workers.ended_is_filed, Law.ZERO_AT_IDLE, "orphans"),
        Slip(slips_workers.reports_are_waited_for, Law.ROOM_ENDS, "orphans"),
        Slip(slips_workers.lost_with_its_sender, Law.DRAIN_KEEPS_PROMISES, "draining"),
    )
}
