"""Small faults about ranks that differ: who writes what to whom, who seals and when, what one alone saw. See
`slips`."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from services.pages.plan import HandoverPlan, TransferPlan
from services.prefill.push import Push, Quota, Stage
from services.prefill.ways import Ways
from services.rooms.ballot import Ballot, Verdict, read_verdict
from services.rooms.errors import Reason
from services.rooms.ids import Incarnation
from services.rooms.phases import SENDER_MOVES, Effect, Phase, Vote
from services.rooms.receiver import Receiver
from services.rooms.roster import Roster
from services.rooms.sender import Sender
from tests.model import prefill_rank
from tests.model.decode_rank import DecodeRank
from tests.model.prefill_rank import Job, PrefillRank

Patch = pytest.MonkeyPatch


def sealed_when_its_own_is_written(patch: Patch) -> None:
    """The elected rank seals when it has written its own pages, whatever the other ranks have."""
    see, seal = PrefillRank._see_push, PrefillRank._seal

    def and_seal(rank: PrefillRank, job: Job) -> None:
        see(rank, job)
        if job.push is not None and job.push.written and job.push.stage is Stage.PAGES:
            seal(rank, job)

    patch.setattr(PrefillRank, "_see_push", and_seal)
    patch.setattr(PrefillRank, "_seal", lambda rank, job: None)


def every_rank_seals(patch: Patch) -> None:
    """Whoever has written seals: nobody was elected."""
    patch.setattr(Ways, "elected", True)


def one_head_is_sent_by_all_who_hold_it(patch: Patch) -> None:
    """A rank sends what it holds and the receiver wants, though another rank that holds it sends it, too."""
    between = HandoverPlan.between

    def of_any_holder(plan: HandoverPlan, sender: int, receiver: int) -> TransferPlan:
        plans = [between(plan, each, receiver) for each in range(len(plan.plans))]
        return next(each for each in plans if not each.empty)

    patch.setattr(HandoverPlan, "between", of_any_holder)


def paired_by_position(patch: Patch) -> None:
    """What a rank sends to the receiver's ranks is taken for what it gets from the sender's."""
    patch.setattr(HandoverPlan, "between", lambda plan, sender, receiver: plan.plans[receiver][sender])


def sealing_is_past_failing(patch: Patch) -> None:
    """That a room whose pages are all written can still fail was not thought of."""
    moves = {at: to for at, to in SENDER_MOVES.items() if at != (Phase.SEALING, Vote.ABORT)}
    patch.setattr(Sender, "MOVES", moves)


def the_first_rank_is_told(patch: Patch) -> None:
    """The record and the seal are written to the first of the receiver's ranks alone."""
    write = Push._write_slots

    def first(push: Push, peers: Sequence[Incarnation], start: int, length: int) -> None:
        first_peer = push._way.targets[0].peer
        write(push, [peer for peer in peers if peer == first_peer], start, length)

    patch.setattr(Push, "_write_slots", first)


def later_ranks_keep_what_fails(patch: Patch) -> None:
    """Ranks behind the first do not obey an abort that they saw no reason for."""
    settle = Roster.settle

    def if_seen(
        roster: Roster[Any], verdicts: Sequence[Vote], now_ms: int, reasons: Mapping[int, Reason]
    ) -> list[tuple[Any, Effect]]:
        mine = list(verdicts)
        for room in roster:
            if isinstance(room, Sender) and not room.elected and room.cause is None:
                mine[room.place] = max(mine[room.place], Vote.STAY)
        return settle(roster, mine, now_ms, reasons)

    patch.setattr(Roster, "settle", if_seen)


def each_record_at_once(patch: Patch) -> None:
    """The receiver's ranks get records that differ, written from one place without waiting in between."""
    post = Push._post

    def without_waiting(push: Push, quota: Quota) -> bool:
        flying = push._in_flight
        if len(flying) == 1 and push._records:
            push._in_flight = {}
            try:
                return post(push, quota)
            finally:
                push._in_flight = flying | push._in_flight
        return post(push, quota)

    patch.setattr(Push, "_post", without_waiting)


def told_when_the_leader_has_exposed(patch: Patch) -> None:
    """The leader tells the sender where to write when it has exposed that itself."""
    grant = DecodeRank._grant

    def at_once(rank: DecodeRank, receiver: Receiver) -> tuple[object, ...]:
        grant(rank, receiver)
        return rank._granting.pop()[2]

    patch.setattr(DecodeRank, "_grant", at_once)


def connected_here_is_enough(patch: Patch) -> None:
    """The leader answers a connect by what became of it on its own rank."""

    def mine(ballot: Ballot, agreed: Sequence[int]) -> Verdict:
        verdict = read_verdict(ballot, agreed)
        return Verdict(verdict.compute, verdict.leave, verdict.votes, verdict.reasons, ballot.connects)

    patch.setattr(prefill_rank, "read_verdict", mine)
