"""Runner that computes a step as one flat batch, operation by operation, on any device."""

from collections import abc
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch

from baton.engine.execution.attention_span import AttentionSpan
from baton.engine.execution.latent_attention import attention_over
from baton.engine.execution.paged_attention import PagedAttention
from baton.engine.execution.step_plan import make_plan
from baton.engine.kv_cache import PagedKvCache
from baton.engine_interface import Row
from baton.inference.runner import StatelessRunner
from baton.sampling.draft_rows import split_drafts

BatchedModel: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, PagedAttention], torch.Tensor | None
]
"""Function that computes the logits [N, vocabulary] of a batch of tokens, or None on a rank without logits.

Takes (tokens [1, T], positions [1, T], indices [N] of the tokens whose logits are wanted, attention).
"""


class BatchedRunner(StatelessRunner):
    """Runner that computes all rows of a step together as one batch, with calls of PyTorch."""

    def __init__(self, model: BatchedModel, cache: PagedKvCache, spans: Mapping[int, AttentionSpan]) -> None:
        """Build a runner of `model` over the pages of `cache`.

        `spans`: attention spans by layer id. Layers not in it attend to all earlier tokens.
        """
        self.cache = cache
        self._model = model
        self._spans = spans
        self._device = cache.tensor.device

    def logits(self, rows: abc.Sequence[Row]) -> torch.Tensor | None:
        plan = make_plan(split_drafts(rows), self.cache, self._device)
        attention = attention_over(plan, self.cache, self._spans)
        return self._model(plan.tokens, plan.positions, plan.keep, attention)
