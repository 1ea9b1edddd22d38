"""Masks that exclude the tokens which a request's grammar does not allow.

They apply before anything else that changes scores. So log-probabilities are relative to the allowed tokens.
Masks are made on the CPU and applied on the device of the logits.
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
"""Table [256, 8] of biases, 0 or -inf: for each byte of a mask, those of its eight tokens.

They are added to the scores, so that NaN stays NaN.
"""


def grammar_masks(sequences: abc.Sequence[Sequence]) -> list[bytes | GrammarLost]:
    """Return a mask of allowed tokens for each of `sequences`, all of which have grammars, in their order.

    A mask has one bit per token id, the lowest first. For an output that cannot follow its grammar there is a
    GrammarLost in place of a mask.
    """
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
    """Return `scores` with -inf for the tokens that the masks of `rows` do not allow.

    `scores`: [rows, vocabulary], float32. A row whose mask is a GrammarLost stays unchanged.
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
