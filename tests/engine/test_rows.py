"""Tests of rows, and of an engine that is warm or whose device is lost. `tests/inference` has the others."""

import pytest
import torch

from baton.engine.execution.step_plan import groups_of_similar_length
from baton.engine.torch_engine import TorchEngine
from baton.engine_interface import EngineLost, Row, Sequence
from baton.inference.collectives import alone
from baton.rooms.request import Request
from tests.engine.conftest import MakeEngine
from tests.inference.engine_worker import GREEDY

PROMPT = tuple(range(40))


@pytest.fixture
def engine(tiny_engine: MakeEngine) -> TorchEngine:
    return tiny_engine("llama-gqa-untied")


def sequence(prompt: tuple[int, ...] = PROMPT, output: tuple[int, ...] = ()) -> Sequence:
    return Sequence(Request("mine", prompt, max_tokens=8, sampling=GREEDY), list(output))


def test_an_engine_whose_device_is_lost_says_so_in_a_step_and_in_a_sum(engine: TorchEngine) -> None:
    def lose() -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    lost = TorchEngine(
        engine.model, engine.whole, [engine.cache], alone(), engine.execution, engine.runner, flush=lose
    )
    with pytest.raises(EngineLost, match="illegal memory access"):
        lost.step([Row(sequence(), 0, 16, ([5],), sample=False)])
    with pytest.raises(EngineLost, match="illegal memory access"):
        lost.sum_pages([])


def test_warm_up_leaves_a_working_engine_however_small(engine: TorchEngine, tiny_engine: MakeEngine) -> None:
    engine.warm_up()
    tiny_engine("llama-gqa-untied", 4096).warm_up()
    assert tiny_engine("llama-gqa-untied", 4096).cache.pages == 1


def test_tokens_across_prompt_and_output() -> None:
    known = sequence((1, 2, 3), (4, 5))
    assert known.length == 5
    for start in range(6):
        for stop in range(start, 6):
            assert list(known.tokens(start, stop)) == [1, 2, 3, 4, 5][start:stop]


@pytest.mark.parametrize(
    ("pages", "ends"),
    [
        ([], []),
        ([4], [1]),
        ([40, 40, 30, 26], [4]),
        ([40, 30, 20, 19, 1], [2, 5]),
        ([100, 70, 70, 60, 50], [1, 4, 5]),
    ],
)
def test_rows_are_grouped_as_long_as_padding_costs_less_than_another_group(
    pages: list[int], ends: list[int]
) -> None:
    assert groups_of_similar_length(pages) == ends
