"""Tests that an engine refuses wrong rows before anything is computed, and writes what its rows are given."""

import pytest
import torch

from baton.engine_interface import Row, Sequence
from baton.inference.step_engine import StepEngine
from baton.rooms.request import Request
from tests.inference.engine_worker import GREEDY, memory_of

FAR = 10**6


def sequence(length: int = 40, output: tuple[int, ...] = ()) -> Sequence:
    prompt = tuple(each % 100 for each in range(length))
    return Sequence(Request("mine", prompt, max_tokens=8, sampling=GREEDY), list(output))


def pages(engine: StepEngine, tokens: int, first: int = 0) -> range:
    return range(first, first + engine.cache.group.pages_for(tokens))


WRONG = {
    "table": "mine: .* tokens need .* pages, the table has",
    "unknown": r"mine: positions \[0, 41\) of a sequence of 40",
    "empty": r"mine: positions \[8, 8\)",
    "negative": r"mine: positions \[-1, 8\)",
    "known": "mine: token 39 is known already",
    "page": "mine: page -1 of a cache of",
    "far page": f"mine: page {FAR} of a cache of",
    "id": "mine: token id .* of a vocabulary of",
    "negative id": "mine: token id -1 of a vocabulary of",
    "drafts": "mine: 1 drafts of a row that draws nothing",
    "draft id": "mine: token id .* of a vocabulary of",
    "context": "mine: position .* in a model of",
}


def wrong_row(engine: StepEngine, kind: str) -> Row:
    known, table, unknown = sequence(), (pages(engine, 50),), engine.vocab_size
    size, context = engine.cache.group.page_tokens, engine.context_length
    rows = {
        "table": lambda: Row(sequence(4 * size), 0, 4 * size, (range(3),), sample=False),
        "unknown": lambda: Row(known, 0, 41, table, sample=False),
        "empty": lambda: Row(known, 8, 8, table, sample=False),
        "negative": lambda: Row(known, -1, 8, table, sample=False),
        "known": lambda: Row(known, 0, 39, table, sample=True),
        "page": lambda: Row(known, 0, 8, ([-1],), sample=False),
        "far page": lambda: Row(known, 0, 8, ([FAR],), sample=False),
        "id": lambda: Row(sequence(2, (unknown,)), 0, 3, table, sample=True),
        "negative id": lambda: Row(sequence(2, (-1,)), 0, 3, table, sample=True),
        "drafts": lambda: Row(known, 0, 16, table, False, (7,)),
        "draft id": lambda: Row(known, 39, 40, table, True, (7, unknown)),
        "context": lambda: Row(
            sequence(context + 1), context - 1, context + 1, ([0] * (context + 1),), sample=False
        ),
    }
    return rows[kind]()


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_row_fails_its_step_before_anything_is_computed(engine: StepEngine, kind: str) -> None:
    """The right row beside it fails, too."""
    before = memory_of(engine).clone()
    good = Row(sequence(), 0, 40, (pages(engine, 40, 5),), sample=True)
    with pytest.raises(ValueError, match=WRONG[kind]):
        engine.step([good, wrong_row(engine, kind)])
    assert torch.equal(memory_of(engine), before)


def test_a_step_of_no_rows(engine: StepEngine) -> None:
    assert engine.step([]) == []


def test_a_step_in_which_no_row_draws(engine: StepEngine) -> None:
    known = sequence()
    assert engine.step([Row(known, 0, 40, (pages(engine, 40),), sample=False)]) == [()]
    engine.release(known)


def test_a_step_writes_its_own_pages_only(engine: StepEngine) -> None:
    memory_of(engine).fill_(3)
    size = engine.cache.group.page_tokens
    long, short = sequence(2 * size + 8), sequence(1)
    engine.step([Row(long, 0, 2 * size + 8, ([7, 2, 9],), True), Row(short, 0, 1, ([4],), False)])
    written = (memory_of(engine) != 3).any(dim=1).nonzero().flatten().tolist()
    assert written == [2, 4, 7, 9]
    for each in (long, short):
        engine.release(each)


def test_results_come_in_the_order_of_the_rows(engine: StepEngine) -> None:
    """However the step arranges them inside."""
    memory_of(engine).fill_(0)
    sequences, lengths, drawing = [], (40, 1, 20, 3), (True, True, False, True)
    rows, first = [], 0
    for length, draws in zip(lengths, drawing, strict=True):
        sequences.append(sequence(length))
        table = pages(engine, length, first)
        first = table.stop
        rows.append(Row(sequences[-1], 0, length, (table,), sample=draws))
    together = engine.step(rows)
    for each in sequences:
        engine.release(each)
    alone = []
    for row in rows:
        again = Row(sequence(row.stop), 0, row.stop, row.tables, row.sample)
        alone += engine.step([again])
        engine.release(again.sequence)
    assert together == alone
    assert together[2] == ()
