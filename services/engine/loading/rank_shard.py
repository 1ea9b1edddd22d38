"""The part of a model that one of several ranks computes: its layers and heads."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from baton.engine.execution.attention_span import Geometry, LayerStates
from baton.engine.loading.text_model import text_of
from baton.inference.collectives import Collectives, LocalCollectives
from baton.models.model_facts import UnsupportedModel
from baton.pages.errors import DoesNotDivide
from baton.pages.layout import KvLayout
from baton.pages.rank_layout import rank_layout
from baton.runtime.errors import StartupError


class CannotSplit(StartupError):
    """The setting `--tp` or `--pp` does not divide this model. The text names the number."""


@dataclass(slots=True)
class RankLink:
    """Connection of a model's modules to the other ranks, which can be cut for checks."""

    rank_group: Collectives
    is_cut: bool = False

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Context manager in which this rank exchanges nothing with other ranks."""
        rank_group, self.rank_group, self.is_cut = (
            self.rank_group,
            LocalCollectives(self.rank_group.topology, self.rank_group.rank),
            True,
        )
        try:
            yield
        finally:
            self.rank_group, self.is_cut = rank_group, False


@dataclass(frozen=True, slots=True)
class StoredStates:
    """What the layers of a model with states store of a sequence."""

    attention_layers: tuple[int, ...]
    """Ids of the layers that store keys and values, ascending. Not empty."""
    states: tuple[LayerStates, ...]


@dataclass(frozen=True, slots=True)
class RankShard:
    """One rank's part of a model: its layers and KV heads. `whole` has the sizes of the whole model."""

    link: RankLink
    whole: Geometry
    layers: tuple[int, ...]
    kv_heads: tuple[int, ...]

    @property
    def last(self) -> bool:
        """Whether this rank is on the last pipeline stage, which has the model's head."""
        return self.layers[-1] == self.whole.layers - 1

    @property
    def has_logits(self) -> bool:
        """Whether this rank gets the logits of the whole vocabulary, as one rank of the worker does."""
        return self.last and self.tensor_rank == 0

    @property
    def tensor_ranks(self) -> int:
        return self.link.rank_group.topology.tensor

    @property
    def tensor_rank(self) -> int:
        return self.link.rank_group.topology.coordinates(self.link.rank_group.rank).tensor

    def own_layers(self, name: str, count: int) -> range:
        """Return the indices of this stage's layers among all `count` of the model `name`.

        A layer of LongCat has two attentions, each with KV of its own. Raises CannotSplit if a stage would
        have one of them.
        """
        attentions = max(self.whole.layers // count, 1)
        begin, end = self.layers[0], self.layers[-1] + 1
        if begin % attentions or end % attentions:
            stages = self.link.rank_group.topology.pipeline
            raise CannotSplit(f"--pp {stages}: a stage of the model {name} would end within a layer")
        return range(begin // attentions, end // attentions)

    @property
    def seen(self) -> Geometry:
        """Sizes of attention as this rank computes it: those of the whole model, but with this rank's numbers
        of heads."""
        return replace(
            self.whole,
            query_heads=self.whole.query_heads // self.tensor_ranks,
            kv_heads=len(self.kv_heads),
            attention_layers=None,
            states=(),
        )

    @property
    def attention_layers(self) -> list[int]:
        """Ids of this rank's layers that store keys and values, ascending."""
        found = self.whole.attention_layers
        return [layer for layer in self.layers if found is None or layer in found]


def find_rank_shard(
    name: str, config: Any, rank_group: Collectives, stored: StoredStates | None = None
) -> RankShard:
    """Return the part of the model `name` that the rank of `rank_group` computes.

    `stored`: what its layers store, of a model with states. Raises UnsupportedModel or CannotSplit.
    """
    topology = rank_group.topology
    if topology.context > 1:
        raise CannotSplit(f"{topology.context} context-parallel ranks: no engine computes with more than one")
    whole = _geometry(name, text_of(config))
    if stored is not None:
        whole = replace(whole, attention_layers=stored.attention_layers, states=stored.states)
    if whole.query_heads % topology.tensor:
        raise CannotSplit(
            f"--tp {topology.tensor}: the model {name} has {whole.query_heads} attention heads, which is no "
            "multiple of it"
        )
    layout = KvLayout(name, whole.groups("float32", 1, 1))
    try:
        rank = rank_layout(layout, topology, rank_group.rank)
    except DoesNotDivide as error:
        stages = f"--pp {topology.pipeline}: the model {name} has {whole.layers} layers"
        heads = f"--tp {topology.tensor}: the model {name} has {whole.kv_heads} KV heads, which is neither a "
        by_stages = error.field == "pipeline_parallel"
        raise CannotSplit(stages if by_stages else f"{heads}multiple nor a divisor of it") from error
    layers = _between(layout.layers, rank.layers, whole.layers)
    return RankShard(RankLink(rank_group), whole, layers, rank.groups[0].heads)


def _between(stored: tuple[int, ...], own: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return all layers of a pipeline stage, also those that store nothing.

    `stored`: the model's layers that store something. `own`: those of the stage. `count`: number of layers.
    """
    later = [layer for layer in stored if layer > own[-1]]
    return tuple(range(0 if own[0] == stored[0] else own[0], later[0] if later else count))


def _geometry(name: str, config: Any) -> Geometry:
    """Return the sizes of attention that the configuration states: numbers of layers and heads, head size."""
    layers, queries, hidden = (
        getattr(config, key, None) for key in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    heads = getattr(config, "num_key_value_heads", None) or queries
    if not (isinstance(layers, int) and isinstance(queries, int) and isinstance(heads, int)):
        raise UnsupportedModel(
            f"the model {name} ({config.model_type}) cannot be served by several ranks: its configuration "
            "does not say how many layers and heads it has"
        )
    compressed, plain, rotated = (
        getattr(config, key, None) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    )
    if compressed and isinstance(plain, int) and isinstance(rotated, int):
        return Geometry(layers, queries, 1, plain + rotated, (compressed, rotated))
    head_dim = getattr(config, "head_dim", None) or (hidden or 0) // queries
    return Geometry(layers, queries, heads, head_dim)
