"""Is what one step fetched found again by the next one, and never where it is not the same any more?"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.engine.execution import kept
from baton.engine.execution.kept import FEW_PAGES, MORE_SLOTS, ROOM_PAGES, DecodeWorkspace, WorkspaceGroup
from baton.engine.kv_cache import PagedKvCache
from baton.engine.torch_engine import TorchEngine
from baton.engine_interface import DrawFailed, LogitsNotFinite, Row
from tests.engine.conftest import BATCH_MEMORY, MakeEngine
from tests.engine.engine_worker import ShuffledWorker, Tenant
from tests.engine.test_equals_reference import random_prompts
from tests.oracle import reference_greedy

TOKENS = 3 * 16 + 5
ARCHITECTURE = "llama-gqa-untied"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers whose pages were fetched, since it was last cleared."""
    seen: list[int] = []
    read = PagedKvCache.read

    def noting(self: PagedKvCache, layer: int, *rest: Any) -> None:
        seen.append(layer)
        read(self, layer, *rest)

    monkeypatch.setattr(PagedKvCache, "read", noting)
    return seen


def decoding(
    engine: TorchEngine, prompts: list[list[int]], tokens: int = TOKENS
) -> tuple[ShuffledWorker, list[Tenant]]:
    """Their prompts are computed."""
    worker = ShuffledWorker(engine, seed=5)
    tenants = [worker.admit(prompt, tokens) for prompt in prompts]
    worker.step(tenants, chunk=100)
    return worker, tenants


def cached_windows(engine: TorchEngine) -> DecodeWorkspace:
    assert engine._kept is not None
    return engine._kept


def test_the_pages_of_a_batch_are_fetched_once_and_again_when_a_sequence_outgrew_its_slot(
    tiny_dir: Callable[[str], Path],
    tiny_engine: MakeEngine,
    reads: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kept, "ROOM_PAGES", 2)
    prompts = random_prompts((20, 33, 20))
    engine = tiny_engine(ARCHITECTURE)
    worker, tenants = decoding(engine, prompts)
    fetching = []
    reads.clear()
    for step in range(TOKENS - 1):
        worker.step(tenants, chunk=100)
        if reads:
            fetching.append(step)
        reads.clear()
    pages = -(-(33 + 1) // 16)
    assert fetching == [0, (pages + 2) * 16 - 33]
    outputs = [tenant.sequence.output for tenant in tenants]
    assert outputs == reference_greedy(tiny_dir(ARCHITECTURE), prompts, TOKENS)


def test_one_that_comes_is_fetched_alone_and_one_that_goes_costs_no_fetch(
    tiny_dir: Callable[[str], Path], tiny_engine: MakeEngine, reads: list[int]
) -> None:
    prompts = random_prompts((20, 33, 20, 40))
    engine = tiny_engine(ARCHITECTURE)
    worker, tenants = decoding(engine, prompts)
    layers = len(engine.layout.layers)

    def fetched(*which: int) -> float:
        """Sequences that a step with some of them fetches."""
        reads.clear()
        worker.step([tenants[each] for each in which], chunk=100)
        return len(reads) / layers

    assert fetched(0, 1) == 2
    assert fetched(1, 0) == 0, "in whatever order they are asked for"
    assert fetched(0, 1, 2) == 1
    assert fetched(1, 2) == 0
    assert fetched(3, 2, 1) == 1
    assert fetched(3) == 0
    assert fetched(0, 1, 2, 3) == 3, "what paused may have been overwritten since"
    assert worker.run(tenants, 100) == reference_greedy(tiny_dir(ARCHITECTURE), prompts, TOKENS)


def test_more_sequences_than_there_are_slots_get_more_and_unlike_lengths_groups_of_their_own(
    tiny_dir: Callable[[str], Path], tiny_engine: MakeEngine
) -> None:
    prompts = random_prompts((9,) * (MORE_SLOTS + 3) + (100, 110))
    engine = tiny_engine(ARCHITECTURE)
    worker, tenants = decoding(engine, prompts)
    for count in range(1, len(tenants) + 1):
        worker.step(tenants[:count], chunk=100)
    assert len(cached_windows(engine)._groups) == 2
    assert worker.run(tenants, 100) == reference_greedy(tiny_dir(ARCHITECTURE), prompts, TOKENS)


@pytest.mark.parametrize("seed", range(6), ids="seed{}".format)
def test_sequences_that_come_go_and_pause_at_any_step_get_the_same_tokens(
    tiny_dir: Callable[[str], Path], tiny_engine: MakeEngine, seed: int
) -> None:
    numbers = random.Random(seed)
    prompts = random_prompts((7, 64, 100, 15, 16, 33, 90, 2))
    worker = ShuffledWorker(tiny_engine(ARCHITECTURE), seed)
    tenants = [worker.admit(prompt, TOKENS) for prompt in prompts]
    while not all(tenant.done for tenant in tenants):
        some = [tenant for tenant in tenants if numbers.random() < 0.8]
        for _ in range(numbers.randrange(1, 9)):
            worker.step(some, chunk=numbers.choice((5, 100)))
    outputs = [tenant.sequence.output for tenant in tenants]
    assert outputs == reference_greedy(tiny_dir(ARCHITECTURE), prompts, TOKENS)


def test_a_step_that_failed_leaves_nothing_that_is_relied_on(
    tiny_dir: Callable[[str], Path],
    tiny_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    reads: list[int],
) -> None:
    prompts = random_prompts((20, 33))
    worker, tenants = decoding(tiny_engine(ARCHITECTURE), prompts)
    worker.step(tenants, chunk=100)
    look_up, failures = WorkspaceGroup.look_up, iter([False, True])

    def failing(
        self: WorkspaceGroup, cache: PagedKvCache, place: int, layer: int, entries: torch.Tensor
    ) -> Any:
        """In the second layer, when the first has its new entries."""
        if next(failures, False):
            raise RuntimeError("the device is gone")
        return look_up(self, cache, place, layer, entries)

    with monkeypatch.context() as patch:
        patch.setattr(WorkspaceGroup, "look_up", failing)
        with pytest.raises(RuntimeError, match="the device is gone"):
            worker.step(tenants, chunk=100)
    reads.clear()
    worker.step(tenants, chunk=100)
    assert sorted(set(reads)) == list(worker.engine.layout.layers)
    assert worker.run(tenants, 100) == reference_greedy(tiny_dir(ARCHITECTURE), prompts, TOKENS)


def test_what_takes_too_much_memory_is_fetched_in_every_step_and_short_memory_is_used_up_first(
    tiny_engine: MakeEngine, reads: list[int]
) -> None:
    engine = tiny_engine(ARCHITECTURE)
    pages, size = engine.cache.group.pages_for(65), engine.cache.group.page_bytes
    most = BATCH_MEMORY // ((pages + FEW_PAGES) * size)
    assert (most + MORE_SLOTS) * (pages + ROOM_PAGES) * size > BATCH_MEMORY
    for count, again in ((most, False), (most + 1, True)):
        worker, tenants = decoding(engine, random_prompts((64,) * count), 3)
        worker.step(tenants, chunk=100)
        reads.clear()
        worker.step(tenants, chunk=100)
        assert bool(reads) is again


def test_a_step_that_failed_is_not_forgotten_by_one_that_keeps_nothing(
    tiny_dir: Callable[[str], Path],
    tiny_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    reads: list[int],
) -> None:
    """Two sequences go on after a step that failed and one without any of a single token."""
    prompts = random_prompts((20, 33))
    engine = tiny_engine(ARCHITECTURE)
    worker, tenants = decoding(engine, prompts)
    worker.step(tenants, chunk=100)
    with monkeypatch.context() as patch:
        patch.setattr("baton.engine.torch_engine.draw", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            worker.step(tenants, chunk=100)
    worker.step([worker.admit(prompts[0], 1)], chunk=100)
    for tenant in tenants:
        tenant.sequence.output.append(7)
    rows = [Row(each.sequence, each.computed + 1, each.computed + 2, (each.pages,), True) for each in tenants]
    reads.clear()
    engine.step(rows)
    assert len(reads) == 2 * len(engine.layout.layers)
    for tenant in tenants:
        tenant.sequence.output.pop()
    assert worker.run(tenants, 100) == reference_greedy(tiny_dir(ARCHITECTURE), prompts, TOKENS)


def test_what_a_mask_hides_is_a_number_whatever_the_memory_held(
    tiny_dir: Callable[[str], Path], tiny_engine: MakeEngine
) -> None:
    engine = tiny_engine(ARCHITECTURE)
    cached_windows(engine)._memory.fill_(float("nan"))
    cached_windows(engine)._groups = []
    prompts = random_prompts((20, 90, 33))
    worker, tenants = decoding(engine, prompts)
    assert worker.run(tenants, 100) == reference_greedy(tiny_dir(ARCHITECTURE), prompts, TOKENS)


def test_a_sequence_that_takes_a_slot_does_not_see_the_numbers_that_failed_there(
    tiny_dir: Callable[[str], Path], tiny_engine: MakeEngine
) -> None:
    prompts = random_prompts((40, 10))
    engine = tiny_engine(ARCHITECTURE)
    worker, tenants = decoding(engine, prompts)
    broken, sound = tenants
    engine.cache.tensor[broken.pages[0]] = float("nan")
    rows = [Row(each.sequence, each.computed, each.computed + 1, (each.pages,), True) for each in tenants]
    failed, taken = engine.step(rows)
    assert isinstance(failed, LogitsNotFinite)
    assert not isinstance(taken, DrawFailed)
    sound.computed += 1
    sound.sequence.output += [token.id for token in taken]
    assert worker.run([sound], 100) == reference_greedy(tiny_dir(ARCHITECTURE), prompts[1:], TOKENS)


def test_sequences_that_share_pages_and_one_that_takes_over_a_place_are_told_apart(
    tiny_dir: Callable[[str], Path], tiny_engine: MakeEngine
) -> None:
    """The second begins with the first one's pages; a third follows the first at the same position."""
    (prompt,) = random_prompts((48,))
    worker, (first,) = decoding(tiny_engine(ARCHITECTURE), [prompt])
    second = worker.admit([*prompt[:32], 9, 9, 9], TOKENS)
    second.pages, second.computed = first.pages[:2], 32
    worker.step([second], chunk=100)
    for _ in range(9):
        worker.step([first, second], chunk=100)
    third = worker.admit([*reversed(prompt)], TOKENS)
    worker.step([third], chunk=100)
    for _ in range(9):
        worker.step([third, second], chunk=100)
    outputs = worker.run([first, second, third], 100)
    prompts = [prompt, [*prompt[:32], 9, 9, 9], [*reversed(prompt)]]
    assert outputs == reference_greedy(tiny_dir(ARCHITECTURE), prompts, TOKENS)


def test_rows_are_known_by_their_sequence_and_position_not_by_their_pages(tiny_engine: MakeEngine) -> None:
    engine = tiny_engine(ARCHITECTURE)
    worker, (tenant,) = decoding(engine, random_prompts((20,)))
    worker.step([tenant], chunk=100)
    other = worker.admit(tenant.sequence.request.prompt, TOKENS)
    other.sequence.output.extend(tenant.sequence.output)
    stop = tenant.computed + 1
    for sequence, end, fetched in (
        (tenant.sequence, stop, 0),
        (other.sequence, stop + 1, 1),
        (other.sequence, stop + 2, 0),
        (other.sequence, stop + 2, 1),
    ):
        arranged = cached_windows(engine).arrange([Row(sequence, end - 1, end, (tenant.pages,), sample=True)])
        assert arranged is not None
        ((group,), _) = arranged
        assert len(group._arrived) == fetched
        cached_windows(engine).ended(well=True)
    cached_windows(engine)._groups = []
