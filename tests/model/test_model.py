"""Test that all laws hold in every state of the quick scopes.

(Whether the model would see it if not, the mutants say: tests/mutants.)
"""

import pytest

from tests.model.scopes import SCOPES
from tests.model.search import Search


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.search] if scope.slow else [])
        for name, scope in SCOPES.items()
        if scope.quick
    ],
)
def test_every_law_holds_in_every_state(name: str) -> None:
    found = Search(SCOPES[name]).run()
    assert [f"{each.text}\n{each.story}" for each in found.violations] == []
    assert found.complete
    assert found.transitions > found.states > 100
