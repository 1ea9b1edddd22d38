"""Tests that every phase of a room has a deadline."""

from baton.rooms.deadlines import Deadlines
from baton.rooms.phases import Phase


def test_deadline_everywhere_each_phase_has_its_own() -> None:
    deadlines = Deadlines(1, 2, 3, 4, 5)
    assert {phase: deadlines.for_phase(phase) for phase in Phase} == {
        Phase.BOOTSTRAPPING: 1,
        Phase.WAITING_FOR_INPUT: 2,
        Phase.TRANSFERRING: 3,
        Phase.COMPUTING: 3,
        Phase.SEALING: 3,
        Phase.SUCCESS: 4,
        Phase.FAILED: 5,
        Phase.RETIRED: 5,
    }
