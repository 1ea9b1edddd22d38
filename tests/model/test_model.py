"""Do all laws hold in every state that the quick scopes reach, and would the checker see it if not?"""

import pytest

from tests.model.laws import Law
from tests.model.scopes import SCOPES
from tests.model.search import Search, Violation
from tests.model.slips import SLIPS
from tests.stories.language import play

QUICK = [name for name, scope in SCOPES.items() if scope.quick]


@pytest.mark.parametrize("name", QUICK)
def test_every_law_holds_in_every_state(name: str) -> None:
    found = Search(SCOPES[name]).run()
    assert [f"{each.text}\n{each.story}" for each in found.violations] == []
    assert found.complete
    assert found.transitions > found.states > 100


@pytest.mark.search
@pytest.mark.parametrize("name", SLIPS)
def test_the_slip_is_seen(name: str) -> None:
    """Each slip breaks its own law, in a scope in which the product as it is breaks none (above)."""
    violation = _slipped(name)
    assert violation.law is SLIPS[name].law, violation.story


def test_every_law_was_seen_broken() -> None:
    assert {slip.law for slip in SLIPS.values()} == set(Law)


def test_a_way_to_a_broken_law_can_be_played_as_a_story() -> None:
    """The product as it is plays it to the end: the sender writes on while its room is in quarantine."""
    story = _slipped("no_fence_on_abort").story
    played = play("# What the checker found.\n\n" + story + "\nshow decode\n")
    assert "all transferring -> failed, fence" in played
    assert "r0  rooms: 1 failed; pages: 1 quarantined; slots: 1 quarantined" in played


def test_a_way_to_memory_that_is_taken_back_in_name_only_can_be_played_as_a_story() -> None:
    """As far as the product goes: it takes the memory back, and the next room gets the same page."""
    story = _slipped("revoked_in_name_only").story
    played = play("# What the checker found.\n\n" + story + "\nshow decode\n")
    assert "# the proof is overdue: decode's leader asks for the memory back" in played
    assert "r0 failed -> retired, release" in played or "all failed -> retired, release" in played


def _slipped(name: str) -> Violation:
    slip = SLIPS[name]
    assert not SCOPES[slip.scope].long
    with pytest.MonkeyPatch.context() as patch:
        slip.make(patch)
        (violation,) = Search(SCOPES[slip.scope]).run().violations
    return violation
