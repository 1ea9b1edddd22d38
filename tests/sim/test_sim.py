"""Tests that a whole Baton keeps its invariants, whatever goes wrong.

(Whether the simulation would see it if not, the mutants say: tests/mutants.)
"""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from baton.bootstrap.canary_request import canary_request
from tests.bootstrap.scripted import ScriptedDefaults
from tests.sim.bootstrap import CANARY
from tests.sim.engine import CONTEXT, VOCABULARY
from tests.sim.profile import NAMES
from tests.sim.run import run

ROOMS = 30
ROUNDS = 2
UNTROUBLED = 307
"""A seed of the profile "growth" in which nothing goes wrong."""


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
    (93, "sums", 250): "the simulated engine had no sum of a prompt whose pages its receiver held already",
    (370, "drain", 260): "the canary of a joining worker took a full partner's last place from a client",
}
"""Seeds that found something once, and what."""


@pytest.mark.parametrize(("seed", "name", "rooms"), KEPT)
def test_what_a_seed_has_found_stays_mended(seed: int, name: str, rooms: int) -> None:
    report = run(seed, rooms, name)
    assert not report.violations, report.violations[0]


def test_where_caches_are_small_rooms_are_retracted_and_every_request_has_its_answer() -> None:
    """Without any trouble beside. What its clients get is compared token for token as it comes."""
    report = run(UNTROUBLED, 2 * ROOMS, "growth")
    assert not report.violations, report.violations[0]
    assert not report.faults
    assert report.outcomes["answered"] == 2 * ROOMS
    assert report.deeds["retraction"] >= ROOMS // 3


def test_the_simulated_canary_is_what_the_product_asks() -> None:
    made = canary_request(ScriptedDefaults(eos_token_ids=(), vocabulary=VOCABULARY), CONTEXT)
    assert replace(made, prompt=CANARY.prompt) == CANARY
    assert len(made.prompt) == len(CANARY.prompt)


def test_one_seed_is_one_run_in_every_process_whatever_its_hashes() -> None:
    seeds = [NAMES.index(name) for name in ("everything", "fence", "hangups")]
    code = f"from tests.sim.run import run\nfor seed in {seeds}: print(run(seed, {ROOMS}).digest)"
    here = [run(seed, ROOMS).digest for seed in seeds]
    assert here == [run(seed, ROOMS).digest for seed in seeds]
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == here
    assert len(set(here)) == len(seeds)
