"""Tests that every row attends to what its layer sees, however the step is laid out."""

import pytest
import torch

from baton.engine.execution.attention_span import AttentionSpan, LayerAttention
from baton.engine.execution.paged_attention import PagedAttention
from baton.engine.execution.step_plan import make_plan
from baton.engine.kv_cache import PagedKvCache
from baton.engine_interface import Row, Sequence
from baton.ids import PageId
from baton.pages.layout import full_group
from baton.rooms.request import Request

HEADS, KV_HEADS, WIDTH = 6, 2, 16
GROUP = full_group("float32", 4, (7,), tuple(range(KV_HEADS)), WIDTH)
SPANS = ((0, 1), (8, 9), (30, 31), (199, 200), (0, 5), (0, 290), (3, 40), (130, 300))
"""Positions of rows: single tokens, whole prompts and later chunks, longer than a block and than any
window."""
SINKS = torch.randn(HEADS, generator=torch.Generator().manual_seed(5))
SIGHTS = {
    "everything": LayerAttention(0.3),
    "a window": LayerAttention(0.3, AttentionSpan(9)),
    "a window of one": LayerAttention(0.3, AttentionSpan(1)),
    "a wide window": LayerAttention(0.3, AttentionSpan(140)),
    "a window that none is past": LayerAttention(0.3, AttentionSpan(300)),
    "a chunk": LayerAttention(0.3, AttentionSpan(8, in_chunks=True)),
    "a wide chunk": LayerAttention(0.3, AttentionSpan(150, in_chunks=True)),
    "bounded": LayerAttention(0.3, softcap=0.7),
    "bounded, of a window": LayerAttention(0.3, AttentionSpan(9), softcap=0.7),
    "sinks": LayerAttention(0.3, sinks=SINKS),
    "all of it": LayerAttention(0.3, AttentionSpan(9), softcap=0.7, sinks=SINKS),
}


def right(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, attention: LayerAttention
) -> torch.Tensor:
    """Return attention of one row by its definition: [tokens, query heads, width].

    `keys`, `values`: [S, kv heads, width].
    """
    shared = HEADS // KV_HEADS
    keys, values = (each.repeat_interleave(shared, 1) for each in (keys, values))
    scores = torch.einsum("thd,shd->hts", query, keys) * attention.scaling
    if attention.softcap is not None:
        scores = torch.tanh(scores / attention.softcap) * attention.softcap
    for token in range(len(query)):
        position = start + token
        first = 0 if attention.span is None else max(0, attention.span.first(position))
        scores[:, token, :first] = scores[:, token, position + 1 :] = float("-inf")
    if attention.sinks is not None:
        scores = torch.cat((scores, attention.sinks[:, None, None].expand(-1, len(query), 1)), dim=2)
    weights = torch.softmax(scores, dim=2)[..., : len(keys)]
    return torch.einsum("hts,shd->thd", weights, values)


@pytest.mark.parametrize("name", SIGHTS)
def test_a_row_looks_at_what_its_layer_sees(name: str) -> None:
    attention = SIGHTS[name]
    numbers = torch.Generator().manual_seed(3)
    cpu = torch.device("cpu")
    cache = PagedKvCache(GROUP, 400, cpu)
    cache.tensor.normal_(generator=numbers)
    free = iter(torch.randperm(400, generator=numbers).tolist())
    rows = []
    for start, stop in SPANS:
        pages = tuple(PageId(next(free)) for _ in range(GROUP.pages_for(stop)))
        rows.append(Row(Sequence(Request("mine", (0,) * stop, 8), []), start, stop, (pages,), sample=True))
    plan = make_plan(rows, cache, cpu)
    tokens = plan.tokens.shape[1]
    query = torch.randn(tokens, HEADS, WIDTH, generator=numbers)
    entries = torch.randn(tokens, 2 * KV_HEADS, WIDTH, generator=numbers)
    spans = {} if attention.span is None else {7: attention.span}
    seen = PagedAttention(plan, cache, spans).attend(7, query, entries, attention)
    ends = dict(zip(map(id, rows), plan.keep.tolist(), strict=True))
    for row in rows:
        end = ends[id(row)] + 1
        span = slice(end - (row.stop - row.start), end)
        stored = cache.tensor[list(row.tables[0])][:, :, 0]  # [page, kv head, K V, token, width]
        keys, values = stored.permute(2, 0, 3, 1, 4).flatten(1, 2)[:, : row.stop]
        expected = right(query[span], keys, values, row.start, attention)
        torch.testing.assert_close(seen[span], expected, rtol=1e-4, atol=1e-5)
