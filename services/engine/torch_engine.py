"""The engine on PyTorch: a step engine whose logits come from a model that it has loaded."""

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass

from baton.engine.execution.execution import Execution
from baton.engine.execution.execution_kind import ExecutionKind
from baton.engine.kv_cache import EngineCache, PagedKvCache, attention_cache
from baton.engine.loading.library_model import LibraryModel
from baton.engine_interface import EngineFacts, Row
from baton.grammars.grammar_cache import GrammarCache
from baton.inference.collectives import Collectives
from baton.inference.runner import Runner
from baton.inference.step_engine import StepEngine
from baton.pages.layout import KvLayout
from baton.runtime.model_options import EngineName


@dataclass(frozen=True, slots=True)
class ClearedTail:
    """Engine state of a sequence: the last page whose unused end was zeroed for it."""

    page: int


class TorchEngine(StepEngine):
    """An `Engine` that computes logits by an `Execution` of a loaded model."""

    def __init__(
        self,
        model: LibraryModel,
        whole: KvLayout,
        caches: abc.Sequence[EngineCache],
        rank_group: Collectives,
        execution: Execution,
        runner: Runner,
        flush: Callable[[], None] | None = None,
        grammars: GrammarCache | None = None,
    ) -> None:
        """Build the engine from its loaded parts.

        `execution`: owns the weights. `runner`: its runner over `caches`. The other arguments are those of
        `StepEngine`.
        """
        super().__init__(
            whole,
            caches,
            rank_group,
            runner,
            EngineFacts(
                EngineName.TORCH.value,
                batch_invariant=is_batch_invariant(model, execution),
                chunked_prompts=model.chunked_prompts,
                drafts=not whole.states,
            ),
            vocab_size=model.vocab_size,
            context_length=model.facts.context_length,
            flush=flush,
            grammars=grammars,
        )
        self.model = model
        self.execution = execution
        self._attention = attention_cache(caches)
        """Index and cache of the KV group of keys and values, or None if no layer has attention."""

    @property
    def cache(self) -> PagedKvCache:
        """Cache of keys and values. Raises ValueError for a model without attention."""
        if self._attention is None:
            raise ValueError("a model without attention has no keys and values")
        return self._attention[1]

    def prepare(self, rows: abc.Sequence[Row]) -> None:
        for row in rows:
            self.clear_tail(row)

    def clear_tail(self, row: Row) -> None:
        """Zero the unused end of the row's last page of keys and values, unless it was zeroed for this
        sequence before.

        Rejected drafts of a row may leave data there.
        """
        if self._attention is None:
            return
        number, cache = self._attention
        size = cache.group.page_tokens
        index, used = (row.end - 1) // size, (row.end - 1) % size + 1
        page = row.tables[number][index]
        entered = row.start <= index * size
        sequence = row.sequence
        cleared = sequence.engine_state
        if used < size and (entered or cleared != ClearedTail(page)):
            cache.clear_tail(page, used)
        sequence.engine_state = None if row.drafts else ClearedTail(page)


def is_batch_invariant(model: LibraryModel, execution: Execution) -> bool:
    """Return whether sampled tokens depend neither on which rows are computed together in a step, nor on how
    a sequence is divided into rows.

    Compiled steps sum in the same order for any batch. Matrix products of torch do not, but in float32 the
    difference hardly changes any sampled token.
    """
    is_exact = model.dtype == "float32" or execution.kind is ExecutionKind.COMPILED
    return is_exact and model.chunked_prompts
