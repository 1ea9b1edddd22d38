"""Which tokens may be drawn, where an output is held to a grammar?

Before anything else that changes scores: what is drawn, and what is told of how likely it was, is of the
tokens that the grammar allows. The masks are made on the CPU, and applied where the logits are.
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
"""What a byte of a mask adds to the scores of its eight tokens. It is added, so that what is no number stays
none."""


def allowed_by_grammars(sequences: abc.Sequence[Sequence]) -> list[bytes | GrammarLost]:
    """For each of `sequences`, which have grammars: a bit for each token, the lowest first."""
    return [_allowed(each) for each in sequences]


def _allowed(sequence: Sequence) -> bytes | GrammarLost:
    if sequence.fold is None:
        return GrammarLost("it was not compiled")
    try:
        return sequence.fold.allowed(sequence.request, sequence.output)
    except GrammarLost as error:
        return error


Masks = abc.Sequence[bytes | GrammarLost]


def hold(scores: torch.Tensor, rows: abc.Sequence[int], masks: Masks) -> torch.Tensor:
    """`scores` [rows, vocabulary], float32, of which `rows` have `masks`: -inf for what is not allowed. A row
    that has none because its grammar is lost stays as it is."""
    found = [(row, mask) for row, mask in zip(rows, masks, strict=True) if not isinstance(mask, GrammarLost)]
    if not found:
        return scores
    count, vocabulary, device = len(found), scores.shape[1], scores.device
    bits = torch.frombuffer(bytearray(b"".join(mask for _, mask in found)), dtype=torch.uint8).to(device)
    biases = embedding(bits.int(), BIASES.to(device)).view(count, -1)[:, :vocabulary]
    if biases.shape[1] < vocabulary:  # a draft model's, whose width is another
        biases = pad(biases, (0, vocabulary - biases.shape[1]), value=float("-inf"))
    places = [row for row, _ in found]
    if places == [*range(len(scores))]:
        return scores + biases  # half the time
    return scores.index_add(0, torch.tensor(places, device=device), biases)
