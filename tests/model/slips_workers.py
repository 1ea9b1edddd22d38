"""Small faults about memory that is taken back, ways between workers, the registry, leaving: see `slips`."""

from collections.abc import Sequence
from typing import Any

import pytest

from services.pages.slots import SlotPool
from services.prefill.ways import Way, Ways
from services.rooms import quarantine
from services.rooms.errors import Cause, Reason
from services.rooms.evidence import Failed, Fenced, Proof
from services.rooms.ids import Incarnation, RoomId
from services.rooms.phases import Phase
from services.rooms.registry import Registry
from services.rooms.roster import Capacity
from services.wire.errors import NotConnected
from tests.model import decode_rank, handover, turns
from tests.model.decode_rank import DecodeRank
from tests.model.handover import cancel_here

Patch = pytest.MonkeyPatch


def no_revocation(patch: Patch) -> None:
    """Memory is never taken back: a sender that neither answers nor dies keeps it for ever."""
    patch.setattr(decode_rank, "revocation_due", lambda rooms, now_ms, pages: False)


def sealed_here_is_enough(patch: Patch) -> None:
    """Only what this rank lacks a proof for is overdue, though another rank may lack one that it has."""
    patch.setattr(quarantine, "_lingers", lambda room: False)


def revoked_in_name_only(patch: Patch) -> None:
    """Peers are told another name, and the memory stays where it was."""
    move = DecodeRank._move

    def under_both_names(rank: DecodeRank) -> None:
        known = set(rank._reached_by)
        move(rank)
        rank._reached_by |= known

    patch.setattr(DecodeRank, "_move", under_both_names)


def proof_before_the_move(patch: Patch) -> None:
    """Rooms count as proven when it was decided to take the memory back, not when that was done."""
    revoke = DecodeRank.revoke

    def as_good_as_done(rank: DecodeRank) -> str:
        for job in rank._jobs.values():
            if quarantine.in_quarantine(job.receiver):
                job.receiver.note(Fenced(Proof.REVOKED))
        return revoke(rank)

    patch.setattr(DecodeRank, "revoke", as_good_as_done)


def granted_before_the_move(patch: Patch) -> None:
    """Capacity is offered on while memory waits to be taken back."""

    def as_always(rank: DecodeRank) -> Capacity:
        return Capacity(rank._holdings.pages.free, rank._holdings.slots.free)

    patch.setattr(DecodeRank, "_capacity", as_always)


def a_rank_revokes_alone(patch: Patch) -> None:
    """A rank takes its memory back when it lacks a proof itself, not when all are told to."""
    turn = DecodeRank.turn

    def mine_is_overdue(rank: DecodeRank, agreed: Sequence[int], late: RoomId | None) -> tuple[Any, ...]:
        lacking = any(quarantine.in_quarantine(job.receiver) for job in rank._jobs.values())
        done = turn(rank, agreed, late)
        if lacking and not rank._step:
            rank._take_memory_back()
        return done

    patch.setattr(DecodeRank, "turn", mine_is_overdue)


def revoked_under_a_step(patch: Patch) -> None:
    """Memory is taken back as soon as that is agreed, whether or not an engine is at work on it."""
    turn = DecodeRank.turn

    def at_once(rank: DecodeRank, agreed: Sequence[int], late: RoomId | None) -> tuple[Any, ...]:
        done = turn(rank, agreed, late)
        if rank._revoking:
            rank._take_memory_back()
        return done

    patch.setattr(DecodeRank, "turn", at_once)


def any_exposure_will_do(patch: Patch) -> None:
    """A grant is taken although it names memory that this way does not lead to."""

    def whichever_is_known(ways: Ways, receiver: Incarnation, exposure: Incarnation) -> Way:
        way = ways._ways.get(receiver)
        if way is None:
            raise NotConnected("connect first")
        return way

    patch.setattr(Ways, "granted", whichever_is_known)


def heard_last_is_newest(patch: Patch) -> None:
    """A connect is taken for news of the memory's present place, however long it was under way."""
    patch.setattr(Way, "revoked_by", lambda way, exposure: way.exposure != exposure)


def the_slots_stay_behind(patch: Patch) -> None:
    """The slot pool goes on with the memory as it was before it was moved."""
    patch.setattr(SlotPool, "moved", lambda pool, memory: None)


def moved_without_its_contents(patch: Patch) -> None:
    """The memory at the new address is blank."""
    move = DecodeRank._move

    def blank(rank: DecodeRank) -> None:
        move(rank)
        rank._slot_memory[:] = bytes(len(rank._slot_memory))

    patch.setattr(DecodeRank, "_move", blank)


def connected_for_good(patch: Patch) -> None:
    """Who was connected once is taken for connected, and a refused grant for the end of it."""
    patch.setattr(handover, "doubted", lambda world, state: state)
    patch.setattr(turns, "exposed_anew", lambda world, state: state)
    patch.setattr(
        turns,
        "refused",
        lambda world, state, message, _: cancel_here(world, state, message[2], Reason.CONNECT_FAILED),
    )


def an_id_is_issued_again(patch: Patch) -> None:
    """A retry runs under the id of the room before it."""
    patch.setattr(Registry, "_fresh_id", lambda registry: RoomId(registry._next_room))


def the_last_outcome_wins(patch: Patch) -> None:
    """The registry writes down whatever it hears last about how a room ended."""
    end = Registry.end

    def whatever(registry: Registry, room: RoomId, cause: Cause | None, now_ms: int) -> bool:
        entry = registry._open.get(room)
        if entry is not None:
            entry.cause = cause
        return end(registry, room, cause, now_ms)

    patch.setattr(Registry, "end", whatever)


def ended_is_filed(patch: Patch) -> None:
    """A room is filed when it has ended, and its workers' load stays."""
    end = Registry.end

    def and_done(registry: Registry, room: RoomId, cause: Cause | None, now_ms: int) -> bool:
        ended = end(registry, room, cause, now_ms)
        if ended and room in registry._open:
            entry = registry._open[room]
            entry.waiting_for.clear()
            registry._file_if_retired(entry)
        return ended

    patch.setattr(Registry, "end", and_done)


def reports_are_waited_for(patch: Patch) -> None:
    """A room whose worker never reports it retired stays open."""
    patch.setattr(Registry, "overdue", lambda registry, now_ms: [])


def lost_with_its_sender(patch: Patch) -> None:
    """When a prefill worker goes, so do the rooms that it had finished and that were not looked at yet."""
    depart = DecodeRank.depart

    def all_of_its_rooms(rank: DecodeRank, peer: Incarnation) -> str:
        for job in rank._jobs.values():
            if job.receiver.peer == peer and job.receiver.phase is not Phase.SUCCESS:
                job.receiver.note(Failed(Cause(Reason.PREFILL_LOST, "its process is gone")))
        return depart(rank, peer)

    patch.setattr(DecodeRank, "depart", all_of_its_rooms)
