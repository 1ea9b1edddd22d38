"""Tests that the layout of a step has what its attention reads, and no more."""

import pytest
import torch

from baton.engine.execution.attention_span import AttentionSpan, LayerAttention
from baton.engine.execution.paged_attention import PagedAttention
from baton.engine.execution.step_plan import attention_mask, make_plan
from baton.engine.kv_cache import PagedKvCache
from baton.engine_interface import Row, Sequence
from baton.pages.layout import full_group
from baton.rooms.request import Request

GROUP = full_group("float32", 4, (0, 1, 2), (0, 1), 8)


def test_a_chunk_behind_a_prefix_has_no_mask_of_all_that_it_looks_at_where_it_looks_in_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    masks: list[tuple[int, int]] = []

    def noting(
        positions: torch.Tensor, width: int, like: torch.Tensor, span: AttentionSpan | None
    ) -> torch.Tensor:
        masks.append((len(positions), width))
        return attention_mask(positions, width, like, span)

    monkeypatch.setattr("baton.engine.execution.step_plan.attention_mask", noting)
    cpu = torch.device("cpu")
    sequence = Sequence(Request("mine", tuple(range(30)), 8), [])
    rows = [Row(sequence, 10, 29, (range(8),), sample=False), Row(sequence, 29, 30, (range(8),), sample=True)]
    cache = PagedKvCache(GROUP, 8, cpu)
    plan = make_plan(rows, cache, cpu)
    (continued,) = plan.continued
    assert (continued.begin, continued.end, continued.keys.shape) == (1, 20, (2, 29, 8))
    for layer in GROUP.layers:
        PagedAttention(plan, cache, {1: AttentionSpan(9)}).attend(
            layer, torch.zeros(20, 2, 8), torch.zeros(20, 4, 8), LayerAttention(1.0)
        )
    # One of all layers that see alike.
    assert masks == [(1, 32), (1, 32)]
