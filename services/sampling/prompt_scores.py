"""How likely did the model find the tokens of a prompt?

The logits at a position score the token that stands behind it. They are of the model alone: whatever changes
how an answer is drawn does not change them. A step scores so many positions at most that their logits take a
bounded part of memory, which is looked at some rows at a time.
"""

from collections import abc
from typing import Final

import torch

from baton.sampling.sampler import likeliest_places

LOGITS_BYTES: Final = 64 * 2**20
"""Of a step's scored positions, in float32."""
BESIDE_BYTES: Final = 2 * LOGITS_BYTES
"""What scoring takes of a device at most: a definition's own logits, too."""
POSITIONS_MIN: Final = 16
ROWS_AT_ONCE: Final = 32


def scored_at_once(vocabulary: int) -> int:
    """Positions of one step, of all its rows together."""
    return max(LOGITS_BYTES // (4 * vocabulary), POSITIONS_MIN)


def score(logits: torch.Tensor, ids: abc.Sequence[int], top: int) -> list[float]:
    """For each of `logits` [N, vocabulary] the log-probability of its one of `ids`, how many tokens are as
    likely at least, and `top` pairs of the likeliest: id, log-probability. NaN where the logits are no
    numbers."""
    told: list[float] = []
    for begin in range(0, len(ids), ROWS_AT_ONCE):
        raw = logits[begin : begin + ROWS_AT_ONCE].float()
        logprobs = torch.log_softmax(raw, dim=-1)
        places = torch.tensor(ids[begin : begin + ROWS_AT_ONCE], device=raw.device)[:, None]
        own = logprobs.gather(1, places)
        # A CPU adds up numbers many times faster than truth values; float32 counts exactly up to 2**24.
        rank = torch.ge(logprobs, own, out=torch.empty_like(logprobs)).sum(dim=-1, keepdim=True)
        likeliest = likeliest_places(raw, top)
        pairs = torch.stack((likeliest.double(), logprobs.gather(1, likeliest).double()), dim=-1)
        told += torch.cat((own.double(), rank.double(), pairs.flatten(1)), dim=-1).flatten().tolist()
    return told
