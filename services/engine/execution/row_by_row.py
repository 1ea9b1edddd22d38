"""Runner that computes each row by itself, by the transformers implementation with its own attention.

It serves models whose attention is not the library's common one, for example with biases by distance (ALiBi),
or positions that are counted by the cache. It also serves models whose layers have a state, such as linear
attention. Each layer calls a cache as in the library's `generate` (`row_cache.py`). Here its memory is our
pages. No two rows are computed together, and all pages of a row are read in every step.
"""

import inspect
from collections import abc
from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from baton.engine.execution.attention_span import Geometry, StateTensor
from baton.engine.execution.execution_kind import ExecutionKind
from baton.engine.execution.row_cache import RowCache, RowMemory, States, attention_layers, layer_makers
from baton.engine.kv_cache import EngineCache, PagedKvCache, PagedStates
from baton.engine_interface import Row
from baton.inference.runner import StatelessRunner


class LibraryDefinition:
    """The transformers implementation of a model, called as the library's `generate` calls it."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.config = module.config
        self._text = module.config.get_text_config(decoder=True)
        self._makers = layer_makers(self._text)
        self.layers = len(self._makers)
        self.attention_layers = attention_layers(self._text)
        """Ids of the layers that store keys and values, ascending."""
        parameters = inspect.signature(module.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._takes_positions = "position_ids" in parameters
        self._takes_wanted = "logits_to_keep" in parameters

    def logits(
        self, tokens: torch.Tensor, begin: int, memory: RowMemory | None, *, last: bool = False
    ) -> torch.Tensor:
        """Return the logits [T, vocabulary] of `tokens` [1, T], or [1, vocabulary] of the `last` token only.

        `begin`: position of the first token. `memory`: has the keys, values and states of earlier tokens, and
        gets those of `tokens`. If None, the transformers implementation gets no cache and counts positions
        itself.
        """
        cache = None if memory is None else RowCache(self._makers, begin, memory)
        logits = self._computed(tokens, begin, None if cache is None else cache.library, last=last)
        if cache is not None:
            cache.store_states()
        return logits

    def own_logits(self, tokens: torch.Tensor, chunks: abc.Sequence[tuple[int, int]]) -> torch.Tensor:
        """Return the logits [T, vocabulary] of `tokens` [1, T], computed in `chunks` over the library's own
        cache."""
        cache = DynamicCache(config=self._text)
        return torch.cat([self._computed(tokens[:, slice(*chunk)], chunk[0], cache) for chunk in chunks])

    def _computed(
        self, tokens: torch.Tensor, begin: int, cache: Cache | None, *, last: bool = False
    ) -> torch.Tensor:
        stop = begin + tokens.shape[1]
        given: dict[str, Any] = {"use_cache": cache is not None}
        if cache is not None:
            given[self._cache_argument] = cache
            if self._takes_positions:
                given["position_ids"] = torch.arange(begin, stop, device=tokens.device)[None]
        if last and self._takes_wanted:
            given["logits_to_keep"] = 1
        if self.attention_layers:
            given["attention_mask"] = torch.ones(1, stop, dtype=torch.int64, device=tokens.device)
        with torch.inference_mode():
            logits: torch.Tensor = self._module(input_ids=tokens, **given).logits[0]
        return logits[-1:] if last else logits


class RowByRowExecution:
    """Execution of a model by the transformers implementation with its own attention, one row after the
    other."""

    kind = ExecutionKind.ROW_BY_ROW

    def __init__(
        self, definition: LibraryDefinition, geometry: Geometry, vocab_size: int, weight_bytes: int
    ) -> None:
        """`geometry`: sizes of what the layers of `definition` cache."""
        self.weight_bytes = weight_bytes
        self._definition = definition
        self._geometry = geometry
        self._vocab_size = vocab_size

    def runner(self, caches: abc.Sequence[EngineCache]) -> "RowByRowRunner":
        return RowByRowRunner(self._definition, self._geometry, self._vocab_size, caches)


class RowByRowRunner(StatelessRunner):
    """Runner that computes one row after the other, by the transformers implementation with its own
    attention."""

    def __init__(
        self,
        definition: LibraryDefinition,
        geometry: Geometry,
        vocab_size: int,
        caches: abc.Sequence[EngineCache],
    ) -> None:
        """`caches`: caches of the KV groups of `geometry`, in their order."""
        self._definition = definition
        self._vocab_size = vocab_size
        self._device = torch.device(caches[0].device)
        self._caches = caches
        self._states = geometry.state_tensors

    def logits(self, rows: abc.Sequence[Row]) -> torch.Tensor:
        """Return the logits of a step as `Runner.logits` does. Draft tokens are computed together with their
        row."""
        logits = [self._row_logits(row) for row in rows]
        return torch.cat(logits) if logits else torch.empty(0, self._vocab_size, device=self._device)

    def _row_logits(self, row: Row) -> torch.Tensor:
        tokens = torch.tensor([row.fed], device=self._device)
        last = not row.scored and not row.drafts
        memory = PagedRow(row, self._caches, self._states)
        logits = self._definition.logits(tokens, row.start, memory, last=last)
        return logits[[each - (row.stop - 1 if last else row.start) for each in row.wanted]]


class PagedRow:
    """Memory of one row in pages: keys and values in the pages of the full group, states in one page of each
    other group."""

    def __init__(
        self,
        row: Row,
        caches: abc.Sequence[EngineCache],
        states: abc.Mapping[int, abc.Sequence[StateTensor]],
    ) -> None:
        """`caches`: caches of all KV groups. `states`: state tensors of each layer that has some."""
        self._row = row
        self._tensors = states
        self._pages_of: dict[int, tuple[PagedStates, int]] = {}
        for cache, table in zip(caches, row.tables, strict=True):
            if isinstance(cache, PagedStates):
                self._pages_of |= dict.fromkeys(cache.group.layers, (cache, table[0]))
            else:
                self._find_positions(cache, table)

    def _find_positions(self, cache: PagedKvCache, table: abc.Sequence[int]) -> None:
        size, device, row = cache.group.page_tokens, cache.tensor.device, self._row
        positions = torch.arange(row.start, row.end, device=device)
        self._cache = cache
        self._pages = torch.tensor(table[: -(-row.end // size)], device=device)
        self._own_pages, self._offsets = self._pages[positions // size], positions % size

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        planes = self._cache.keys_and_values(layer)
        sizes = [keys.shape[3], values.shape[3]]
        if len(planes) == 1:  # latents: both are one vector
            (both,) = self._stored_and_all(planes, (torch.cat((keys, values), 3),))
            keys, values = torch.split(both, sizes, 3)
        else:
            keys, values = self._stored_and_all(planes, (keys, values))
        return keys, values

    def _stored_and_all(
        self, planes: abc.Sequence[torch.Tensor], new: abc.Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Store the new vectors of each plane, and return those of all tokens so far."""
        found = []
        for paged, each in zip(planes, new, strict=True):
            paged[self._own_pages, self._offsets] = each[0].transpose(0, 1)
            found.append(paged[self._pages].flatten(0, 1)[: self._row.end].transpose(0, 1)[None])
        return found

    def load_states(self, layer: int) -> States:
        if not self._row.start:
            return {}
        return {
            tensor.name: stored.view(1, *tensor.shape).to(tensor.dtype, copy=True)
            for tensor, stored in self._stored(layer)
        }

    def store_states(self, layer: int, states: States) -> None:
        for tensor, stored in self._stored(layer):
            stored.copy_(states[tensor.name].flatten())

    def _stored(self, layer: int) -> Iterator[tuple[StateTensor, torch.Tensor]]:
        """Yield each state tensor of a layer with its elements in the page of the sequence."""
        for tensor in self._tensors.get(layer, ()):
            cache, page = self._pages_of[layer]
            yield tensor, cache.states(layer)[tensor.name][page]
