"""Tests that a row that cannot be computed is refused before anything is computed."""

import pytest
import torch

from baton.engine.execution.step_plan import groups_of_similar_length
from baton.engine.torch_engine import TorchEngine
from baton.engine_interface import EngineLost, Row, Sequence
from baton.inference.collectives import alone
from baton.rooms.request import Request
from tests.engine.conftest import MakeEngine
from tests.engine.engine_worker import GREEDY

PROMPT = tuple(range(40))


@pytest.fixture
def engine(tiny_engine: MakeEngine) -> TorchEngine:
    return tiny_engine("llama-gqa-untied")


def sequence(prompt: tuple[int, ...] = PROMPT, output: tuple[int, ...] = ()) -> Sequence:
    return Sequence(Request("mine", prompt, max_tokens=8, sampling=GREEDY), list(output))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (Row(sequence(), 0, 33, ([0, 1],), sample=False), "mine: 33 tokens need 3 pages, the table has 2"),
        (
            Row(sequence(), 0, 41, ([0, 1, 2],), sample=False),
            r"mine: positions \[0, 41\) of a sequence of 40",
        ),
        (Row(sequence(), 8, 8, ([0],), sample=False), r"mine: positions \[8, 8\)"),
        (Row(sequence(), -1, 8, ([0],), sample=False), r"mine: positions \[-1, 8\)"),
        (Row(sequence(), 0, 39, ([0, 1, 2],), sample=True), "mine: token 39 is known already"),
        (Row(sequence(), 0, 8, ([-1],), sample=False), "mine: page -1 of a cache of"),
        (Row(sequence(), 0, 8, ([10**6],), sample=False), "mine: page 1000000 of a cache of"),
        (Row(sequence((5, 131)), 0, 2, ([0],), sample=True), "mine: token id 131 of a vocabulary of 131"),
        (Row(sequence((5, -1)), 0, 2, ([0],), sample=True), "mine: token id -1 of a vocabulary of 131"),
        (
            Row(sequence(), 39, 40, (range(3),), True, (7,) * 9),
            "mine: 49 tokens need 4 pages, the table has 3",
        ),
        (Row(sequence(), 0, 16, ([0],), False, (7,)), "mine: 1 drafts of a row that draws nothing"),
        (Row(sequence(), 39, 40, (range(4),), True, (7, 131)), "mine: token id 131 of a vocabulary of 131"),
        (Row(sequence((1,) * 511), 510, 511, (range(40),), True, (7, 7)), "position 512 in a model of 512"),
        (Row(sequence((1,) * 600), 500, 513, (range(40),), sample=False), "position 512 in a model of 512"),
    ],
    ids=lambda each: each[:24] if isinstance(each, str) else "",
)
def test_bad_row_changes_nothing(engine: TorchEngine, row: Row, message: str) -> None:
    engine.cache.tensor.fill_(3.0)
    good = Row(sequence(), 0, 16, ([5],), sample=False)
    with pytest.raises(ValueError, match=message):
        engine.step([good, row])
    assert torch.all(engine.cache.tensor == 3.0)


def test_a_step_of_no_rows(engine: TorchEngine) -> None:
    assert engine.step([]) == []


def test_a_step_in_which_nobody_samples(engine: TorchEngine) -> None:
    assert engine.step([Row(sequence(), 0, 16, ([5],), sample=False)]) == [()]


def test_a_step_writes_its_own_pages_only(engine: TorchEngine) -> None:
    engine.cache.tensor.fill_(3.0)
    engine.step(
        [Row(sequence(), 0, 40, ([7, 2, 9],), sample=True), Row(sequence(), 0, 1, ([4],), sample=False)]
    )
    written = (engine.cache.tensor != 3.0).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert written == [2, 4, 7, 9]


def test_answers_come_in_the_order_of_the_rows(engine: TorchEngine) -> None:
    """However the step arranges them inside."""
    rows = [
        Row(sequence(), 0, 40, ([0, 1, 2],), sample=True),
        Row(sequence((9,)), 0, 1, ([3],), sample=True),
        Row(sequence(), 0, 20, ([4, 5],), sample=False),
        Row(sequence((1, 2, 3)), 0, 3, ([6],), sample=True),
    ]
    together = engine.step(rows)
    assert together == [engine.step([row])[0] for row in rows]
    assert together[2] == ()


def test_an_engine_whose_device_is_lost_says_so_in_a_step_and_in_a_sum(engine: TorchEngine) -> None:
    def lose() -> None:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    lost = TorchEngine(
        engine.model, engine.whole, engine.cache, alone(), engine.execution, engine.runner, flush=lose
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
