"""Penalties and biases that change a request's scores before a token is sampled.

They apply in this order: repetition penalty, presence and frequency penalties, the client's logit biases.
Last, end tokens are excluded until `min_tokens` is reached, so that no bias brings them back.
"""

from dataclasses import dataclass, field

import torch

from baton.engine_interface import Sequence


@dataclass(slots=True, eq=False)
class SeenTokens:
    """Sampler state of a sequence: its distinct tokens up to some position, which the repetition penalty
    needs."""

    stop: int = 0
    """Number of the sequence's known tokens, prompt and then output, that are included so far."""
    ids: set[int] = field(default_factory=set)
    on_device: torch.Tensor | None = None
    """The same token ids as a tensor on the device of the scores."""


def seen_tokens(sequence: Sequence) -> SeenTokens:
    """Return the distinct tokens that a sequence has seen. Every call returns the same object."""
    state = sequence.sampler_state
    if not isinstance(state, SeenTokens):
        state = sequence.sampler_state = SeenTokens()
    return state


def changes_scores(sequence: Sequence) -> bool:
    """Return whether the request has penalties, biases or a minimum length that change its scores now."""
    sampling = sequence.request.sampling
    return _delays_end(sequence) or (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or bool(sampling.logit_bias)
    )


def adjust(scores: torch.Tensor, sequence: Sequence) -> None:
    """Apply penalties, biases and the minimum length to one request's `scores` [vocabulary], float32, in
    place.

    Ids outside the vocabulary cannot be sampled, and are ignored.
    """
    request = sequence.request
    sampling = request.sampling
    if sampling.repetition_penalty != 1.0:
        seen = _seen(sequence, scores)
        old = scores[seen]
        scores[seen] = torch.where(
            old < 0, old * sampling.repetition_penalty, old / sampling.repetition_penalty
        )
    if sequence.output and (sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0):
        counts = torch.bincount(_ids(sequence.output, scores), minlength=len(scores))
        scores -= counts * sampling.frequency_penalty + (counts > 0) * sampling.presence_penalty
    if sampling.logit_bias:
        biases = [(token, bias) for token, bias in sampling.logit_bias if 0 <= token < len(scores)]
        ids = torch.tensor([token for token, _ in biases], dtype=torch.int64, device=scores.device)
        scores.index_add_(0, ids, scores.new_tensor([bias for _, bias in biases]))
    if _delays_end(sequence):
        scores[_ids(request.ending_token_ids, scores)] = float("-inf")


def _delays_end(sequence: Sequence) -> bool:
    """Return whether `min_tokens` forbids the answer to end at the next token. False with a grammar, which
    decides that itself."""
    request = sequence.request
    return len(sequence.output) < request.min_tokens and request.grammar is None


def _seen(sequence: Sequence, scores: torch.Tensor) -> torch.Tensor:
    """Return the distinct tokens of the sequence as a tensor on the device of the scores. Only tokens since
    the last call are added to it."""
    seen = seen_tokens(sequence)
    new = set(sequence.tokens(seen.stop, sequence.length)) - seen.ids
    seen.ids |= new
    seen.stop = sequence.length
    if seen.on_device is None:
        seen.on_device = _ids([*new], scores)
    elif new:
        seen.on_device = torch.cat((seen.on_device, _ids([*new], scores)))
    return seen.on_device


def _ids(tokens: tuple[int, ...] | list[int], scores: torch.Tensor) -> torch.Tensor:
    ids = torch.tensor(tokens, dtype=torch.int64)
    return ids[(ids >= 0) & (ids < len(scores))].to(scores.device)
