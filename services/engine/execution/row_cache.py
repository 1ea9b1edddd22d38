"""Cache of one row, in the form that the transformers library calls, over memory that somebody else owns.

A layer with attention gives its new keys and values to the memory and gets those of all tokens so far. Other
layers have a state (linear attention, state space, short convolution). They get the state before the row from
the memory, and give it the state after the row.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

States = Mapping[str, torch.Tensor]
"""State tensors of one layer and sequence by name, each [1, …]."""
CONVOLUTION: Final = "conv"
RECURRENT: Final = "recurrent"


class RowMemory(Protocol):
    """Memory of one sequence: keys and values of its tokens, and the states of its layers."""

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values, and return those of all tokens so far.

        All are [1, kv heads, tokens, head_dim].
        """

    def load_states(self, layer: int) -> States:
        """Return a layer's states after the tokens before the row. Empty at the beginning of a sequence."""

    def store_states(self, layer: int, states: States) -> None:
        """Store a layer's states after the tokens of the row."""


class AttentionLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer for one row."""

    is_sliding = False

    def __init__(self, layer: int, begin: int, memory: RowMemory) -> None:
        super().__init__()
        self._layer = layer
        self._length = begin
        self._memory = memory
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing, since the memory exists already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._length += key_states.shape[2]
        return self._memory.update(self._layer, key_states, value_states)

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        return -1


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """States of one layer for one row: the library's own layer, which begins with states from the memory."""

    def __init__(self, number_of_states: int, states: States) -> None:
        """`states`: states after the tokens before the row. The layer changes them in place."""
        LinearAttentionLayer.__init__(self, number_of_states)
        for index in range(number_of_states):
            convolution = states.get(_name(CONVOLUTION, index))
            recurrent = states.get(_name(RECURRENT, index))
            if convolution is not None:
                self.conv_states[index] = convolution
                self.conv_kernel_size[index] = convolution.shape[-1]
                self.is_conv_states_initialized[index] = True
                self.dtype, self.device = convolution.dtype, convolution.device
            if recurrent is not None:
                self.recurrent_states[index] = recurrent
                self.is_recurrent_states_initialized[index] = True
            self.has_previous_state[index] = bool(states)

    @property
    def states(self) -> States:
        """States after the tokens computed so far, by name."""
        found: dict[str, torch.Tensor] = {}
        for kind, each in ((CONVOLUTION, self.conv_states), (RECURRENT, self.recurrent_states)):
            found |= {_name(kind, index): state for index, state in each.items() if state is not None}
        return found


class AttentionAndStateLayer(StateLayer, AttentionLayer):
    """Keys, values and states of one layer for one row."""

    def __init__(
        self, layer: int, begin: int, memory: RowMemory, number_of_states: int, states: States
    ) -> None:
        AttentionLayer.__init__(self, layer, begin, memory)
        StateLayer.__init__(self, number_of_states, states)

    def get_max_length(self) -> int:
        return -1


def _name(kind: str, index: int) -> str:
    return f"{kind}{index}" if index else kind


def state_index(name: str) -> int:
    """Return the index of a state tensor among those of its kind, by its name."""
    return int("".join(filter(str.isdigit, name)) or 0)


MakeLayer = Callable[[int, RowMemory], Any]
"""Function (position of the row's first token, memory) that returns the cache of one layer."""


def layer_makers(config: Any) -> list[MakeLayer]:
    """Return for each layer the function that makes its cache, of the kind in the library's own cache of
    `config`."""
    return [_layer_maker(index, layer) for index, layer in enumerate(DynamicCache(config=config).layers)]


def attention_layers(config: Any) -> tuple[int, ...]:
    """Return the ids of the layers that store keys and values, by the library's own cache of `config`."""
    layers = enumerate(DynamicCache(config=config).layers)
    return tuple(index for index, layer in layers if isinstance(layer, CacheLayerMixin))


def stores_states(config: Any) -> bool:
    """Return whether the library's own cache of `config` has a layer with a state."""
    return any(
        isinstance(each, LinearAttentionCacheLayerMixin) for each in DynamicCache(config=config).layers
    )


def _layer_maker(index: int, own: Any) -> MakeLayer:
    if not isinstance(own, CacheLayerMixin | LinearAttentionCacheLayerMixin):  # reads no other tokens
        return lambda _begin, _memory: type(own)()
    if not isinstance(own, LinearAttentionCacheLayerMixin):
        return lambda begin, memory: AttentionLayer(index, begin, memory)
    count = own.number_of_states
    if isinstance(own, CacheLayerMixin):
        return lambda begin, memory: AttentionAndStateLayer(
            index, begin, memory, count, memory.load_states(index)
        )
    return lambda _begin, memory: StateLayer(count, memory.load_states(index))


class RowCache:
    """Cache of one row of a model with all its layers."""

    def __init__(self, makers: Sequence[MakeLayer], begin: int, memory: RowMemory) -> None:
        """`makers`: those that `layer_makers` returns. `begin`: position of the row's first token."""
        self._memory = memory
        self.library = Cache(layers=[make(begin, memory) for make in makers])
        """The cache in the library's form, to be passed to a forward pass."""

    def store_states(self) -> None:
        """Store the states of all layers in the memory after the forward pass."""
        for index, layer in enumerate(self.library.layers):
            if isinstance(layer, StateLayer):
                self._memory.store_states(index, layer.states)
