"""What does FlashAttention compute over pages? Its twin on a CPU, in a few of torch's own calls."""

from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

from services.engine.paged import PagedRows


def twin(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: PagedRows, scaling: float
) -> torch.Tensor:
    """As `PagedKernel`: one row after the other, the last of its tokens sees all that are in its pages."""
    bounds, stops = rows.begins.tolist(), rows.stops.tolist()
    assert max(end - begin for begin, end in pairwise(bounds)) == rows.longest
    assert bounds[-1] == len(query)
    seen = []
    for row, stop in enumerate(stops):
        own = query[bounds[row] : bounds[row + 1]].transpose(0, 1)
        mine, theirs = (
            each[rows.tables[row]].flatten(0, 1)[:stop].transpose(0, 1) for each in (keys, values)
        )
        visible = torch.ones(own.shape[1], stop, dtype=torch.bool).tril(stop - own.shape[1])
        answer = scaled_dot_product_attention(
            own, mine, theirs, attn_mask=visible, scale=scaling, enable_gqa=True
        )
        seen.append(answer.transpose(0, 1))
    return torch.cat(seen)
