"""Small forward pass that finds the state mixers of a model, and what its layers store of a sequence.

It also runs without weights, on the meta device, so each rank of several learns the sizes of the whole model.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, NoReturn

import torch
from transformers.cache_utils import Cache

from baton.engine.execution.paged_attention import use_attention
from baton.engine.execution.row_cache import StateLayer, layer_makers
from baton.engine.execution.state_mixers import StateMixer, UnknownMixer, find_mixers, wrap_mixers
from baton.engine.loading.capability_probes import AttentionProbe
from baton.engine.loading.library_report import first_line
from baton.engine.loading.rank_shard import StoredStates
from baton.engine.loading.row_by_row_probe import RecordedMemory, states_of
from baton.engine.loading.text_model import text_of
from baton.models.model_facts import ModelFacts, UnsupportedModel

TOKENS: Final = 4
EXPERTS: Final = "_experts_implementation"
WITHOUT_VALUES: Final = "batched_mm"
"""Implementation of experts in transformers whose shapes do not depend on which experts are chosen."""
FAILURES: Final = (RuntimeError, AttributeError, TypeError, ValueError, LookupError, UnknownMixer)


def find_state_mixers(module: Any, facts: ModelFacts, device: torch.device) -> list[StateMixer]:
    """Return the state mixers of `module`. Raises UnknownMixer and errors of the implementation."""
    return _probe(module, facts, device)[0]


def _probe(module: Any, facts: ModelFacts, device: torch.device) -> tuple[list[StateMixer], RecordedMemory]:
    memory = RecordedMemory()
    layers = [make(0, memory) for make in layer_makers(text_of(module.config))]
    tokens = torch.arange(TOKENS, device=device)[None] % facts.vocab_size
    cache_argument = "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"

    def compute(cache: Cache) -> None:
        with torch.inference_mode(), use_attention(AttentionProbe(facts.context_length)):
            module(input_ids=tokens, use_cache=True, **{cache_argument: cache})

    mixers = find_mixers(module, layers, compute)
    for index, layer in enumerate(layers):
        if isinstance(layer, StateLayer):
            memory.store_states(index, layer.states)
    return mixers, memory


def probe_without_weights(module: Any, facts: ModelFacts) -> tuple[StoredStates, dict[str, StateMixer]]:
    """Return what the layers of a whole model store, and its state mixers by path.

    `module`: the transformers implementation with our attention. It is moved to the meta device. Raises
    UnsupportedModel.
    """
    try:
        with _any_experts(text_of(module.config)):
            mixers, memory = _probe(module.to("meta"), facts, torch.device("meta"))
    except FAILURES as error:
        refuse_by_ranks(facts.name, module, f"states of known shapes ({first_line(error)})")
    if not memory.layers:
        refuse_by_ranks(facts.name, module, "a layer with attention")
    paths = {id(each): path for path, each in module.named_modules()}
    stored = StoredStates(tuple(sorted(memory.layers)), states_of(memory))
    return stored, {paths[id(each.module)]: each for each in mixers}


def wrap_at(module: Any, mixers: Mapping[str, StateMixer]) -> list[StateMixer]:
    """Wrap the modules at the paths of `mixers` in `module`, and return these."""
    found = [replace(each, module=module.get_submodule(path)) for path, each in mixers.items()]
    wrap_mixers(found)
    return found


def refuse_divided_mixers(name: str, module: Any, paths: Iterable[str], cuts: Iterable[str]) -> None:
    """Raise UnsupportedModel if a weight of a state mixer is divided among ranks.

    `paths`: those of the mixers. `cuts`: names of the divided weights.
    """
    divided = list(cuts)
    for path in paths:
        if any(each.startswith(f"{path}.") for each in divided):
            refuse_by_ranks(
                name, module, f"states divided among ranks, as its tensor-parallel plan does with {path}"
            )


@contextmanager
def _any_experts(config: Any) -> Iterator[None]:
    own = getattr(config, EXPERTS, None)
    if own is not None:
        setattr(config, EXPERTS, WITHOUT_VALUES)
    try:
        yield
    finally:
        if own is not None:
            setattr(config, EXPERTS, own)


def refuse_by_ranks(name: str, module: Any, need: str) -> NoReturn:
    """Raise UnsupportedModel for what several ranks lack to serve a model with states."""
    raise UnsupportedModel(
        f"the model {name} ({module.config.model_type}) cannot be served by several ranks: it needs {need}"
    )
