"""Check whether a transformers implementation with its own attention can run over pages, row by row.

Pages suffice if an implementation needs nothing of earlier tokens but their keys, values and positions. To
check that, two sequences are computed in alternating chunks. The results are compared with those of each
whole sequence without a cache (`probe-can-fail`).
"""

from typing import Final

import torch

from baton.engine.execution.attention_span import Geometry
from baton.engine.execution.row_by_row import LibraryDefinition
from baton.engine.loading.capability_probes import (
    COUNTING,
    OTHER_SHAPES,
    ROUNDING,
    TOLERANCES,
    WINDOW,
    cached_windows,
    gap,
)
from baton.models.model_facts import ModelFacts, UnsupportedModel

WHOLE: Final = 24
"""Number of tokens of each of the two test sequences."""
CHUNKS: Final = ((0, 13), (13, 20), (20, 21), (21, WHOLE))
"""Ranges [begin, end) of token positions, the chunks in which the check computes each test sequence."""
LAST: Final = 4
"""Number of the last positions of the context that the transformers implementation has to compute in the
check."""


class RecordedCache:
    """Cache of one sequence for the check, which stores keys and values by layer and counts its updates."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.updates = 0

    def __call__(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.updates += 1
        before = self.layers.get(layer)
        if before is not None:
            keys, values = (torch.cat(pair, 2) for pair in zip(before, (keys, values), strict=True))
        self.layers[layer] = (keys, values)
        return keys, values


def check_row_by_row(
    facts: ModelFacts, definition: LibraryDefinition, device: torch.device, dtype: str
) -> Geometry:
    """Check that the transformers implementation can run row by row, and return the sizes of its keys and
    values.

    Raises UnsupportedModel if it needs more of earlier tokens than keys, values and positions. Errors of the
    implementation are raised, too.
    """
    name, config, context_length = facts.name, definition.config, facts.context_length
    kind = config.model_type
    numbers = torch.Generator().manual_seed(5)
    whole = min(WHOLE, context_length)
    both = torch.randint(facts.vocab_size, (2, 1, whole), generator=numbers).to(device)
    if any(tokens < context_length for tokens in cached_windows(config).values()):
        raise UnsupportedModel.needing(name, kind, [WINDOW])
    alone = [definition.logits(tokens, 0, None) for tokens in both]
    at_once, chunked = (RecordedCache(), RecordedCache()), (RecordedCache(), RecordedCache())
    together = [definition.logits(tokens, 0, cache) for tokens, cache in zip(both, at_once, strict=True)]
    logits: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    chunks = [(begin, min(end, whole)) for begin, end in CHUNKS if begin < whole]
    for begin, end in chunks:
        for tokens, cache, parts in zip(both, chunked, logits, strict=True):
            parts.append(definition.logits(tokens[:, begin:end], begin, cache))

    geometry = _geometry(name, kind, chunked[0], definition.layers, len(chunks))
    close = all(
        gap(torch.cat(mine), right) <= TOLERANCES[dtype] and gap(one, right) <= TOLERANCES[dtype]
        for mine, one, right in zip(logits, together, alone, strict=True)
    )
    for mine, right in zip(chunked, at_once, strict=True):
        for layer, pair in mine.layers.items():
            bound = TOLERANCES[dtype] if layer else ROUNDING[dtype]
            close &= all(gap(*each) <= bound for each in zip(pair, right.layers[layer], strict=True))
    if not close:
        raise UnsupportedModel.needing(name, kind, [COUNTING])
    _compute_the_end(definition, geometry, context_length, both[0, :, :LAST])
    return geometry


def _geometry(name: str, kind: str, cache: RecordedCache, layers: int, passes: int) -> Geometry:
    if sorted(cache.layers) != list(range(layers)) or cache.updates != layers * passes:
        raise UnsupportedModel.needing(name, kind, ["keys and values that are not once per numbered layer"])
    shapes = {each.shape for pair in cache.layers.values() for each in pair}
    if len(shapes) > 1:
        raise UnsupportedModel.needing(name, kind, [OTHER_SHAPES])
    _, kv_heads, _, head_dim = shapes.pop()
    return Geometry(layers, query_heads=kv_heads, kv_heads=kv_heads, head_dim=head_dim)


def _compute_the_end(
    definition: LibraryDefinition, geometry: Geometry, context_length: int, tokens: torch.Tensor
) -> None:
    """Compute a few tokens at the last positions of the context. The transformers implementation raises if
    its tables of positions are shorter."""

    def store(_: int, keys: torch.Tensor, __: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        zeros = keys.new_zeros(1, 1, 1, 1).expand(1, geometry.kv_heads, context_length, geometry.head_dim)
        return zeros, zeros

    definition.logits(tokens, context_length - tokens.shape[1], store)
