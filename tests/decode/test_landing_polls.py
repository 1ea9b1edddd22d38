"""Tests of how long a decode worker's turns may rest when nothing wakes them."""

from functools import partial

import pytest

from baton.decode.landing_polls import BESIDE_STEP_S, poll_s
from baton.ids import Generation, Incarnation, RoomId
from baton.rooms.evidence import Proof
from baton.rooms.phases import Phase
from baton.rooms.receiver import Receiver
from baton.rooms.roster import Roster
from baton.worker.polling import DRAIN_S, HEARTBEAT_S, POLL_S, deadline_s
from tests.prefill.bench import deadlines

BOUND_MS = 100


def _receiver(room: RoomId, place: int) -> Receiver:
    return Receiver(room, str(room), Incarnation(1), place, (1,), deadlines(BOUND_MS), 0, pages_expected=(1,))


def _roster(*phases: Phase) -> Roster[Receiver]:
    roster: Roster[Receiver] = Roster(max(len(phases), 1))
    for number, phase in enumerate(phases, 1):
        room = RoomId(number)
        receiver = roster.open(room, partial(_receiver, room), 0)
        receiver.phase, receiver.generation = phase, Generation(1)
    return roster


@pytest.mark.parametrize(
    ("phases", "free_s", "computing_s"),
    [
        ((), HEARTBEAT_S, HEARTBEAT_S),
        ((Phase.BOOTSTRAPPING, Phase.WAITING_FOR_INPUT, Phase.SUCCESS), HEARTBEAT_S, HEARTBEAT_S),
        ((Phase.SUCCESS, Phase.TRANSFERRING), POLL_S, BESIDE_STEP_S),
        ((Phase.FAILED,), DRAIN_S, DRAIN_S),
        ((Phase.FAILED, Phase.TRANSFERRING), POLL_S, BESIDE_STEP_S),
    ],
)
def test_it_is_looked_soon_where_something_may_land(
    phases: tuple[Phase, ...], free_s: float, computing_s: float
) -> None:
    roster = _roster(*phases)
    assert poll_s(roster, engine_free=True) == free_s
    assert poll_s(roster, engine_free=False) == computing_s


def test_what_is_proven_safe_is_not_looked_for() -> None:
    roster = _roster(Phase.FAILED)
    roster.get(RoomId(1)).proof = Proof.QUIET
    assert poll_s(roster, engine_free=True) == HEARTBEAT_S


def test_a_turn_comes_with_the_first_deadline_and_no_sooner_than_it_can_act() -> None:
    assert deadline_s(_roster(), 0) == HEARTBEAT_S
    assert deadline_s(_roster(Phase.TRANSFERRING, Phase.WAITING_FOR_INPUT), 40) == (BOUND_MS - 40) / 1000
    assert deadline_s(_roster(Phase.TRANSFERRING), BOUND_MS + 5) == 0.001, "it is voted in the next turn"
    assert deadline_s(_roster(Phase.FAILED), 40) == (BOUND_MS - 40) / 1000
    assert deadline_s(_roster(Phase.FAILED), BOUND_MS + 5) == HEARTBEAT_S, "time proves nothing"
