"""Check whether a transformers implementation with its own attention can run over pages, row by row.

Pages suffice if an implementation needs nothing of earlier tokens but their keys, values and positions, and
the states of its layers. To check that, two sequences are computed in alternating chunks. The results are
compared with those of each whole sequence without a cache (`probe-can-fail`).

Some implementations compute a single token otherwise than several, and not to the same numbers. The library's
`generate` computes a prompt at once and each further token alone. So do steps then, and the results are
compared with those over the library's own cache.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Final

import torch

from baton.engine.execution.attention_span import Geometry, LayerStates, StateTensor
from baton.engine.execution.row_by_row import LibraryDefinition
from baton.engine.execution.row_cache import States
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
from baton.pages.layout import GROUPS_MAX, PLANES_MAX

WHOLE: Final = 24
"""Number of tokens of each of the two test sequences."""
CHUNKS: Final = ((0, 13, 14, 15, 16, 21, WHOLE), (0, 1, 3, 16, WHOLE))
"""Token positions at which the chunks of each test sequence begin, and the end of the last."""
GENERATED: Final = ((0, *range(20, WHOLE + 1)), (0, *range(17, WHOLE + 1)))
"""The same for a prompt that is computed at once and further tokens that are computed alone."""
STATE_TOLERANCES: Final = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest relative difference at which a prompt in chunks counts as equal to a whole one, of a model with
states, by number format."""
LAST: Final = 4
"""Number of the last positions of the context that the transformers implementation has to compute in the
check."""
ONCE: Final = "keys and values that are not once per numbered layer"
CONTINUED: Final = "states that it does not continue in the middle of a prompt"
OTHER_STATES: Final = "states of which the shape depends on the sequence"
MANY_STATES: Final = "states of more shapes than there are groups of pages"


class RecordedMemory:
    """Memory of one sequence for the check, which stores keys, values and states by layer and counts
    updates."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.states: dict[int, States] = {}
        self.updates = 0
        self.rows = 0
        """Number of forward passes over this memory."""

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.updates += 1
        before = self.layers.get(layer)
        if before is not None:
            keys, values = (torch.cat(pair, 2) for pair in zip(before, (keys, values), strict=True))
        self.layers[layer] = (keys, values)
        return keys, values

    def load_states(self, layer: int) -> States:
        return {name: state.clone() for name, state in self.states.get(layer, {}).items()}

    def store_states(self, layer: int, states: States) -> None:
        self.states[layer] = dict(states)

    def tensors(self) -> Mapping[int, tuple[StateTensor, ...]]:
        """Return the state tensors of each layer that has some."""
        return {
            layer: tuple(StateTensor(name, tuple(each.shape[1:]), each.dtype) for name, each in own.items())
            for layer, own in self.states.items()
            if own
        }


class BlankMemory:
    """Memory of a sequence of `length` tokens whose keys, values and states are zero."""

    def __init__(self, geometry: Geometry, length: int, device: torch.device) -> None:
        self._length = length
        self._device = device
        self._tensors = geometry.state_tensors

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        del layer
        zero = keys.new_zeros(1, 1, 1, 1)
        shapes = ((1, each.shape[1], self._length, each.shape[3]) for each in (keys, values))
        both = [zero.expand(shape) for shape in shapes]
        return both[0], both[1]

    def load_states(self, layer: int) -> States:
        return {
            each.name: torch.zeros(1, *each.shape, dtype=each.dtype, device=self._device)
            for each in self._tensors.get(layer, ())
        }

    def store_states(self, layer: int, states: States) -> None:
        """Do nothing, since no row follows."""


def check_row_by_row(
    facts: ModelFacts, definition: LibraryDefinition, device: torch.device, dtype: str
) -> tuple[Geometry, bool]:
    """Check that the transformers implementation can run row by row.

    Returns the sizes of what its layers store, and whether a prompt may be computed in chunks. Raises
    UnsupportedModel if the implementation needs more of earlier tokens than keys, values, positions and
    states. Its own errors are raised, too.
    """
    name, kind, context_length = facts.name, definition.config.model_type, facts.context_length
    numbers = torch.Generator().manual_seed(5)
    whole = min(WHOLE, context_length)
    both = torch.randint(facts.vocab_size, (2, 1, whole), generator=numbers).to(device)
    if any(tokens < context_length for tokens in cached_windows(definition.config).values()):
        raise UnsupportedModel.needing(name, kind, [WINDOW])
    alone = [definition.logits(tokens, 0, None) for tokens in both]
    at_once, together = _computed(definition, both, ((0, whole), (0, whole)))
    chunked, logits = _computed(definition, both, CHUNKS)
    geometry = _geometry(name, kind, definition, at_once, chunked)
    end = BlankMemory(geometry, context_length, device)
    definition.logits(both[0, :, :LAST], context_length - min(LAST, whole), end)
    if not _close(zip(together, alone, strict=True), TOLERANCES[dtype]):
        raise UnsupportedModel.needing(name, kind, [COUNTING])
    tolerance = (STATE_TOLERANCES if geometry.states else TOLERANCES)[dtype]
    pairs = zip(chunked, at_once, strict=True)
    if _close(zip(logits, alone, strict=True), tolerance) and all(
        small for pair in pairs for small in _gaps_are_small(*pair, dtype)
    ):
        return geometry, True
    if not geometry.states:
        raise UnsupportedModel.needing(name, kind, [COUNTING])
    _, logits = _computed(definition, both, GENERATED)
    chunks = [chunks_between(each, whole) for each in GENERATED]
    expected = [definition.own_logits(*each) for each in zip(both, chunks, strict=True)]
    if not _close(zip(logits, expected, strict=True), TOLERANCES[dtype]):
        raise UnsupportedModel.needing(name, kind, [CONTINUED])
    return geometry, False


def _computed(
    definition: LibraryDefinition, both: torch.Tensor, bounds: Sequence[Sequence[int]]
) -> tuple[list[RecordedMemory], list[torch.Tensor]]:
    """Compute both test sequences in alternating chunks. Return the memory and the logits of each.

    `bounds`: positions between which the chunks of each sequence lie.
    """
    memories = [RecordedMemory() for _ in both]
    logits: list[list[torch.Tensor]] = [[] for _ in both]
    for turn in zip_longest(*(chunks_between(each, both.shape[2]) for each in bounds)):
        for chunk, tokens, memory, parts in zip(turn, both, memories, logits, strict=True):
            if chunk is not None:
                memory.rows += 1
                parts.append(definition.logits(tokens[:, slice(*chunk)], chunk[0], memory))
    return memories, [torch.cat(parts) for parts in logits]


def chunks_between(bounds: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Return the ranges [begin, end) between `bounds`, as far as they lie before `length`."""
    return [(begin, min(end, length)) for begin, end in pairwise(bounds) if begin < length]


def _close(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], tolerance: float) -> bool:
    return all(gap(mine, right) <= tolerance for mine, right in pairs)


def _gaps_are_small(mine: RecordedMemory, right: RecordedMemory, dtype: str) -> Iterator[bool]:
    for layer, pair in mine.layers.items():
        bound = TOLERANCES[dtype] if layer else ROUNDING[dtype]
        yield all(gap(*each) <= bound for each in zip(pair, right.layers[layer], strict=True))
    for layer, states in mine.states.items():
        yield all(gap(each, right.states[layer][name]) <= TOLERANCES[dtype] for name, each in states.items())


def _geometry(
    name: str,
    kind: str,
    definition: LibraryDefinition,
    at_once: Sequence[RecordedMemory],
    chunked: Sequence[RecordedMemory],
) -> Geometry:
    """Return the sizes of what layers store."""
    layers, first = definition.attention_layers, at_once[0]
    for memory in (*at_once, *chunked):
        if sorted(memory.layers) != list(layers) or memory.updates != len(layers) * memory.rows:
            raise UnsupportedModel.needing(name, kind, [ONCE])
        if memory.tensors() != first.tensors():
            raise UnsupportedModel.needing(name, kind, [OTHER_STATES])
    states = states_of(first)
    if len(states) + bool(layers) > GROUPS_MAX or any(len(each.tensors) > PLANES_MAX for each in states):
        raise UnsupportedModel.needing(name, kind, [MANY_STATES])
    heads, head_dim, latent = _attention_sizes(name, kind, first)
    return Geometry(definition.layers, heads, heads, head_dim, latent, tuple(layers), states)


def _attention_sizes(name: str, kind: str, memory: RecordedMemory) -> tuple[int, int, tuple[int, int] | None]:
    """Return the number of KV heads and the elements of a key, all 0 without attention.

    The third is the elements of key and value if they differ, of a single head that all query heads share
    (MLA).
    """
    shapes = {
        (keys.shape[1], values.shape[1], keys.shape[3], values.shape[3])
        for keys, values in memory.layers.values()
    }
    if not shapes:
        return 0, 0, None
    key_heads, value_heads, key, value = shapes.pop()
    if shapes or key_heads != value_heads or (key != value and key_heads > 1):
        raise UnsupportedModel.needing(name, kind, [OTHER_SHAPES])
    return key_heads, key, None if key == value else (key, value)


def states_of(memory: RecordedMemory) -> tuple[LayerStates, ...]:
    """Return the state tensors of a sequence. Layers with the same ones are together."""
    layers: dict[tuple[StateTensor, ...], list[int]] = {}
    for layer, tensors in sorted(memory.tensors().items()):
        layers.setdefault(tensors, []).append(layer)
    return tuple(LayerStates(tuple(those), tensors) for tensors, those in layers.items())
