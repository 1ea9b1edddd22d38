"""Would each of the field's five defects be caught if it came back?

The story of the same name must be told differently under the mutant, with the field's own symptom in it,
and as it is written without.
"""

from pathlib import Path

import pytest

from tests.defects.mutants import SYMPTOMS
from tests.stories.language import play

STORIES = Path(__file__).parents[1] / "stories"


@pytest.mark.parametrize("name", SYMPTOMS)
def test_the_defect_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant, symptom = SYMPTOMS[name]
    told = (STORIES / f"{name}.txt").read_text(encoding="utf-8")
    mutant(monkeypatch)
    played = play(told)
    assert played != told
    assert symptom in played


@pytest.mark.parametrize("name", SYMPTOMS)
def test_without_the_defect_the_story_goes_as_told(name: str) -> None:
    _, symptom = SYMPTOMS[name]
    told = (STORIES / f"{name}.txt").read_text(encoding="utf-8")
    assert play(told) == told
    assert symptom not in told


def test_a_mutant_ends_with_its_test() -> None:
    """One mutant after the other leaves the product as it was."""
    for name, (mutant, _) in SYMPTOMS.items():
        told = (STORIES / f"{name}.txt").read_text(encoding="utf-8")
        with pytest.MonkeyPatch.context() as patch:
            mutant(patch)
            assert play(told) != told
        assert play(told) == told
