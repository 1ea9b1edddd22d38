"""How is a model computed whose definition looks at the tokens before by an attention of its own?

Row by row, as the library's `generate` computes it: each layer gives a cache its new keys and values, and
gets those of all tokens so far. The cache keeps them in our pages. So whatever a definition does with them,
as biases by distance (ALiBi) or positions that it counts by its cache, is done as it says; but no two rows
are computed together, and every page is fetched in every step.

What is judged is that pages are enough (`probe-can-fail`): chunks of two sequences in turns give what the
definition gives of each as a whole, without a cache.
"""

import inspect
from collections import abc
from collections.abc import Callable
from typing import Any, Final

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from baton.engine.kv_cache import PagedKvCache
from baton.engine.loading.capability_probes import (
    COUNTING,
    OTHER_SHAPES,
    ROUNDING,
    TOLERANCES,
    WINDOW,
    Geometry,
    cached_windows,
    gap,
)
from baton.engine_interface import Row
from baton.models.model_facts import ModelFacts, UnsupportedModel

Store = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(layer, new keys, new values) -> those of all tokens so far. [1, kv heads, tokens, head_dim]"""

WHOLE: Final = 24
CHUNKS: Final = ((0, 13), (13, 20), (20, 21), (21, WHOLE))
"""How each of two sequences is cut where a definition is judged."""
LAST: Final = 4
"""Tokens at the context's end that it has to compute."""


class RowCacheLayer(CacheLayerMixin):  # type: ignore[misc]
    """What one layer of a definition asks of the library's caches, of one row."""

    is_sliding = False

    def __init__(self, layer: int, begin: int, store: Store) -> None:
        super().__init__()
        self._layer = layer
        self._length = begin
        self._store = store
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is to be made."""

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


class Definition:
    """The library's definition of a model, called as `generate` calls it."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.config = module.config
        self.layers = int(module.config.get_text_config(decoder=True).num_hidden_layers)
        takes = inspect.signature(module.forward).parameters
        self._word = "cache" if "cache" in takes else "past_key_values"
        self._placed = "position_ids" in takes
        self._keeps = "logits_to_keep" in takes

    def logits(
        self, tokens: torch.Tensor, begin: int, store: Store | None, *, last: bool = False
    ) -> torch.Tensor:
        """[T, vocabulary], or of the `last` token alone [1, vocabulary], of `tokens` [1, T] at positions from
        `begin` on. `store`: what keeps keys and values; without, the definition counts the positions."""
        stop = begin + tokens.shape[1]
        given: dict[str, Any] = {"use_cache": store is not None}
        if store is not None:
            layers = [RowCacheLayer(layer, begin, store) for layer in range(self.layers)]
            given[self._word] = Cache(layers=layers)
            if self._placed:
                given["position_ids"] = torch.arange(begin, stop, device=tokens.device)[None]
        if last and self._keeps:
            given["logits_to_keep"] = 1
        mask = torch.ones(1, stop, dtype=torch.int64, device=tokens.device)
        with torch.inference_mode():
            logits: torch.Tensor = self._module(input_ids=tokens, attention_mask=mask, **given).logits[0]
        return logits[-1:] if last else logits


class RowSteps:
    """Of one definition over one cache. One step at a time."""

    def __init__(self, definition: Definition, vocab_size: int, cache: PagedKvCache) -> None:
        self._definition = definition
        self._vocab_size = vocab_size
        self._cache = cache

    def logits(self, rows: abc.Sequence[Row]) -> torch.Tensor:
        """[N, vocabulary] of what the checked `rows` want, in their order."""
        told = [self._row(row) for row in rows]
        return torch.cat(told) if told else self._cache.tensor.new_empty(0, self._vocab_size)

    def _row(self, row: Row) -> torch.Tensor:
        size, device = self._cache.group.page_tokens, self._cache.tensor.device
        pages = torch.tensor(row.pages[: -(-row.end // size)], device=device)
        where = torch.arange(row.start, row.end, device=device)
        homes, places = pages[where // size], where % size

        def store(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            told = []
            for kept, new in zip(self._cache.kinds(layer), (keys, values), strict=True):
                kept[homes, places] = new[0].transpose(0, 1)
                told.append(kept[pages].flatten(0, 1)[: row.end].transpose(0, 1)[None])
            return told[0], told[1]

        tokens = torch.tensor([row.fed], device=device)
        last = not row.scored and not row.drafts
        logits = self._definition.logits(tokens, row.start, store, last=last)
        return logits[[each - (row.stop - 1 if last else row.start) for each in row.wanted]]


class RecordedCache:
    """Keys and values by layer, as a definition gives them of one sequence: what it gets is what it gave."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.updates = 0

    def __call__(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.updates += 1
        before = self.seen.get(layer)
        if before is not None:
            keys, values = (torch.cat(pair, 2) for pair in zip(before, (keys, values), strict=True))
        self.seen[layer] = (keys, values)
        return keys, values


def judge(facts: ModelFacts, definition: Definition, device: torch.device, dtype: str) -> Geometry:
    """What a definition gives its cache, where that and its positions are all that it needs of a sequence's
    tokens so far. Raises UnsupportedModel, or what the definition does."""
    name, config, context_length = facts.name, definition.config, facts.context_length
    kind = config.model_type
    numbers = torch.Generator().manual_seed(5)
    whole = min(WHOLE, context_length)
    both = torch.randint(facts.vocab_size, (2, 1, whole), generator=numbers).to(device)
    if any(tokens < context_length for tokens in cached_windows(config).values()):
        raise UnsupportedModel.needing(name, kind, [WINDOW])
    alone = [definition.logits(tokens, 0, None) for tokens in both]
    at_once, cut = (RecordedCache(), RecordedCache()), (RecordedCache(), RecordedCache())
    together = [definition.logits(tokens, 0, notes) for tokens, notes in zip(both, at_once, strict=True)]
    told: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    chunks = [(begin, min(end, whole)) for begin, end in CHUNKS if begin < whole]
    for begin, end in chunks:
        for tokens, notes, answers in zip(both, cut, told, strict=True):
            answers.append(definition.logits(tokens[:, begin:end], begin, notes))

    geometry = _geometry(name, kind, cut[0], definition.layers, len(chunks))
    close = all(
        gap(torch.cat(mine), right) <= TOLERANCES[dtype] and gap(one, right) <= TOLERANCES[dtype]
        for mine, one, right in zip(told, together, alone, strict=True)
    )
    for mine, right in zip(cut, at_once, strict=True):
        for layer, pair in mine.seen.items():
            bound = TOLERANCES[dtype] if layer else ROUNDING[dtype]
            close &= all(gap(*each) <= bound for each in zip(pair, right.seen[layer], strict=True))
    if not close:
        raise UnsupportedModel.needing(name, kind, [COUNTING])
    _reach_the_end(definition, geometry, context_length, both[0, :, :LAST])
    return geometry


def _geometry(name: str, kind: str, notes: RecordedCache, layers: int, passes: int) -> Geometry:
    if sorted(notes.seen) != list(range(layers)) or notes.updates != layers * passes:
        raise UnsupportedModel.needing(name, kind, ["keys and values that are not once per numbered layer"])
    shapes = {each.shape for pair in notes.seen.values() for each in pair}
    if len(shapes) > 1:
        raise UnsupportedModel.needing(name, kind, [OTHER_SHAPES])
    _, kv_heads, _, head_dim = shapes.pop()
    return Geometry(layers, query_heads=kv_heads, kv_heads=kv_heads, head_dim=head_dim)


def _reach_the_end(
    definition: Definition, geometry: Geometry, context_length: int, tokens: torch.Tensor
) -> None:
    """Raises what the definition does where its tables of positions are shorter than the context."""

    def store(_: int, keys: torch.Tensor, __: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        zeros = keys.new_zeros(1, 1, 1, 1).expand(1, geometry.kv_heads, context_length, geometry.head_dim)
        return zeros, zeros

    definition.logits(tokens, context_length - tokens.shape[1], store)
