"""Tests that the KV cache keeps every byte when it moves, and that the engine continues unchanged."""

from dataclasses import replace

import pytest
import torch

from baton.engine.kv_cache import PagedKvCache
from baton.pages.layout import full_group
from baton.runtime.host_memory import CannotMove, Movable
from tests.engine.conftest import MakeEngine
from tests.inference.engine_worker import ShuffledWorker

GROUP = full_group("bfloat16", 4, (0, 1, 2), (0, 1), 8)
PAGES = 6
CPU = torch.device("cpu")


def filled() -> PagedKvCache:
    cache = PagedKvCache(GROUP, PAGES, CPU)
    cache.tensor.view(torch.int16).random_(-(2**15), 2**15)
    return cache


def raw(cache: PagedKvCache) -> torch.Tensor:
    """Bits, NaN included."""
    return cache.tensor.view(torch.int16).clone()


def test_a_move_keeps_every_bit_at_another_address() -> None:
    cache = filled()
    memory: Movable = cache
    assert (memory.length, memory.device) == (PAGES * GROUP.page_bytes, "cpu")
    before, address = raw(cache), cache.address
    memory.move()
    assert cache.address != address
    assert cache.address % 4096 == 0
    assert cache.tensor.data_ptr() == cache.address
    assert torch.equal(raw(cache), before)


def test_reads_and_writes_follow_the_move_and_the_old_address_changes_nothing() -> None:
    cache = filled()
    old, before = cache.tensor, raw(cache)
    cache.move()
    old.fill_(1.0)
    assert torch.equal(raw(cache), before)
    tokens = torch.arange(GROUP.page_tokens)
    keys = torch.cat([tokens, tokens + cache.rows_per_head]) + cache.rows_per_page  # page 1, both heads
    rows = torch.cat([keys, keys + GROUP.page_tokens])
    for layer in range(3):
        entries = torch.full((len(keys), cache.head_dim), 10.0 + layer, dtype=torch.bfloat16)
        cache.write(layer, rows, torch.cat([entries, -entries]))
        out = torch.empty(1, 2, 2, GROUP.page_tokens * cache.head_dim, dtype=torch.bfloat16)
        cache.read(layer, torch.tensor([1]), out)
        assert (out[:, :, 0] == 10.0 + layer).all()
        assert (out[:, :, 1] == -10.0 - layer).all()
    cache.clear_tail(1, 3)
    assert (cache.tensor[1, :, :, :, 3:] == 0).all()
    untouched = [0, 2, 3, 4, 5]
    assert torch.equal(raw(cache)[untouched], before[untouched])


def test_a_sequence_goes_on_after_a_move_as_if_there_had_been_none(tiny_engine: MakeEngine) -> None:
    engine = tiny_engine("llama-gqa-untied")
    prompts = [[5, 9, 40, 2, 77], list(range(60, 90)), [1]]

    def answers(moving: bool) -> list[list[int]]:
        worker = ShuffledWorker(engine)
        tenants = [worker.admit(prompt, max_tokens=12) for prompt in prompts]
        while not all(tenant.done for tenant in tenants):
            worker.step(tenants, chunk=7)
            if moving:
                old = engine.cache.tensor
                engine.cache.move()
                old.fill_(float("nan"))
        return [tenant.sequence.output for tenant in tenants]

    assert answers(moving=True) == answers(moving=False)


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_memory_of_another_device_is_not_moved_and_stays_as_it_is(device: str) -> None:
    cache = PagedKvCache(GROUP, PAGES, torch.device(device))
    tensor = cache.tensor
    with pytest.raises(CannotMove, match=f"{device} cannot be moved within its process"):
        cache.move()
    assert cache.tensor is tensor


def test_a_head_of_a_page_is_one_run_of_bytes_and_layers_go_by_their_ids() -> None:
    """Hand-overs between differing tensor-parallel sizes and pipeline ranks rely on it."""
    group = replace(GROUP, layers=(4, 5, 6), heads=(2, 3))
    cache = PagedKvCache(group, PAGES, CPU)
    cache.tensor.zero_()
    row = 3 * cache.rows_per_page + cache.rows_per_head + 2  # page 3, head 3, token 2
    ones = torch.ones(1, cache.head_dim, dtype=torch.bfloat16)
    cache.write(5, torch.tensor([row, row + group.page_tokens]), torch.cat([ones, 2 * ones]))
    vector = group.vector_bytes(group.planes[0])
    layer = len(group.planes) * group.page_tokens * vector
    head = len(group.layers) * layer
    at = 3 * group.page_bytes + head + layer + 2 * vector
    memory = cache.tensor.view(torch.uint8).flatten()
    for start, value in ((at, 1.0), (at + group.page_tokens * vector, 2.0)):
        assert (memory[start : start + vector].view(torch.bfloat16) == value).all()
        memory[start : start + vector] = 0
    assert not memory.any()
