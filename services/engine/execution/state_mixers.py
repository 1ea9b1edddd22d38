"""State mixers: modules of a transformers implementation that continue a state, such as linear attention.

In a step, a mixer gets the flat batch of tokens of many sequences. Its forward is wrapped here: rows of one
token are computed together, as a batch of sequences of one token. Longer rows follow one by one. Each call
gets a cache with the states of its rows, which come from their pages and go back there.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from transformers.cache_utils import Cache, LinearAttentionLayer

from baton.engine.execution.attention_span import StateTensor
from baton.engine.execution.row_cache import StateLayer, States, state_index
from baton.engine.execution.step_plan import divide_rows
from baton.engine.kv_cache import EngineCache, PagedStates
from baton.engine_interface import Row

Compute: TypeAlias = Callable[[torch.Tensor, Cache | None], torch.Tensor]
"""A mixer's own forward. Takes hidden states [sequences, tokens, width] and a cache of the sequences."""


StateTensors: TypeAlias = Mapping[int, Sequence[StateTensor]]
"""State tensors of one sequence by layer id."""


class UnknownMixer(Exception):
    """A module continues a state in a way that rows of several sequences cannot be computed."""


@dataclass(frozen=True, slots=True)
class StateMixer:
    """A module that continues the states of one layer."""

    layer: int
    module: Any
    cache_argument: str
    """Name of the argument of its forward that is the cache."""


class _WatchedCache(Cache):  # type: ignore[misc]
    """A cache that reports each update of a state to `updated`, a function of the layer's id."""

    updated: Callable[[int], None]

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **named: Any
    ) -> torch.Tensor:
        self.updated(layer_idx)
        found: torch.Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **named)
        return found

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **named: Any
    ) -> torch.Tensor:
        self.updated(layer_idx)
        found: torch.Tensor = super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **named)
        return found


def find_mixers(module: Any, layers: Sequence[Any], compute: Callable[[Cache], object]) -> list[StateMixer]:
    """Return the modules in `module` that update states of the cache that they get in a forward pass.

    `layers`: caches of all layers at the beginning of a sequence. `compute`: a forward pass of `module` with
    a cache. Raises UnknownMixer.
    """
    cache = _WatchedCache(layers=list(layers))
    calls: list[tuple[Any, str]] = []
    found: dict[int, tuple[Any, str]] = {}

    def enter(called: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        bound = inspect.signature(called.forward).bind_partial(*given, **named).arguments
        calls.append((called, next((name for name, each in bound.items() if each is cache), "")))

    def leave(*_: object) -> None:
        calls.pop()

    def updated(layer: int) -> None:
        called = next((each for each in reversed(calls) if each[1]), None)
        if called is None or found.setdefault(layer, called)[0] is not called[0]:
            raise UnknownMixer("states that several modules of a layer update")

    cache.updated = updated
    hooks = [each.register_forward_pre_hook(enter, with_kwargs=True) for each in module.modules()]
    hooks += [each.register_forward_hook(leave, always_call=True) for each in module.modules()]
    try:
        compute(cache)
    finally:
        for hook in hooks:
            hook.remove()
    if len({id(called) for called, _ in found.values()}) < len(found):
        raise UnknownMixer("states of several layers that one module updates")
    return [StateMixer(layer, *called) for layer, called in sorted(found.items())]


def check_mixers(mixers: Sequence[StateMixer], tensors: StateTensors) -> None:
    """Raise UnknownMixer unless each layer with state `tensors` has a mixer, and no other layer has one."""
    if {each.layer for each in mixers} != tensors.keys():
        raise UnknownMixer("states of a layer that no module updates")


MixFunction: TypeAlias = Callable[[int, torch.Tensor, Compute], torch.Tensor]
"""Function (layer id, hidden states [1, T, width], the mixer's own forward) that returns a mixer's results
[1, T, width] for the tokens of one forward pass."""


def each_token_alone(_: int, hidden: torch.Tensor, compute: Compute) -> torch.Tensor:
    """Compute each token as the first of a sequence, without states. For forward passes that check other
    parts."""
    return compute(hidden.transpose(0, 1), None).transpose(0, 1)


_mix: ContextVar[MixFunction] = ContextVar("mix", default=each_token_alone)


@contextmanager
def use_states(mix: MixFunction) -> Iterator[None]:
    """Make wrapped mixers call `mix` within the context, on this thread."""
    token = _mix.set(mix)
    try:
        yield
    finally:
        _mix.reset(token)


def wrap_mixers(mixers: Sequence[StateMixer]) -> None:
    """Make the forward of each mixer compute over the rows of a step, by the function of `use_states`.

    Outside of its context, each token is computed by itself, as the first of a sequence.
    """
    for each in mixers:
        each.module.forward = _over_rows(each)


def unwrap_mixers(mixers: Sequence[StateMixer]) -> None:
    """Undo `wrap_mixers`."""
    for each in mixers:
        del each.module.forward


def _over_rows(mixer: StateMixer) -> Callable[..., torch.Tensor]:
    forward, signature = mixer.module.forward, inspect.signature(mixer.module.forward)
    hidden_argument = next(iter(signature.parameters))

    def over_rows(*given: Any, **named: Any) -> torch.Tensor:
        bound = signature.bind(*given, **named)

        def compute(hidden: torch.Tensor, cache: Cache | None) -> torch.Tensor:
            bound.arguments |= {hidden_argument: hidden, mixer.cache_argument: cache}
            result = forward(*bound.args, **bound.kwargs)
            if not isinstance(result, torch.Tensor):
                raise TypeError(f"a state mixer that returns a {type(result).__name__}")
            return result

        return _mix.get()(mixer.layer, bound.arguments[hidden_argument], compute)

    return over_rows


class _MixedRows(NamedTuple):
    """Rows of a step that a mixer computes in one call: tokens [begin, end) of `rows` sequences."""

    begin: int
    end: int
    rows: slice
    continued: bool
    """Whether the rows have states of earlier tokens."""


class StatePages:
    """The pages in which the states of a rank's layers lie."""

    def __init__(self, caches: Sequence[EngineCache], tensors: StateTensors, device: torch.device) -> None:
        """`caches`: caches of all KV groups. `tensors`: state tensors of each layer of the model."""
        self.device = device
        self._tensors = tensors
        self.groups = [
            (number, cache) for number, cache in enumerate(caches) if isinstance(cache, PagedStates)
        ]
        """Index and cache of each KV group of states."""
        self._group_of = {
            layer: place for place, (_, cache) in enumerate(self.groups) for layer in cache.group.layers
        }
        self._number_of_states = {
            layer: 1 + max(state_index(each.name) for each in tensors[layer]) for layer in self._group_of
        }
        layers = 1 + max(self._group_of, default=-1)
        self.library = Cache(layers=[LinearAttentionLayer() for _ in range(layers)])
        """Cache that mixers get, in which the layer in use has its states."""

    def continued(
        self,
        layer: int,
        hidden: torch.Tensor,
        pages: Sequence[torch.Tensor],
        compute: Compute,
        *,
        loaded: bool,
    ) -> torch.Tensor:
        """Return a mixer's results for rows with states, which are stored in their pages.

        `pages`: page ids of the rows, by group. `loaded`: whether the rows begin with the states there.
        """
        place = self._group_of[layer]
        stored, own = self.groups[place][1].states(layer), pages[place]
        states: States = {}
        if loaded:
            states = {
                each.name: stored[each.name][own].view(-1, *each.shape).to(each.dtype)
                for each in self._tensors[layer]
            }
        state_layer = StateLayer(self._number_of_states[layer], states)
        self.library.layers[layer] = state_layer
        try:
            result = compute(hidden, self.library)
        finally:
            self.library.layers[layer] = LinearAttentionLayer()
        after = state_layer.states
        for each in self._tensors[layer]:
            stored[each.name].index_copy_(0, own, after[each.name].flatten(1).float())
        return result


class StateStep:
    """Computes mixers over the rows of one step, with the states in their pages."""

    def __init__(self, rows: Sequence[Row], pages: StatePages) -> None:
        """`rows`: rows of the step, of which the plan of the batch is made, too."""
        single, longer = divide_rows(rows)
        together = sum(row.start > 0 for row in single)  # sorted by length, so the others are last
        self._parts = [_MixedRows(0, together, slice(0, together), True)] if together else []
        begin = together
        for index, row in enumerate([*single[together:], *longer], together):
            end = begin + row.stop - row.start
            self._parts.append(_MixedRows(begin, end, slice(index, index + 1), row.start > 0))
            begin = end
        laid = [*single, *longer]
        self._together = together
        self._pages = pages
        self._own = [
            torch.tensor([row.tables[number][0] for row in laid], device=pages.device)
            for number, _ in pages.groups
        ]

    def __call__(self, layer: int, hidden: torch.Tensor, compute: Compute) -> torch.Tensor:
        """Return the results of the mixer of `layer`, as a `MixFunction`."""
        results = []
        for index, part in enumerate(self._parts):
            own = hidden[:, part.begin : part.end]
            turned = index == 0 and self._together > 0
            result = self._pages.continued(
                layer,
                own.transpose(0, 1) if turned else own,
                [each[part.rows] for each in self._own],
                compute,
                loaded=part.continued,
            )
            results.append(result.transpose(0, 1) if turned else result)
        return results[0] if len(results) == 1 else torch.cat(results, 1)
