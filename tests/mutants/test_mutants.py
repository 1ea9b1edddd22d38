"""Tests that the mutants still fit the source, and that each fast one is caught by its invariant.

Fast ones are those that a story sees, those whose path is played as a story, and one for each law that the
model sees. `make verify` runs all."""

from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from tests.model.laws import Law
from tests.model.scopes import SCOPES
from tests.mutants.checks import STORIES, invariant_of
from tests.mutants.invariants import FIELD_DEFECTS, INVARIANTS
from tests.mutants.lanes import Outcome, errands, judge
from tests.mutants.mutant import ROOT, Drifted, Edit, Mutant
from tests.mutants.source import Source
from tests.mutants.tables import MUTANTS
from tests.stories.language import play

JOBS = 2
OF_NO_ROOM = frozenset(
    {
        "known-callers-only",
        "exit-by-starter",
        "gone-is-monotone",
        "secrets-unlogged",
        "no-pickle",
        "rejected-stays-out",
        "honest-health",
        "canary-is-a-request",
        "mask-is-fold",
        "scored-is-computed",
        "scored-once",
        "stall-is-no-work",
        "counted-work",
        "silence-is-spoken",
        "given-is-taken",
        "text-is-not-token",
        "schema-agreed",
        "log-is-tree",
    }
)
"""Invariants that no schedule of rooms can show broken. They are about handling requests, about reports on a
process, or about what is compared when workers register and connect."""
PLAYED = ("the_slot_alone_is_fenced", "any_exposure_will_do")
"""Mutants of which the model's path is played as a story."""


def _fast() -> list[Mutant]:
    fast: dict[str, Mutant] = {}
    for each in MUTANTS:
        kinds = {check.kind for check in each.checks}
        if kinds <= {"story", "model"}:
            by_itself = "story" in kinds or each.name in PLAYED
            fast.setdefault(each.name if by_itself else each.invariant, each)
    return list(fast.values())


FAST = _fast()


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {each.name: each for each in judge(errands(FAST), JOBS)}


@pytest.mark.search
@pytest.mark.parametrize("mutant", FAST, ids=lambda each: each.name)
def test_the_mutant_is_caught_by_its_invariant(mutant: Mutant, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[mutant.name]
    assert not outcome.problem
    assert outcome.found is not None, f"{mutant.slip} Nothing in {list(mutant.checks)} sees it."
    assert outcome.found.invariant == mutant.invariant, outcome.found.trace
    assert outcome.catches(mutant), outcome.found.trace


@pytest.mark.search
def test_a_way_to_a_broken_law_can_be_played_as_a_story(outcomes: dict[str, Outcome]) -> None:
    """The unchanged product plays the story to its end: the sender goes on writing while its room is in
    quarantine."""
    played = _played(outcomes["the_slot_alone_is_fenced"])
    assert "all transferring -> failed, fence" in played
    assert "r0  rooms: 1 failed; pages: 1 quarantined; slots: 1 quarantined" in played


@pytest.mark.search
def test_a_way_through_memory_that_is_taken_back_can_be_played_as_a_story(
    outcomes: dict[str, Outcome],
) -> None:
    """The story ends with the product's part: it revokes the memory, and the next room gets the same page."""
    played = _played(outcomes["any_exposure_will_do"])
    assert "# the proof is overdue: decode's leader asks for the memory back" in played
    assert "r0 failed -> retired, release" in played or "all failed -> retired, release" in played


def _played(outcome: Outcome) -> str:
    assert outcome.found is not None
    _, story = outcome.found.trace.split("\n\n", 1)
    return play("# What the checker found.\n\n" + story + "\nshow decode\n")


def test_every_law_of_the_model_is_seen_broken_by_the_model() -> None:
    assert {each.invariant for each in MUTANTS if each.checks[0].kind == "model"} == {
        law.value for law in Law
    }


def test_the_scopes_that_see_a_mutant_are_among_those_that_hold_for_the_product_as_it_is() -> None:
    """Stories, quick scopes and tests run with every change, large scopes with `make verify`."""
    scopes = {SCOPES[check.what] for each in MUTANTS for check in each.checks if check.kind == "model"}
    assert [scope.name for scope in scopes if scope.long] == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.name)
def test_the_mutant_fits_the_source(mutant: Mutant) -> None:
    for path, source in mutant.sources().items():
        compile(source, path, "exec")


def test_a_mutant_whose_place_or_text_is_gone_or_doubled_fails_by_its_name() -> None:
    edit = MUTANTS[0].edits[0]
    for place, before, complaint in (
        (edit.place, "never_there()", r"(?s)drifted: occurs 0 times in .*\(services/.*never_there"),
        ("never_there", edit.before, "drifted: never_there is nowhere defined"),
        (
            "HOST",
            edit.before,
            "drifted: HOST is defined in services/.*, services/.*; put the package or module",
        ),
        ("RoomPhase", "...", r"drifted: occurs 0 times in RoomPhase"),
    ):
        with pytest.raises(Drifted, match=complaint):
            Mutant("drifted", "", "", [Edit(place, before, "")], []).sources()


CODE = '''
class Queue:
    def add(self, x):
        """Docstring."""
        if x is None:  # comment
            return "é"
        elif (x.weight and
              x.size > 3):
            self.items.append(x)
        for each in self.items:
            each.wait()
'''


@pytest.mark.parametrize(
    ("before", "after", "old", "new"),
    [
        ("x.weight and x.size>3", "x.weight", "(x.weight and\n              x.size > 3)", "((x.weight))"),
        ("if x.weight and x.size > 3:", "if x:", "elif (x.weight and\n              x.size > 3):", "elif x:"),
        ("self.items.append(x)\n", "", "self.items.append(x)", "pass"),
        ("for each in self.items:", "for each in x:", "for each in self.items:", "for each in x:"),
        ("each.wait()", "each.wait()\neach.stop()", "each.wait()", "each.wait()\n            each.stop()"),
    ],
)
def test_an_edit_replaces_only_what_it_matches(
    before: str, after: str, old: str, new: str, tmp_path: Path
) -> None:
    path = tmp_path / "queue.py"
    path.write_text(CODE, encoding="utf-8")
    source = Source(path)
    [span] = source.spans(Edit("Queue.add", before, after), ("Queue", "add"))
    changed = source.data[: span.start] + span.text.encode() + source.data[span.end :]
    assert changed.decode() == CODE.replace(old, new)


def test_every_mutant_has_a_name_of_its_own_and_says_what_it_is() -> None:
    assert [name for name, count in Counter(each.name for each in MUTANTS).items() if count > 1] == []
    assert [each.name for each in MUTANTS if not (each.slip and each.edits and each.checks)] == []


def test_the_field_defects_are_among_them_each_with_its_report() -> None:
    assert {each.invariant for each in MUTANTS if each.report is not None} == FIELD_DEFECTS
    assert len(MUTANTS) >= 40


def test_mutants_and_stories_name_invariants_that_are_known() -> None:
    assert {each.invariant for each in MUTANTS} <= INVARIANTS
    for story in STORIES.rglob("*.txt"):
        assert invariant_of(story.read_text(encoding="utf-8")) in INVARIANTS, story.name


NOT_SIMULATED: Final = frozenset({"engine", "engine_interface.py", "inference", "sampling", "api"})


def _of_what_is_not_simulated(mutant: Mutant) -> bool:
    """The model and the simulation compute nothing, and ask for rooms without HTTP."""
    return any(path.relative_to(ROOT).parts[1] in NOT_SIMULATED for path in mutant.files())


def test_most_are_seen_without_a_test_of_the_suite() -> None:
    of_rooms = [
        each for each in MUTANTS if each.invariant not in OF_NO_ROOM and not _of_what_is_not_simulated(each)
    ]
    by_suite = [each for each in of_rooms if all(check.kind == "suite" for check in each.checks)]
    assert len(by_suite) < len(of_rooms) / 2
