"""Runner that computes each row by itself, by the transformers implementation with its own attention.

It serves models whose attention is not the library's common one, for example with biases by distance (ALiBi),
or positions that are counted by the cache. Each layer gives its new keys and values to a cache and gets those
of all tokens so far, as in the library's `generate`. Here that cache is our pages. No two rows are computed
together, and all pages of a row are read in every step.
"""

import inspect
from collections import abc
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from baton.engine.execution.execution_kind import ExecutionKind
from baton.engine.kv_cache import PagedKvCache
from baton.engine_interface import Row
from baton.inference.runner import StatelessRunner

Store = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Function (layer, new keys, new values) that stores them, and returns the keys and values of all tokens so
far.

All are [1, kv heads, tokens, head_dim].
"""


class RowCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """KV cache of one layer for one row, in the form that the transformers library calls."""

    is_sliding = False

    def __init__(self, layer: int, begin: int, store: Store) -> None:
        super().__init__()
        self._layer = layer
        self._length = begin
        self._store = store
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing, since the pages exist already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._length += key_states.shape[2]
        return self._store(self._layer, key_states, value_states)

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        return -1


class LibraryDefinition:
    """The transformers implementation of a model, called as the library's `generate` calls it."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.config = module.config
        self.layers = int(module.config.get_text_config(decoder=True).num_hidden_layers)
        parameters = inspect.signature(module.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._takes_positions = "position_ids" in parameters
        self._takes_wanted = "logits_to_keep" in parameters

    def logits(
        self, tokens: torch.Tensor, begin: int, store: Store | None, *, last: bool = False
    ) -> torch.Tensor:
        """Return the logits [T, vocabulary] of `tokens` [1, T], or [1, vocabulary] of the `last` token only.

        `begin`: position of the first token. `store`: stores new keys and values, and returns those of all
        tokens. If None, the transformers implementation gets no cache and counts positions itself.
        """
        stop = begin + tokens.shape[1]
        given: dict[str, Any] = {"use_cache": store is not None}
        if store is not None:
            layers = [RowCacheLayer(layer, begin, store) for layer in range(self.layers)]
            given[self._cache_argument] = Cache(layers=layers)
            if self._takes_positions:
                given["position_ids"] = torch.arange(begin, stop, device=tokens.device)[None]
        if last and self._takes_wanted:
            given["logits_to_keep"] = 1
        mask = torch.ones(1, stop, dtype=torch.int64, device=tokens.device)
        with torch.inference_mode():
            logits: torch.Tensor = self._module(input_ids=tokens, attention_mask=mask, **given).logits[0]
        return logits[-1:] if last else logits


class RowByRowExecution:
    """Execution of a model by the transformers implementation with its own attention, one row after the
    other."""

    kind = ExecutionKind.ROW_BY_ROW

    def __init__(self, definition: LibraryDefinition, vocab_size: int, weight_bytes: int) -> None:
        self.weight_bytes = weight_bytes
        self._definition = definition
        self._vocab_size = vocab_size

    def runner(self, cache: PagedKvCache) -> "RowByRowRunner":
        return RowByRowRunner(self._definition, self._vocab_size, cache)


class RowByRowRunner(StatelessRunner):
    """Runner that computes one row after the other, by the transformers implementation with its own
    attention."""

    def __init__(self, definition: LibraryDefinition, vocab_size: int, cache: PagedKvCache) -> None:
        self._definition = definition
        self._vocab_size = vocab_size
        self._cache = cache

    def logits(self, rows: abc.Sequence[Row]) -> torch.Tensor:
        """Return the logits of a step as `Runner.logits` does. Draft tokens are computed together with their
        row."""
        logits = [self._row_logits(row) for row in rows]
        return torch.cat(logits) if logits else self._cache.tensor.new_empty(0, self._vocab_size)

    def _row_logits(self, row: Row) -> torch.Tensor:
        size, device = self._cache.group.page_tokens, self._cache.tensor.device
        pages = torch.tensor(row.pages[: -(-row.end // size)], device=device)
        positions = torch.arange(row.start, row.end, device=device)
        own_pages, offsets = pages[positions // size], positions % size

        def store(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            both = []
            for paged, new in zip(self._cache.keys_and_values(layer), (keys, values), strict=True):
                paged[own_pages, offsets] = new[0].transpose(0, 1)
                both.append(paged[pages].flatten(0, 1)[: row.end].transpose(0, 1)[None])
            return both[0], both[1]

        tokens = torch.tensor([row.fed], device=device)
        last = not row.scored and not row.drafts
        logits = self._definition.logits(tokens, row.start, store, last=last)
        return logits[[each - (row.stop - 1 if last else row.start) for each in row.wanted]]
