"""A reference of FlashAttention over pages, on a CPU, in a few of torch's own calls."""

from itertools import pairwise

import torch

from baton.engine.execution.attention_span import LayerAttention
from baton.engine.execution.paged_rows import PagedRows, UnsupportedAttention


def twin(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: PagedRows, attention: LayerAttention
) -> torch.Tensor:
    """Attend row by row. Arguments as in `PagedKernel`."""
    bounds, stops = rows.begins.tolist(), rows.stops.tolist()
    assert max(end - begin for begin, end in pairwise(bounds)) == rows.longest
    assert bounds[-1] == len(query)
    if attention.softcap is not None or (attention.span is not None and attention.span.in_chunks):
        raise UnsupportedAttention("so")
    seen = []
    for row, stop in enumerate(stops):
        own = query[bounds[row] : bounds[row + 1]].transpose(0, 1)
        shared = len(own) // keys.shape[2]
        mine, theirs = (
            each[rows.tables[row]].flatten(0, 1)[:stop].transpose(0, 1).repeat_interleave(shared, 0)
            for each in (keys, values)
        )
        visible = torch.ones(own.shape[1], stop, dtype=torch.bool).tril(stop - own.shape[1])
        if attention.span is not None:
            visible &= visible.new_ones(visible.shape).triu(stop - own.shape[1] - attention.span.tokens + 1)
        scores = (own @ mine.transpose(1, 2) * attention.scaling).masked_fill(~visible, float("-inf"))
        if attention.sinks is not None:
            scores = torch.cat((scores, attention.sinks[:, None, None].expand(-1, own.shape[1], 1)), dim=2)
        weights = torch.softmax(scores.float(), dim=2).to(query.dtype)[..., :stop]
        seen.append((weights @ theirs).transpose(0, 1))
    return torch.cat(seen)
