"""Tests of the evidence that each side records of a room, and of the readiness that follows from it."""

from itertools import permutations

import pytest

from baton.ids import Generation, RoomId
from baton.rooms.errors import LocalBug, PeerFault, Reason, StaleGeneration
from baton.rooms.evidence import (
    Connected,
    Evidence,
    Fenced,
    Finished,
    Granted,
    Landed,
    Proof,
    Sealed,
    Written,
)
from baton.rooms.phases import Phase, SenderEffect, Vote
from baton.rooms.receiver import Receiver
from baton.rooms.sender import Sender
from tests.pages.ids import page_ids
from tests.rooms.group import receiver, sender

ROOM = RoomId(7)
GEN, OTHER = Generation(3), Generation(4)


def exposed(pages: int = 2) -> Receiver:
    room = receiver(ROOM, 0, expected=pages)
    room.note(Connected())
    room.settle(Vote.ADVANCE, 0)
    room.settle(Vote.ADVANCE, 0)
    room.expose(GEN, (0,))
    return room


@pytest.mark.parametrize("missing", ["pages", "seal", "nothing"])
def test_gate_before_agree_readiness_is_pages_and_seal(missing: str) -> None:
    room = exposed()
    if missing != "seal":
        room.note(Landed(GEN, (2,)))
        room.note(Sealed(GEN))
    else:
        room.note(Landed(GEN, (2,)))
    if missing == "pages":
        room = exposed()
        room.note(Landed(GEN, (1,)))
    assert (room.vote(1, has_capacity=False) is Vote.ADVANCE) == (missing == "nothing")


@pytest.mark.parametrize(
    "order", list(permutations([Landed(GEN, (1,)), Landed(GEN, (2,)), Sealed(GEN)])), ids=str
)
def test_the_order_of_evidence_does_not_matter_for_readiness(order: tuple[Evidence, ...]) -> None:
    room = exposed()
    for evidence in order:
        room.note(evidence)
    assert room.vote(1, has_capacity=False) is Vote.ADVANCE


def test_pages_landed_never_shrink() -> None:
    room = exposed()
    room.note(Landed(GEN, (2,)))
    room.note(Landed(GEN, (1,)))
    assert room.pages_landed == (2,)


def test_no_truncation_a_seal_over_too_few_pages_ends_the_room() -> None:
    room = exposed()
    room.note(Landed(GEN, (1,)))
    room.note(Sealed(GEN))
    assert room.vote(1, has_capacity=False) is Vote.ABORT
    room.settle(Vote.ABORT, 1)
    assert room.cause is not None
    assert room.cause.reason is Reason.TRANSFER_FAILED
    assert "1 of 2 pages" in room.cause.text
    assert room.proof is None


def test_no_truncation_more_pages_than_expected_is_the_peers_fault() -> None:
    with pytest.raises(PeerFault, match="3 pages landed, 2 expected"):
        exposed().note(Landed(GEN, (3,)))


def test_a_seal_is_the_proof_that_all_writes_are_done() -> None:
    room = exposed()
    room.note(Landed(GEN, (2,)))
    room.note(Sealed(GEN))
    assert room.proof is Proof.DONE


@pytest.mark.parametrize("evidence", [Landed(OTHER, (1,)), Sealed(OTHER)], ids=str)
def test_news_of_another_tenancy_is_not_ours(evidence: Evidence) -> None:
    room = exposed()
    with pytest.raises(StaleGeneration):
        room.note(evidence)
    assert (room.pages_landed, room.sealed) == ((0,), False)


def test_before_the_exposure_every_generation_is_stale() -> None:
    with pytest.raises(StaleGeneration):
        receiver(ROOM, 0).note(Sealed(GEN))


def test_a_room_is_exposed_once_and_after_its_grant() -> None:
    room = exposed()
    with pytest.raises(LocalBug, match="exposed twice"):
        room.expose(OTHER, (0,))
    with pytest.raises(LocalBug):
        receiver(ROOM, 0).expose(GEN, (0,))


def test_zero_pages_need_a_seal_all_the_same() -> None:
    room = exposed(pages=0)
    assert room.vote(1, has_capacity=False) is Vote.STAY
    room.note(Sealed(GEN))
    assert room.vote(1, has_capacity=False) is Vote.ADVANCE


def test_a_grant_may_be_repeated_but_not_changed() -> None:
    room = sender(ROOM, 0)
    room.note(Granted(GEN, (page_ids(1, 2),), 0))
    room.note(Granted(GEN, (page_ids(1, 2),), 0))
    with pytest.raises(PeerFault, match="a second, different destination"):
        room.note(Granted(OTHER, (page_ids(1, 2),), 0))
    assert room.grant == Granted(GEN, (page_ids(1, 2),), 0)


@pytest.mark.parametrize("evidence", [Connected(), Landed(GEN, (1,))], ids=str)
def test_a_sender_takes_no_receivers_evidence(evidence: Evidence) -> None:
    with pytest.raises(PeerFault, match="not for a sender"):
        sender(ROOM, 0).note(evidence)


def test_a_receiver_takes_no_senders_evidence() -> None:
    with pytest.raises(PeerFault, match="not for a receiver"):
        receiver(ROOM, 0).note(Granted(GEN, (), 0))


def granted(*, elected: bool = True) -> Sender:
    room = sender(ROOM, 0, elected=elected)
    room.note(Granted(GEN, (page_ids(1, 2),), 0))
    room.settle(Vote.ADVANCE, 0)
    room.settle(Vote.ADVANCE, 0)
    assert room.phase is Phase.TRANSFERRING
    return room


def test_a_sender_cannot_seal_what_it_was_not_granted() -> None:
    room = sender(ROOM, 0)
    with pytest.raises(LocalBug):
        room.note(Sealed(GEN))
    room.note(Granted(GEN, (), 0))
    with pytest.raises(LocalBug):
        room.note(Sealed(OTHER))


def test_seal_last_nobody_seals_before_all_ranks_have_written() -> None:
    """A rank that has written votes for the next phase, and may seal in that phase only."""
    room = granted()
    assert room.vote(1, has_capacity=False) is Vote.STAY
    room.note(Written())
    assert room.vote(1, has_capacity=False) is Vote.ADVANCE
    with pytest.raises(LocalBug, match="sealed while transferring"):
        room.note(Sealed(GEN))
    assert room.settle(Vote.ADVANCE, 1) is SenderEffect.SEAL
    assert room.vote(2, has_capacity=False) is Vote.STAY
    room.note(Sealed(GEN))
    assert room.vote(2, has_capacity=False) is Vote.ADVANCE


def test_one_writer_a_rank_that_is_not_elected_waits_for_no_seal_of_its_own_and_writes_none() -> None:
    room = granted(elected=False)
    room.note(Written())
    room.settle(Vote.ADVANCE, 1)
    assert room.phase is Phase.SEALING
    assert room.vote(2, has_capacity=False) is Vote.ADVANCE
    with pytest.raises(LocalBug, match="not by its writer"):
        room.note(Sealed(GEN))
    assert room.settle(Vote.ADVANCE, 2) is SenderEffect.REPORT
    room.note(Finished())
    assert room.vote(3, has_capacity=False) is Vote.ADVANCE


def test_evidence_never_moves_a_room() -> None:
    room = exposed()
    for evidence in (Landed(GEN, (2,)), Sealed(GEN), Fenced(Proof.DEAD)):
        room.note(evidence)
        assert room.phase is Phase.TRANSFERRING
