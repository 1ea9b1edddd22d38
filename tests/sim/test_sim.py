"""Does a whole Baton keep its invariants whatever goes wrong, and does the simulation see it when it does
not?"""

import os
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest

from services.decode.turn import DecodeWork
from services.pages.slots import SlotPool
from services.prefill.sending import Sending
from services.prefill.turn import PrefillWork
from services.rooms.evidence import Fenced, Proof
from tests.sim.profile import NAMES
from tests.sim.run import run

ROOMS = 30
ROUNDS = 2


@pytest.mark.parametrize("name", NAMES)
def test_a_whole_stack_keeps_its_invariants_under_each_kind_of_trouble(name: str) -> None:
    for seed in range(NAMES.index(name), ROUNDS * len(NAMES), len(NAMES)):
        report = run(seed, ROOMS)
        assert not report.violations, report.violations[0]
        assert report.shape.name == name
        ends = [count for outcome, count in report.outcomes.items() if not outcome.endswith("for now")]
        assert sum(ends) == ROOMS, "every client has one end"
        assert name != "calm" or (not report.faults and report.outcomes == {"answered": ROOMS})


KEPT = {
    (54, "engine", 250): "a hand-over that failed after its client was answered kept the decode side waiting",
    (67, "everything", 100): "a room that failed between its opening and its being followed had no end",
    (370, "drain", 260): "the canary of a joining worker took a full partner's last place from a client",
}
"""Seeds that found something once, and what."""


@pytest.mark.parametrize(("seed", "name", "rooms"), KEPT)
def test_what_a_seed_has_found_stays_mended(seed: int, name: str, rooms: int) -> None:
    report = run(seed, rooms, name)
    assert not report.violations, report.violations[0]


def test_one_seed_is_one_run_in_every_process_whatever_its_hashes() -> None:
    seeds = [NAMES.index(name) for name in ("everything", "fence", "hangups")]
    code = f"from tests.sim.run import run\nfor seed in {seeds}: print(run(seed, {ROOMS}).digest)"
    here = [run(seed, ROOMS).digest for seed in seeds]
    assert here == [run(seed, ROOMS).digest for seed in seeds]
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == here
    assert len(set(here)) == len(seeds)


def _quarantine_ends_at_once(self: Any, job: Any) -> None:
    _fail(self, job)
    job.receiver.note(Fenced(Proof.QUIET))


def _pages_are_kept(self: Any, job: Any) -> None:
    with mock.patch.object(self._holdings, "give_back"):
        _retire(self, job)


def _quiet_is_not_waited_for(self: Any, job: Any) -> bool:
    job.sender.note(Fenced(Proof.QUIET))
    return True


_fail, _retire = DecodeWork._fail, PrefillWork._retire

SLIPS = [
    (DecodeWork, "_fail", _quarantine_ends_at_once, "writes", 5, "no-free-under-write"),
    (PrefillWork, "_retire", _pages_are_kept, "calm", 0, "zero-at-idle"),
    (SlotPool, "_zero", lambda *_: None, "calm", 3, "slot-zero"),
    (Sending, "see_quiet", _quiet_is_not_waited_for, "late", 0, "source-pinned"),
]


@pytest.mark.parametrize(
    ("where", "what", "slip", "name", "seed", "invariant"), SLIPS, ids=[invariant for *_, invariant in SLIPS]
)
def test_a_product_that_is_broken_on_purpose_is_seen_by_the_invariants_name(
    where: type, what: str, slip: Any, name: str, seed: int, invariant: str
) -> None:
    with mock.patch.object(where, what, slip):
        report = run(seed, ROOMS, name)
    assert invariant in {violation.invariant for violation in report.violations}
