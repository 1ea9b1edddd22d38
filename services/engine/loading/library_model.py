"""A model as the transformers library defines it, with our attention, checked before it is served."""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

import torch

from baton.engine.execution.attention_span import ATTENTION_NAME, Geometry, LayerAttention
from baton.engine.execution.exact_reference import exactly
from baton.engine.execution.latent_attention import defer_expansion, restore_expansion
from baton.engine.execution.model_structure import (
    ROTATED_TOKENS,
    ROTATION_TOLERANCES,
    ModelStructure,
    UnknownStructure,
    find_structure,
)
from baton.engine.execution.paged_attention import AttentionFunction, use_attention
from baton.engine.execution.row_by_row import LibraryDefinition
from baton.engine.execution.state_mixers import (
    StateMixer,
    UnknownMixer,
    check_mixers,
    unwrap_mixers,
    wrap_mixers,
)
from baton.engine.loading.capability_probes import (
    COUNTING,
    AttentionProbe,
    CountedPositions,
    probe_positions,
    recording_masks,
)
from baton.engine.loading.library_report import first_line
from baton.engine.loading.rank_shard import RankShard
from baton.engine.loading.row_by_row_probe import check_row_by_row
from baton.engine.loading.state_probe import find_state_mixers
from baton.engine.loading.text_model import text_of
from baton.engine.quantization.quantized_weight import QuantizedWeight
from baton.models.model_facts import ModelFacts, UnsupportedModel

FAILURES: Final = (RuntimeError, AttributeError, TypeError, ValueError, LookupError)
"""Errors that a transformers implementation raises if it cannot compute with its arguments."""


class LibraryModel:
    """A model loaded by the transformers library, or one rank's part of it. Used from one thread at a
    time."""

    def __init__(
        self,
        module: Any,
        facts: ModelFacts,
        dtype: str,
        device: torch.device,
        shard: RankShard | None = None,
        load: Callable[[], Any] | None = None,
        quantized: Mapping[torch.nn.Linear, QuantizedWeight] | None = None,
        *,
        row_by_row: bool = False,
        mixers: Sequence[StateMixer] = (),
    ) -> None:
        """Check `module`, the transformers implementation, by small forward passes without other ranks.

        The last pass is at the end of the context, where a table of positions may be too short.
        `load`: loads `module` once more. `quantized`: quantized weights, if steps multiply them without
        dequantizing them first. `row_by_row`: the module uses its own attention. `mixers`: its state mixers,
        which are wrapped. Raises UnsupportedModel.
        """
        self.facts = facts
        self.dtype = dtype
        self.device = device
        self.quantized = None if quantized is None else dict(quantized)
        """Quantized weights by linear layer, if steps multiply by the codes, which only a compiled step can.
        Else None."""
        self.module = module
        """The transformers implementation, or this pipeline stage of it. None after `release`."""
        self._shard = shard
        self._load = load
        self._mixers = list(mixers)
        """State mixers that compute over the rows of a step."""
        self._needs_counts = False
        """Whether the transformers implementation learns positions only from a cache, so that each forward
        pass must get one."""
        self._read_arguments(module)
        self.definition = LibraryDefinition(module) if row_by_row else None
        """The transformers implementation with its own attention, if the model can only be computed row by
        row, else None."""
        self.geometry: Geometry
        self.attention: Mapping[int, LayerAttention]
        """Attention options by layer id, for the layers with our attention."""
        self.chunked_prompts = True
        """Whether a prompt that is computed in several rows gives the same results as in one."""
        if self.definition is None:
            self.geometry, self.attention, width = self._check_part(module)
        else:
            self.geometry, self.attention, width = self._check_row_by_row(self.definition)
        self._set_spans()
        self.vocab_size: int = width
        self.weight_bytes: int = _bytes_read(module)
        """Bytes of weights that every step reads, whatever its rows are."""
        self.products: Counter[tuple[int, int]] = Counter(
            (each.out_features, each.in_features)
            for each in module.modules()
            if isinstance(each, torch.nn.Linear)
        )
        """Number of the model's linear layers of each weight shape, by (out, in)."""

    def _read_arguments(self, module: Any) -> None:
        """Store which arguments the forward pass of `module` has."""
        parameters = inspect.signature(module.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._takes_positions = "position_ids" in parameters
        self._takes_wanted = "logits_to_keep" in parameters

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        keep: torch.Tensor,
        attend: AttentionFunction,
        counts: CountedPositions | None = None,
    ) -> torch.Tensor | None:
        """Return the logits [N, vocabulary] of a batch in the model's dtype, computed by the transformers
        implementation.

        `tokens`: [1, T] flat batch. `positions`: [1, T], or None if the implementation is to count them.
        `keep`: [N] indices of tokens in the batch. `counts`: cache from which the implementation learns
        positions.
        Every rank calls it. One of them gets the logits, the others None.
        """
        if counts is None and positions is not None and self._needs_counts:
            counts = CountedPositions(positions[0] - torch.arange(positions.shape[1], device=self.device))
        shard = self._shard
        given: dict[str, Any] = {} if counts is None else {self._cache_argument: counts}
        if self._takes_positions:
            given["position_ids"] = positions
        with torch.inference_mode(), use_attention(attend):
            if shard is not None and not shard.last:
                answer = self.module(input_ids=tokens, use_cache=False, **given)
                shard.link.rank_group.send(answer.last_hidden_state)
                return None
            if self._takes_wanted:
                given["logits_to_keep"] = keep
            answer = self.module(input_ids=tokens, use_cache=False, **given)
        logits: torch.Tensor = answer.logits[0] if self._takes_wanted else answer.logits[0, keep]
        return logits if shard is None or shard.has_logits else None

    def batch_rows(self) -> None:
        """Make the transformers implementation of a model with states compute rows together, until
        `compute_row_by_row`.

        It uses our attention, and its state mixers compute over rows. Raises UnknownMixer or
        UnsupportedModel.
        """
        config, module = text_of(self.module.config), self.module
        self._own_attention = config._attn_implementation
        mixers = find_state_mixers(module, self.facts, self.device)
        check_mixers(mixers, self.geometry.state_tensors)
        config._attn_implementation = ATTENTION_NAME
        wrap_mixers(mixers)
        self._mixers = mixers
        if self.geometry.attention_layers:
            seen, self.attention, _ = self._check_over_pages(module, self.geometry.attention_layers)
            self.geometry = self._same_pages(seen)
        self._set_spans()

    def compute_row_by_row(self) -> None:
        """Undo `batch_rows`."""
        text_of(self.module.config)._attn_implementation = self._own_attention
        unwrap_mixers(self._mixers)
        restore_expansion(self.module)
        self._mixers, self.attention = [], {}
        self._set_spans()

    def unlinked(self) -> AbstractContextManager[None]:
        """Context manager in which this rank exchanges nothing with other ranks, for checks."""
        return nullcontext() if self._shard is None else self._shard.link.cut()

    def structure(self) -> ModelStructure:
        """Return the modules and weights of the transformers implementation for our own executions. Raises
        UnknownStructure.
        """
        structure = find_structure(self.module, self.geometry.head_dim, self.attention.values())
        if not self._only_rotates:
            raise UnknownStructure("queries or keys that their position does more to than turn them")
        return structure

    def exactly(self) -> AbstractContextManager[None]:
        """Context manager in which the transformers implementation computes in float32. It needs the common
        decoder structure."""
        return exactly(self.module, self.quantized or {})

    def weights(self) -> list[torch.Tensor]:
        """Return every weight of the transformers implementation once, including tied ones."""
        return [each.data for each in self.module.parameters()]

    def release(self) -> None:
        """Drop the transformers implementation after an execution has taken its weights, so that they are not
        in memory
        twice.
        """
        self.module = None

    def reload(self) -> None:
        """Load the transformers implementation and its weights again, after `release` has dropped them.
        Raises the errors of loading a model."""
        if self._load is None:
            raise AssertionError("a rank's part of a model was released")
        self.module = self._load()

    def _set_spans(self) -> None:
        self.spans = {layer: each.span for layer, each in self.attention.items() if each.span is not None}
        """Attention span by layer id, for the layers whose tokens attend to only a part of the context."""

    def _same_pages(self, seen: Geometry) -> Geometry:
        """Return the sizes with those of attention as in `seen`. Raises UnknownMixer if pages differ."""
        mine = self.geometry
        found = replace(seen, attention_layers=mine.attention_layers, states=mine.states)
        if found.kv_group("float32", 1) != mine.kv_group("float32", 1):
            raise UnknownMixer("attention of other sizes than over its own cache")
        return found

    def _check_over_pages(
        self, module: Any, layers: Sequence[int] | None = None
    ) -> tuple[Geometry, Mapping[int, LayerAttention], int]:
        """Check that the transformers implementation computes with our attention.

        Returns the sizes of its attention, the attention options by layer id, and the width of its logits.
        `layers`: ids of the layers with attention, all if None. Raises UnsupportedModel.
        """
        facts, device, shard = self.facts, self.device, self._shard
        probe, whole, counted = (AttentionProbe(facts.context_length) for _ in range(3))
        order = probe_positions(facts.context_length).to(device)
        tokens = torch.arange(len(order), device=device)[None] % facts.vocab_size
        last = order.new_tensor([len(order) - 1])
        try:
            with self.unlinked():
                with recording_masks():
                    self.logits(tokens, None, last, whole)
                defer_expansion(module)
                finds = self._finds_positions(tokens, last)
                logits = self.logits(tokens[:, order], order[None], last, probe)
                self.logits(tokens[:, order], None, last, counted)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            raise _cannot_run(facts.name, module.config, error) from error
        if not finds:
            probe.add_need(COUNTING)
        if logits is not None and len(logits) != len(last):
            probe.add_need("logits of the positions that are asked for alone")
        seen = probe.verdict(whole, counted, order, self.dtype, facts.name, module.config, layers)
        if shard is not None and seen != shard.seen:
            raise UnsupportedModel(
                f"the model {facts.name} ({module.config.model_type}) cannot be served by several ranks: its "
                f"attention has {_heads_of(seen)} on a rank, where {_heads_of(shard.seen)} were expected"
            )
        width = facts.vocab_size if shard is not None or logits is None else logits.shape[1]
        return seen if shard is None else shard.whole, whole.attention, width

    def _check_part(self, module: Any) -> tuple[Geometry, Mapping[int, LayerAttention], int]:
        """Check `module` as `_check_over_pages` does, which may be a stage without attention."""
        shard = self._shard
        if shard is None:
            return self._check_over_pages(module)
        if not shard.attention_layers:
            return shard.whole, {}, self.facts.vocab_size
        return self._check_over_pages(module, shard.attention_layers)

    def _check_row_by_row(
        self, definition: LibraryDefinition
    ) -> tuple[Geometry, Mapping[int, LayerAttention], int]:
        try:
            geometry, self.chunked_prompts = check_row_by_row(self.facts, definition, self.device, self.dtype)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            raise _cannot_run(self.facts.name, definition.config, error) from error
        return geometry, {}, self.facts.vocab_size

    def _finds_positions(self, tokens: torch.Tensor, keep: torch.Tensor) -> bool:
        """Return whether given positions at the context's end have the same effect as positions counted by a
        cache.

        Some transformers implementations agree only if they get a cache that counts, for example to scale
        queries by the length of a sequence. Then every step passes one.
        """
        late = AttentionProbe(self.facts.context_length)
        begin = self.facts.context_length - tokens.shape[1]
        where = torch.arange(tokens.shape[1], device=self.device)[None] + begin
        self.logits(tokens, where, keep, late)
        counted = self._probe(tokens, None, keep, CountedPositions(begin))
        if counted is None:  # it needs more of a cache, and the other passes decide
            return True
        if late.like(counted, self.dtype):
            return True
        self._needs_counts = True
        with_counts = self._probe(tokens, where, keep)
        self._needs_counts = with_counts is not None and with_counts.like(counted, self.dtype)
        # `generate` passes both to a model with states. If its positions are those given, that is enough.
        ignored = bool(self._mixers) and with_counts is not None and with_counts.like(late, self.dtype)
        return self._needs_counts or ignored

    def _probe(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None,
        keep: torch.Tensor,
        counts: CountedPositions | None = None,
    ) -> AttentionProbe | None:
        """Return the record of attention calls in one forward pass, or None if the transformers
        implementation cannot compute it."""
        probe = AttentionProbe(self.facts.context_length)
        try:
            self.logits(tokens, positions, keep, probe, counts)
        except torch.OutOfMemoryError:
            raise
        except FAILURES:
            return None
        return probe

    @cached_property
    def _only_rotates(self) -> bool:
        """Whether queries and keys are as long at the context's end as at its beginning.

        If so, positions may change them by a rotation alone.
        """
        where = torch.arange(ROTATED_TOKENS, device=self.device)[None]
        context = self.facts.context_length
        first, last = AttentionProbe(context), AttentionProbe(context)
        for probe, begin in ((first, 0), (last, max(context - ROTATED_TOKENS, 0))):
            self.logits(where % self.vocab_size, where + begin, where[0, :1], probe)
        return last.keeps_lengths(first, ROTATION_TOLERANCES[self.dtype])


def _heads_of(geometry: Geometry) -> str:
    return (
        f"{geometry.query_heads} query heads and {geometry.kv_heads} KV heads of {geometry.head_dim} numbers"
    )


def _bytes_read(module: Any) -> int:
    """Return the bytes of all weights, without those of an untied embedding, of which a step reads single
    rows only."""
    table, head = module.get_input_embeddings(), module.get_output_embeddings()
    read = [
        each
        for each in module.parameters()
        if head is None
        or each is head.weight
        or not isinstance(table, torch.nn.Embedding)
        or each is not table.weight
    ]
    return sum(each.numel() * each.element_size() for each in read)


def _cannot_run(name: str, config: Any, error: Exception) -> UnsupportedModel:
    return UnsupportedModel(
        f"the model {name} ({config.model_type}) cannot be served: its definition does not run over pages: "
        f"{first_line(error)}{_missing_setting(config, error)}"
    )


def _missing_setting(config: Any, error: Exception) -> str:
    """Return a hint at a missing setting that may have made the model fail. The error of transformers names
    none."""
    if getattr(config, "pad_token_id", None) is not None or "NoneType" not in str(error):
        return ""
    return "; its config.json has no pad_token_id, by which its definition finds positions: write one in"
