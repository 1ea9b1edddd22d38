"""Do the ranks of a worker compute what one would, where not every token sees all before it?"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.pages.topology import Topology
from tests.engine import scenes, tiny
from tests.engine.crew import Crew
from tests.engine.matrix.table import TYPES
from tests.engine.test_equals_reference import random_prompts
from tests.oracle import reference_greedy

OUTPUT_TOKENS = 8
PROMPTS = random_prompts((5, 150))
CUT = {
    "mistral, window": Topology(2),
    "gemma2": Topology(2),
    "gpt-oss": Topology(2),
    "granite, windows and sinks": Topology(2),
    "command a": Topology(1, 2),
}


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    made = Crew()
    yield made
    made.close()


@pytest.mark.parametrize("name", CUT)
def test_tokens_of_several_ranks_are_those_of_generate(crew: Crew, tmp_path: Path, name: str) -> None:
    directory, topology = tiny.save(TYPES[name].make(), tmp_path / "mine"), CUT[name]
    expected = reference_greedy(directory, PROMPTS, OUTPUT_TOKENS)
    told = crew.play(topology, scenes.answers, directory, PROMPTS, OUTPUT_TOKENS, (40,), 2**23)
    assert [each["outputs"] for each in told] == [[expected]] * topology.ranks
