"""How is a model's definition cut so that each rank computes its part of it?

By the model's own plans, which the library keeps beside each definition: the tensor-parallel one names the
weights that are cut and how, the pipeline one what comes before the layers and after them. A part of the
common kind that they leave whole is cut all the same. What a plan asks for and is not known here is refused
by name.

An attention is cut by heads, also where its plan puts the heads together again: each rank keeps the pages of
its own. Of experts each rank has a part, or some of them, by their plan. Within a stage every rank has the
whole hidden states. The embedding stays whole: on every tensor rank of the first stage. The head is cut by
the vocabulary. Stages take turns: while one computes the others wait.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn

import torch
from torch import nn

from baton.engine.loading.rank_exchanges import (
    Elsewhere,
    Head,
    Later,
    MissingEmbedding,
    ParallelNorm,
    RowParallelLinear,
    dispatch,
    receive_before,
    sum_behind,
)
from baton.engine.loading.rank_shard import CannotSplit, RankShard
from baton.engine.loading.text_model import base_of, text_of
from baton.engine.loading.weight_mapping import Cut
from baton.models.model_facts import UnsupportedModel

COLUMNS: Final = "colwise"
ROWS: Final = "rowwise"
GATHERED: Final = ("colwise_gather_output", "colwise_rep")
"""Cut like columns, and what comes out is put together again. Of the head: on the rank that draws."""
SPREAD: Final = ("rowwise_split_input", "rowwise_rep")
"""Cut like rows, where what comes in was put together."""
PACKED_COLUMNS: Final = "packed_colwise"
PACKED_ROWS: Final = "packed_rowwise"
"""Two weights in one, of the gate and beside it, and each is cut."""
SUMMED: Final = ("moe_tp_experts", "all_reduce")
"""What comes out is a part of a sum."""
BY_EXPERT: Final = "grouped_gemm"
DISPATCHED: Final = "ep_dispatch_experts"
"""Each rank has some of the experts."""
WHOLE: Final = (
    "replicate",
    "replicated_with_grad_allreduce",
    "embedding_rowwise",
    "embedding_colwise",
    "local_params",
)
"""What every rank may compute by itself."""
STAGED: Final = ("embed_tokens", "layers", "norm")
"""The pipeline plan of a definition that has none, and consists of these."""
BY_KV_HEAD: Final = ("k_proj", "v_proj")
QUERIES: Final = ("q_proj", "qkv_proj", "query_key_value")
"""What an attention that is cut by heads has one of."""
ALL_HEADS: Final = "qkv_proj"
"""Where it is put together again: of queries, behind them of keys, behind them of values."""
PAIR: Final = "gate_up_proj"
"""Likewise: of the gate, behind it of what it gates."""
FED: Final = {"o_proj": QUERIES, "out_proj": QUERIES, "down_proj": (PAIR,)}
"""What comes in is what the others give, which are cut."""
COMMON: Final[Mapping[str, Mapping[str, str]]] = {
    "self_attn": {"q_proj": COLUMNS, "k_proj": COLUMNS, "v_proj": COLUMNS, "o_proj": ROWS, "out_proj": ROWS}
    | {"gate_proj": COLUMNS, "sinks": COLUMNS},
    "mlp": {"gate_proj": COLUMNS, "up_proj": COLUMNS, "down_proj": ROWS},
}
"""The tensor-parallel plan of a part of a layer that the definition's own leaves whole, and that consists of
these, and of norms over a head."""
COUNTS: Final = {
    "query_heads": ("num_heads", "num_attention_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
}
"""By which words an attention tells its heads."""


def partition_stages(name: str, module: Any, share: RankShard) -> Any:
    """Leave of `module` what the stage of `share` computes. Returns what the stage runs: all that is left, or
    without the head."""
    if share.layers == tuple(range(share.whole.layers)):
        return module
    path, base = base_of(name, module)
    plan = list(getattr(text_of(module.config), "base_model_pp_plan", None) or ())
    if not plan and not list(_with_weights(base, STAGED)):
        plan = list(STAGED)
    held = [key for key in plan if isinstance(getattr(base, key, None), nn.ModuleList)]
    if len(held) != 1:
        _refuse(name, module, "a pipeline plan, which its definition lacks")
    head, plans = module.get_output_embeddings(), module._pp_plan or {}
    heads = [each for each, child in module.named_children() if child is head or each in plans]
    for holder, named in ((base, plan), (module, [*heads, path.partition(".")[0]])):
        for child, _ in _with_weights(holder, named):
            _refuse(name, module, f"a stage for {child}, which its pipeline plan does not name")
    all_layers = list(getattr(base, held[0]))
    behind = plan[plan.index(held[0]) + 1 :]
    if share.layers[0] > 0:
        for key, embedding in _with_weights(base, [held[0], *behind]):
            if not isinstance(embedding, nn.Embedding):
                _refuse(name, module, f"a stage that begins behind {key}, which is no embedding")
            setattr(base, key, MissingEmbedding(embedding, share.link))
        receive_before(all_layers[share.layers[0]], share.link)
    if not share.last:
        for key in behind:
            setattr(base, key, Later(name, all_layers[share.layers[-1]]))
        for key in heads:
            setattr(module, key, nn.Identity())
    # Each keeps its place: definitions count their layers.
    here = [each if layer in share.layers else Elsewhere(each) for layer, each in enumerate(all_layers)]
    setattr(base, held[0], nn.ModuleList(here))
    return module if share.last else base


def partition_weights(name: str, module: Any, share: RankShard) -> dict[str, Cut]:
    """Replace what the model's tensor-parallel plan cuts. Returns which part of which parameter, all on the
    meta device still, this rank has."""
    if share.tensor_ranks == 1:
        return {}
    plan = _tensor_plan(name, module, share.whole.head_dim)
    cutter = WeightPartitioner(name, module, share, plan)
    for path, child in [*module.named_parameters(), *module.named_modules()]:
        style = plan.get(_pattern(path))
        if style is None or style in WHOLE or isinstance(child, MissingEmbedding | Later | nn.Identity):
            continue
        if isinstance(child, nn.Parameter):
            cutter.parameter(path, child, style)
        elif type(child).forward is nn.Linear.forward:
            cutter.linear(path, child, style)
        else:
            cutter.other(path, child, style)
    return cutter.cuts


class WeightPartitioner:
    """Cuts the parts of one definition, as their styles say."""

    def __init__(self, name: str, module: Any, share: RankShard, plan: Mapping[str, str]) -> None:
        self.cuts: dict[str, Cut] = {}
        self._plan = plan
        self._name = name
        self._module = module
        self._share = share

    def parameter(self, path: str, child: nn.Parameter, style: str) -> None:
        first, last = max(child.ndim - 2, 0), child.ndim - 1
        if style in (COLUMNS, ROWS):
            self.cuts[path] = self._even(path, child, first if style == COLUMNS else last)
        elif style in (PACKED_COLUMNS, PACKED_ROWS):
            self.cuts[path] = self._even(path, child, first if style == PACKED_COLUMNS else last, packed=2)
        elif style == BY_EXPERT:
            self.cuts[path] = self._even(path, child, 0)
        else:
            self._refuse(path, style)

    def linear(self, path: str, child: nn.Linear, style: str) -> None:
        parent, _, own = path.rpartition(".")
        holder = self._module.get_submodule(parent)
        if not parent:
            if style not in GATHERED:
                self._refuse(path, style)
            self._head(path, child)
        elif style == COLUMNS or (style in GATHERED and own in (*BY_KV_HEAD, *QUERIES, PAIR)):
            self._columns(path, child, own, style)
            if own in QUERIES:
                self._heads(parent, holder)
        elif style == PACKED_COLUMNS:
            self._rows_of(path, child, self._even(path, child.weight, 0, packed=2))
        elif style == ROWS or (style in SPREAD and _fed(holder, own)):
            self.cuts[f"{path}.weight"] = self._even(path, child.weight, 1)
            setattr(holder, own, RowParallelLinear(child, self._share.link))
        elif style not in (*GATHERED, *SPREAD):  # what is whole before and behind may be whole within
            self._refuse(path, style)

    def other(self, path: str, child: nn.Module, style: str) -> None:
        if style not in (*SUMMED, DISPATCHED):
            self._refuse(path, style)
        held = [each for each, _ in child.named_parameters(path)]
        cut = [self.cuts[each] for each in held if each in self.cuts]
        for each in held:
            # Behind a whole expert what is alike for all may be whole; within a part of one it may not.
            if each not in self.cuts and not (style == DISPATCHED and self._is_whole(each)):
                self._lacks(each)
        if style in SUMMED:
            sum_behind(child, self._share.link)
        elif cut and hasattr(child, "_is_expert_parallel"):
            dispatch(child, cut[0].ranges[0], self._share.link)
        else:
            self._refuse(path, style)

    def _is_whole(self, path: str) -> bool:
        return self._plan.get(_pattern(path.rpartition(".")[0])) in WHOLE

    def _columns(self, path: str, child: nn.Linear, own: str, style: str) -> None:
        whole, weight = self._share.whole, child.weight
        joined = own if style in GATHERED else ""
        if own in BY_KV_HEAD:
            cut = self._of_heads(weight, (whole.kv_heads,))
        elif joined == ALL_HEADS:
            cut = self._of_heads(weight, (whole.query_heads, whole.kv_heads, whole.kv_heads))
        else:
            cut = self._even(path, weight, 0, packed=2 if joined == PAIR else 1)
        self._rows_of(path, child, cut)

    def _rows_of(self, path: str, child: nn.Linear, cut: Cut) -> None:
        self.cuts[f"{path}.weight"] = cut
        if child.bias is not None:
            self.cuts[f"{path}.bias"] = cut

    def _head(self, path: str, child: nn.Linear) -> None:
        ranks, here = self._share.tensor_ranks, self._share.tensor_rank
        each = -(-len(child.weight) // ranks)
        rows = range(len(child.weight))[here * each : (here + 1) * each]
        self._rows_of(path, child, Cut(0, (rows,)))
        setattr(self._module, path, Head(child, self._share.link, each))

    def _of_heads(self, weight: torch.Tensor, parts: tuple[int, ...]) -> Cut:
        """Of a weight of several `parts`, each of so many heads, what belongs to this rank's."""
        share, ranges, begin = self._share, [], 0
        width = len(weight) // sum(parts)
        for heads in parts:
            own = share.kv_heads
            if heads == share.whole.query_heads:
                each = heads // share.tensor_ranks
                own = tuple(range(share.tensor_rank * each, (share.tensor_rank + 1) * each))
            ranges.append(range(begin + own[0] * width, begin + (own[-1] + 1) * width))
            begin += heads * width
        return Cut(0, tuple(ranges))

    def _even(self, path: str, weight: torch.Tensor, dim: int, packed: int = 1) -> Cut:
        """This rank's part of each of `packed` equal weights, which lie behind each other."""
        ranks, here, size = self._share.tensor_ranks, self._share.tensor_rank, weight.shape[dim]
        if size % (ranks * packed):
            raise CannotSplit(
                f"--tp {ranks}: {_pattern(path)} of the model {self._name} is {size // packed} wide, which "
                "is no multiple of it"
            )
        each = size // packed // ranks
        begins = range(here * each, size, size // packed)
        return Cut(dim, tuple(range(begin, begin + each) for begin in begins))

    def _heads(self, path: str, attention: Any) -> None:
        """What else of an attention there is to a rank that has some of its heads."""
        share = self._share
        if hasattr(attention, "config"):
            attention.config = copy.copy(attention.config)
        for told in (attention, getattr(attention, "config", None)):
            for heads, words in COUNTS.items():
                for word in words:
                    if getattr(told, word, None) == getattr(share.whole, heads):
                        setattr(told, word, getattr(share.seen, heads))
        for own, child in list(attention.named_children()):
            if not isinstance(child, nn.Linear | RowParallelLinear):
                for word, weight in child.named_parameters(recurse=False):
                    self._norm(attention, own, child, f"{path}.{own}.{word}", weight)

    def _norm(self, attention: Any, own: str, child: nn.Module, path: str, weight: nn.Parameter) -> None:
        """Over each head alone, with the same numbers or its own, or over all heads."""
        whole, seen = self._share.whole, self._share.seen
        if weight.shape == (whole.head_dim,):
            return
        for heads, here in ((whole.query_heads, seen.query_heads), (whole.kv_heads, seen.kv_heads)):
            if weight.numel() != heads * whole.head_dim:
                continue
            self.cuts[path] = self._of_heads(weight, (heads,))
            if weight.ndim == 1:
                copies = self._share.tensor_ranks * here // heads
                try:
                    setattr(attention, own, ParallelNorm(child, self._share.link, copies))
                except ValueError as norm:
                    need = f"a norm over all heads, {_pattern(path)}, that is no RMS norm but {norm}"
                    _refuse(self._name, self._module, need)
            return
        self._lacks(path)

    def _lacks(self, path: str) -> NoReturn:
        need = f"a tensor-parallel plan of {_pattern(path)}, which its own leaves whole"
        _refuse(self._name, self._module, need)

    def _refuse(self, path: str, style: str) -> NoReturn:
        _refuse(self._name, self._module, f"the tensor-parallel style {style} (for {_pattern(path)})")


def _tensor_plan(name: str, module: Any, head_dim: int) -> dict[str, str]:
    told = getattr(text_of(module.config), "base_model_tp_plan", None)
    if not told:
        _refuse(name, module, "a tensor-parallel plan, which its definition lacks")
    place, text = base_of(name, module)
    base = {**_common_plan(text, told, head_dim), **_experts_plan(module, told), **told}
    return {**{f"{place}.{path}": style for path, style in base.items()}, **(type(module)._tp_plan or {})}


def _common_plan(text: Any, told: Mapping[str, str], head_dim: int) -> dict[str, str]:
    """Of those parts of the layers of `text` that the plan `told` leaves whole."""
    plan: dict[str, str] = {}
    for part, styles in COMMON.items():
        found = [getattr(layer, part, None) for layer in getattr(text, "layers", ())]
        cut = [
            each for each in found if isinstance(each, nn.Module) and styles.keys() & _parts(each, head_dim)
        ]
        if not any(f".{part}." in path for path in told) and all(
            _parts(each, head_dim) <= styles.keys() for each in cut
        ):
            plan |= {f"layers.*.{part}.{own}": style for own, style in styles.items()}
    return plan


def _parts(part: nn.Module, head_dim: int) -> set[str]:
    """What it has weights in, but for norms over a head."""
    paths = (path for path, weight in part.named_parameters() if weight.shape != (head_dim,))
    return {path.partition(".")[0] for path in paths}


def _experts_plan(module: Any, told: Mapping[str, str]) -> dict[str, str]:
    """Which rank has which experts, where the tensor-parallel plan leaves them whole."""
    experts: dict[str, str] = getattr(text_of(module.config), "base_model_ep_plan", None) or {}
    return {} if told.keys() & experts.keys() else experts


def _fed(holder: nn.Module, own: str) -> bool:
    return any(hasattr(holder, each) for each in FED.get(own, ()))


def _pattern(path: str) -> str:
    """As plans name it."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _with_weights(module: Any, named: Any) -> Iterator[tuple[str, Any]]:
    """The children that are not `named` and have parameters."""
    for child, held in module.named_children():
        if child not in named and next(held.parameters(), None) is not None:
            yield child, held


def _refuse(name: str, module: Any, need: str) -> NoReturn:
    raise UnsupportedModel(
        f"the model {name} ({module.config.model_type}) cannot be served by several ranks: it needs {need}"
    )
