"""Masks of the tokens that a grammar allows.

They apply before anything else that changes scores. So drawn tokens and their log-probabilities are those of
the allowed tokens. Masks are made on the CPU and applied on the device of the logits.
"""

from collections import abc
from typing import Final

import torch
from torch.nn.functional import embedding, pad

from baton.engine_interface import Sequence
from baton.grammars.grammar_state import GrammarLost

BITS: Final = 8
BIASES: Final = torch.tensor(
    [[0.0 if byte >> bit & 1 else float("-inf") for bit in range(BITS)] for byte in range(1 << BITS)]
)
"""[256, 8]: what a byte of a mask adds to the scores of its eight tokens. It is added so that NaN stays
NaN."""


def grammar_masks(sequences: abc.Sequence[Sequence]) -> list[bytes | GrammarLost]:
    """Return the mask of each of `sequences`, which have grammars: one bit a token, the lowest first."""
    return [_allowed(each) for each in sequences]


def _allowed(sequence: Sequence) -> bytes | GrammarLost:
    if sequence.fold is None:
        return GrammarLost("it was not compiled")
    try:
        return sequence.fold.allowed(sequence.request, sequence.output)
    except GrammarLost as error:
        return error


GrammarMasks = abc.Sequence[bytes | GrammarLost]


def apply_masks(scores: torch.Tensor, rows: abc.Sequence[int], masks: GrammarMasks) -> torch.Tensor:
    """Return `scores` [rows, vocabulary], float32, with -inf for tokens that the `masks` of `rows` do not
    allow.

    A row whose mask is a GrammarLost stays unchanged.
    """
    found = [(row, mask) for row, mask in zip(rows, masks, strict=True) if not isinstance(mask, GrammarLost)]
    if not found:
        return scores
    count, vocabulary, device = len(found), scores.shape[1], scores.device
    bits = torch.frombuffer(bytearray(b"".join(mask for _, mask in found)), dtype=torch.uint8).to(device)
    biases = embedding(bits.int(), BIASES.to(device)).view(count, -1)[:, :vocabulary]
    if biases.shape[1] < vocabulary:  # a draft model with another vocabulary width
        biases = pad(biases, (0, vocabulary - biases.shape[1]), value=float("-inf"))
    places = [row for row, _ in found]
    if places == [*range(len(scores))]:
        return scores + biases  # takes half the time
    return scores.index_add(0, torch.tensor(places, device=device), biases)
