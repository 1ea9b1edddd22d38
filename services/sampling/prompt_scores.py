"""Computation of log-probabilities of prompt tokens.

The logits at a position score the next token. They are the model's own: sampling options do not change them.
The number of positions that a step scores is bounded, so that their logits take bounded memory. They are read
some rows at a time.
"""

from collections import abc
from typing import Final

import torch

from baton.sampling.sampler import likeliest_ids

LOGITS_BYTES: Final = 64 * 2**20
"""Most bytes of logits, in float32, that one step uses to score prompt tokens."""
SCORING_BYTES: Final = 2 * LOGITS_BYTES
"""Most bytes of device memory that scoring takes in a step, with the logits in the model's own format."""
POSITIONS_MIN: Final = 16
ROWS_AT_ONCE: Final = 32


def scored_positions_max(vocabulary: int) -> int:
    """Return the most prompt positions that a step may score over all its rows, given the vocabulary's
    size."""
    return max(LOGITS_BYTES // (4 * vocabulary), POSITIONS_MIN)


def score(logits: torch.Tensor, ids: abc.Sequence[int], top: int) -> list[float]:
    """Return the log-probabilities of the tokens `ids`, as a flat list of numbers.

    `logits`: [N, vocabulary], at the positions before these tokens. `top`: number of likeliest tokens to list
    at each position.
    For each token: its log-probability, its rank (how many tokens are at least as likely), and `top` pairs of
    id and log-probability. NaN if the logits are not finite.
    """
    numbers: list[float] = []
    for begin in range(0, len(ids), ROWS_AT_ONCE):
        raw = logits[begin : begin + ROWS_AT_ONCE].float()
        logprobs = torch.log_softmax(raw, dim=-1)
        places = torch.tensor(ids[begin : begin + ROWS_AT_ONCE], device=raw.device)[:, None]
        own = logprobs.gather(1, places)
        # A CPU adds up numbers many times faster than truth values; float32 counts exactly up to 2**24.
        rank = torch.ge(logprobs, own, out=torch.empty_like(logprobs)).sum(dim=-1, keepdim=True)
        likeliest = likeliest_ids(raw, top)
        pairs = torch.stack((likeliest.double(), logprobs.gather(1, likeliest).double()), dim=-1)
        numbers += torch.cat((own.double(), rank.double(), pairs.flatten(1)), dim=-1).flatten().tolist()
    return numbers
