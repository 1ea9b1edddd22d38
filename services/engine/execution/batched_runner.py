"""Execution that computes a step as one flat batch, operation by operation, on any device."""

from collections import abc
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from baton.engine.execution.attention_span import AttentionSpan
from baton.engine.execution.execution_kind import ExecutionKind
from baton.engine.execution.fused_decoder import FusedDecoder
from baton.engine.execution.latent_attention import attention_over
from baton.engine.execution.paged_attention import PagedAttention
from baton.engine.execution.state_mixers import StatePages, StateStep, StateTensors, use_states
from baton.engine.execution.step_plan import make_plan
from baton.engine.kv_cache import EngineCache, attention_cache, empty_cache
from baton.engine_interface import Row
from baton.inference.runner import StatelessRunner
from baton.sampling.draft_rows import split_drafts

BatchedModel: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, PagedAttention], torch.Tensor | None
]
"""Function that computes the logits [N, vocabulary] of a batch of tokens, or None on a rank without logits.

Takes (tokens [1, T], positions [1, T], indices [N] of the tokens whose logits are wanted, attention).
"""


class BatchedExecution:
    """Execution that computes all rows together, by the transformers implementation or by our fused
    decoder."""

    def __init__(
        self,
        kind: ExecutionKind,
        compute: BatchedModel,
        spans: Mapping[int, AttentionSpan],
        weight_bytes: int,
        decoder: FusedDecoder | None = None,
        states: StateTensors | None = None,
    ) -> None:
        """Store the function `compute`, and the fused `decoder` that it calls. It is None if the transformers
        implementation computes.

        `spans`: attention spans by layer id. `states`: state tensors by layer id.
        """
        self.decoder = decoder
        self.kind = kind
        self.weight_bytes = weight_bytes
        self.compute = compute
        self._spans = spans
        self._states = states

    def runner(self, caches: abc.Sequence[EngineCache]) -> "BatchedRunner":
        return self.runner_with(caches, self._spans)

    def runner_with(
        self, caches: abc.Sequence[EngineCache], spans: Mapping[int, AttentionSpan]
    ) -> "BatchedRunner":
        """Return a runner with other attention spans than the model's, for checks."""
        return BatchedRunner(self.compute, caches, spans, self._states)


class BatchedRunner(StatelessRunner):
    """Runner that computes all rows of a step together as one batch, with calls of PyTorch."""

    def __init__(
        self,
        model: BatchedModel,
        caches: abc.Sequence[EngineCache],
        spans: Mapping[int, AttentionSpan],
        states: StateTensors | None = None,
    ) -> None:
        """Build a runner of `model` over the pages of `caches`, those of all KV groups.

        `spans`: attention spans by layer id. Layers not in it attend to all earlier tokens. `states`: state
        tensors by layer id.
        """
        self._model = model
        self._spans = spans
        self._device = torch.device(caches[0].device)
        found = attention_cache(caches)
        self._group = None if found is None else found[0]
        """Index of the KV group of keys and values."""
        self.cache = empty_cache(self._device) if found is None else found[1]
        self._states = StatePages(caches, states or {}, self._device)

    def logits(self, rows: abc.Sequence[Row]) -> torch.Tensor | None:
        return self.logits_at(split_drafts(rows))

    def logits_at(
        self, rows: abc.Sequence[Row], *, everywhere: bool = False, later: int = 0
    ) -> torch.Tensor | None:
        """Return the logits of the wanted positions, or those `everywhere`, in the order of the batch.

        `later`: number by which positions are larger than those in the sequence, for checks.
        """
        plan = make_plan(rows, self.cache, self._device, self._group)
        attention = attention_over(plan, self.cache, self._spans)
        keep = torch.arange(plan.tokens.shape[1], device=self._device) if everywhere else plan.keep
        with use_states(StateStep(rows, self._states)):
            return self._model(
                plan.tokens, plan.positions + later if later else plan.positions, keep, attention
            )
