"""Partition of a model's implementation among ranks, for tensor and pipeline parallelism.

It follows the plans that the transformers library has for each implementation. The tensor-parallel plan names
the weights that are divided and how. The pipeline plan names the modules before and after the layers. Modules
of the common kind are divided even if a plan leaves them whole. A plan that requires anything unknown is
refused, with its name.

Attention is divided by heads, even if its plan joins the heads again: each rank has the pages of its own
heads. Of experts each rank has a part of each, or some of them, by their plan. Within a stage every rank has
all hidden states. The embedding is whole on every tensor-parallel rank of the first stage. The head is
divided by the vocabulary. Stages take turns: while one computes, the others wait.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn

import torch
from torch import nn

from baton.engine.loading.rank_exchanges import (
    MissingEmbedding,
    ParallelHead,
    ParallelNorm,
    RowParallelLinear,
    SkippedLayer,
    SkippedTail,
    dispatch_experts,
    divide_input,
    receive_input,
    sum_results,
)
from baton.engine.loading.rank_shard import CannotSplit, RankShard
from baton.engine.loading.text_model import base_of, text_of
from baton.engine.loading.weight_mapping import Cut
from baton.models.model_facts import UnsupportedModel

COLUMNS: Final = "colwise"
ROWS: Final = "rowwise"
GATHERED: Final = ("colwise_gather_output", "colwise_rep")
"""Tensor-parallel styles of linear layers that are divided by columns and whose results are joined again.

Those of the model's head are joined on the rank that samples.
"""
SPREAD: Final = ("rowwise_split_input", "rowwise_rep")
"""Tensor-parallel styles of linear layers that are divided by rows although their input is whole, so that
each rank takes its part of the input."""
PACKED_COLUMNS: Final = "packed_colwise"
PACKED_ROWS: Final = "packed_rowwise"
"""Tensor-parallel style of one weight that contains two, gate and up, each divided by rows.

PACKED_COLUMNS is the same by columns.
"""
SUMMED: Final = ("moe_tp_experts", "all_reduce")
"""Tensor-parallel styles of modules whose results are partial sums, which are added up over the ranks."""
BY_EXPERT: Final = "grouped_gemm"
IDENTITY: Final = "moe_identity_expert"
"""Tensor-parallel style of an expert that returns its input, among experts whose results are added up."""
DISPATCHED: Final = "ep_dispatch_experts"
"""Tensor-parallel style of experts of which each rank has some whole ones."""
WHOLE: Final = (
    "replicate",
    "replicated_with_grad_allreduce",
    "embedding_rowwise",
    "embedding_colwise",
    "local_params",
    "mla_kv_a_proj",
)
"""Tensor-parallel styles of modules that are replicated: every rank computes them whole."""
STAGED: Final = ("embed_tokens", "layers", "norm")
"""Names of the modules of a transformers implementation that can be divided into pipeline stages without a
plan of its own."""
BY_KV_HEAD: Final = ("k_proj", "v_proj")
QUERIES: Final = ("q_proj", "q_b_proj", "qkv_proj", "query_key_value")
"""Names that transformers implementations use for the query projection, alone or joined with keys
and values."""
ALL_HEADS: Final = "qkv_proj"
"""Name of a projection that joins queries, keys and values, in this order."""
PAIR: Final = "gate_up_proj"
"""Name of the linear layer that joins the gate and up projections of a feed-forward block."""
FED: Final = {"o_proj": QUERIES, "out_proj": QUERIES, "down_proj": (PAIR,)}
"""Names of the divided projections whose results are the input of another projection, by the name of that
other one."""
LATENT_PARTS: Final = ("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm")
"""Names of the modules that compute latents (MLA). Every rank computes them whole."""
COMMON: Final[Mapping[str, Mapping[str, str]]] = {
    "self_attn": {"q_proj": COLUMNS, "k_proj": COLUMNS, "v_proj": COLUMNS, "o_proj": ROWS, "out_proj": ROWS}
    | {"gate_proj": COLUMNS, "sinks": COLUMNS, "q_b_proj": COLUMNS, "kv_b_proj": COLUMNS}
    | dict.fromkeys(LATENT_PARTS, "replicate"),
    "mlp": {"gate_proj": COLUMNS, "up_proj": COLUMNS, "down_proj": ROWS},
}
"""Tensor-parallel styles of linear layers by their names, for the attention and the feed-forward block of a
layer.

They are used if the transformers implementation's own plan does not divide that block. The block must have no
other weights, except norms over a single head.
"""
COUNTS: Final = {
    "query_heads": ("num_heads", "num_attention_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
}
"""Names of the attributes in which attention modules may store their numbers of query heads and of KV heads.
"""


def partition_stages(name: str, module: Any, shard: RankShard) -> Any:
    """Remove the modules of other pipeline stages from `module`, and return the module that this stage runs.

    That is all that is left, without the head if another stage has it.
    """
    if shard.layers == tuple(range(shard.whole.layers)):
        return module
    path, base = base_of(name, module)
    plan = list(getattr(text_of(module.config), "base_model_pp_plan", None) or ())
    if not plan and not list(_with_weights(base, STAGED)):
        plan = list(STAGED)
    layer_lists = [key for key in plan if isinstance(getattr(base, key, None), nn.ModuleList)]
    if len(layer_lists) != 1:
        _refuse(name, module, "a pipeline plan, which its definition lacks")
    head, plans = module.get_output_embeddings(), module._pp_plan or {}
    heads = [each for each, child in module.named_children() if child is head or each in plans]
    for holder, named in ((base, plan), (module, [*heads, path.partition(".")[0]])):
        for child, _ in _with_weights(holder, named):
            _refuse(name, module, f"a stage for {child}, which its pipeline plan does not name")
    all_layers = list(getattr(base, layer_lists[0]))
    own = shard.own_layers(name, len(all_layers))
    behind = plan[plan.index(layer_lists[0]) + 1 :]
    if shard.layers[0] > 0:
        for key, embedding in _with_weights(base, [layer_lists[0], *behind]):
            if not isinstance(embedding, nn.Embedding):
                _refuse(name, module, f"a stage that begins behind {key}, which is no embedding")
            setattr(base, key, MissingEmbedding(embedding, shard.link))
        receive_input(all_layers[own[0]], shard.link)
    if not shard.last:
        for key in behind:
            setattr(base, key, SkippedTail(name, all_layers[own[-1]]))
        for key in heads:
            setattr(module, key, nn.Identity())
    # Skipped layers keep their index: definitions count their layers.
    here = [each if layer in own else SkippedLayer(each) for layer, each in enumerate(all_layers)]
    setattr(base, layer_lists[0], nn.ModuleList(here))
    return module if shard.last else base


def partition_weights(name: str, module: Any, shard: RankShard) -> dict[str, Cut]:
    """Replace the modules that the model's tensor-parallel plan divides among ranks.

    Returns this rank's part of each divided parameter, by the parameter's name. All are on the meta device
    still.
    """
    if shard.tensor_ranks == 1:
        return {}
    plan = _tensor_plan(name, module, shard.whole.head_dim)
    partitioner = WeightPartitioner(name, module, shard, plan)
    for path, child in [*module.named_parameters(), *module.named_modules()]:
        style = plan.get(_pattern(path))
        if style is None or style in WHOLE or isinstance(child, MissingEmbedding | SkippedTail):
            continue
        if isinstance(child, nn.Identity):
            if style == IDENTITY:
                divide_input(child, shard.tensor_ranks)
        elif isinstance(child, nn.Parameter):
            partitioner.parameter(path, child, style)
        elif type(child).forward is nn.Linear.forward:
            partitioner.linear(path, child, style)
        else:
            partitioner.other(path, child, style)
    return partitioner.cuts


class WeightPartitioner:
    """Divides the modules of one transformers implementation among tensor-parallel ranks, by the style of
    each module."""

    def __init__(self, name: str, module: Any, shard: RankShard, plan: Mapping[str, str]) -> None:
        self.cuts: dict[str, Cut] = {}
        self._plan = plan
        self._name = name
        self._module = module
        self._shard = shard

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
            setattr(holder, own, RowParallelLinear(child, self._shard.link))
        elif style not in (*GATHERED, *SPREAD):  # whole input and output allow a whole module
            self._refuse(path, style)

    def other(self, path: str, child: nn.Module, style: str) -> None:
        if style not in (*SUMMED, DISPATCHED):
            self._refuse(path, style)
        parameters = [each for each, _ in child.named_parameters(path)]
        cut = [self.cuts[each] for each in parameters if each in self.cuts]
        for each in parameters:
            # A parameter shared by whole experts may be whole. Within a part of an expert it may not.
            if each not in self.cuts and not (style == DISPATCHED and self._is_whole(each)):
                self._lacks(each)
        if style in SUMMED:
            sum_results(child, self._shard.link)
        elif cut and hasattr(child, "_is_expert_parallel"):
            dispatch_experts(child, cut[0].ranges[0], self._shard.link)
        else:
            self._refuse(path, style)

    def _is_whole(self, path: str) -> bool:
        return self._plan.get(_pattern(path.rpartition(".")[0])) in WHOLE

    def _columns(self, path: str, child: nn.Linear, own: str, style: str) -> None:
        whole, weight = self._shard.whole, child.weight
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
        ranks, here = self._shard.tensor_ranks, self._shard.tensor_rank
        each = -(-len(child.weight) // ranks)
        rows = range(len(child.weight))[here * each : (here + 1) * each]
        self._rows_of(path, child, Cut(0, (rows,)))
        setattr(self._module, path, ParallelHead(child, self._shard.link, each))

    def _of_heads(self, weight: torch.Tensor, parts: tuple[int, ...]) -> Cut:
        """Return this rank's part of a weight that stacks several projections, by heads.

        `parts`: number of heads of each projection.
        """
        shard, ranges, begin = self._shard, [], 0
        width = len(weight) // sum(parts)
        for heads in parts:
            own = shard.kv_heads
            if heads == shard.whole.query_heads:
                each = heads // shard.tensor_ranks
                own = tuple(range(shard.tensor_rank * each, (shard.tensor_rank + 1) * each))
            ranges.append(range(begin + own[0] * width, begin + (own[-1] + 1) * width))
            begin += heads * width
        return Cut(0, tuple(ranges))

    def _even(self, path: str, weight: torch.Tensor, dim: int, packed: int = 1) -> Cut:
        """Return this rank's part of a weight along the dimension `dim`.

        `packed`: number of equal weights that are stacked in it, each of which is divided. Raises
        CannotSplit.
        """
        ranks, here, size = self._shard.tensor_ranks, self._shard.tensor_rank, weight.shape[dim]
        if size % (ranks * packed):
            raise CannotSplit(
                f"--tp {ranks}: {_pattern(path)} of the model {self._name} is {size // packed} wide, which "
                "is no multiple of it"
            )
        each = size // packed // ranks
        begins = range(here * each, size, size // packed)
        return Cut(dim, tuple(range(begin, begin + each) for begin in begins))

    def _heads(self, path: str, attention: Any) -> None:
        """Adjust the head counts and norms of an attention module to this rank's heads."""
        shard = self._shard
        if hasattr(attention, "config"):
            attention.config = copy.copy(attention.config)
        for holder in (attention, getattr(attention, "config", None)):
            for heads, words in COUNTS.items():
                for word in words:
                    if getattr(holder, word, None) == getattr(shard.whole, heads):
                        setattr(holder, word, getattr(shard.seen, heads))
        for own, child in list(attention.named_children()):
            if own not in LATENT_PARTS and not isinstance(child, nn.Linear | RowParallelLinear):
                for word, weight in child.named_parameters(recurse=False):
                    self._norm(attention, own, child, f"{path}.{own}.{word}", weight)

    def _norm(self, attention: Any, own: str, child: nn.Module, path: str, weight: nn.Parameter) -> None:
        """Divide a norm of an attention module, unless it normalizes each head alone with the same
        weights."""
        whole, seen = self._shard.whole, self._shard.seen
        if weight.shape == (whole.head_dim,):
            return
        for heads, here in ((whole.query_heads, seen.query_heads), (whole.kv_heads, seen.kv_heads)):
            if weight.numel() != heads * whole.head_dim:
                continue
            self.cuts[path] = self._of_heads(weight, (heads,))
            if weight.ndim == 1:
                copies = self._shard.tensor_ranks * here // heads
                try:
                    setattr(attention, own, ParallelNorm(child, self._shard.link, copies))
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
    plan_entries = getattr(text_of(module.config), "base_model_tp_plan", None)
    if not plan_entries:
        _refuse(name, module, "a tensor-parallel plan, which its definition lacks")
    prefix, text = base_of(name, module)
    base = {
        **_common_plan(text, plan_entries, head_dim),
        **_experts_plan(module, plan_entries),
        **plan_entries,
    }
    return {**{f"{prefix}.{path}": style for path, style in base.items()}, **(type(module)._tp_plan or {})}


def _common_plan(text: Any, plan_entries: Mapping[str, str], head_dim: int) -> dict[str, str]:
    """Return the tensor-parallel plan for those attention and feed-forward blocks that the plan
    `plan_entries` does not divide.

    `text`: the language model. It is made from COMMON.
    """
    plan: dict[str, str] = {}
    for part, styles in COMMON.items():
        found = [getattr(layer, part, None) for layer in getattr(text, "layers", ())]
        cut = [
            each for each in found if isinstance(each, nn.Module) and styles.keys() & _parts(each, head_dim)
        ]
        if not any(f".{part}." in path for path in plan_entries) and all(
            _parts(each, head_dim) <= styles.keys() for each in cut
        ):
            plan |= {f"layers.*.{part}.{own}": style for own, style in styles.items()}
    return plan


def _parts(part: nn.Module, head_dim: int) -> set[str]:
    """Return the names of the child modules of `part` that have weights. Norms over a single head do not
    count."""
    paths = (path for path, weight in part.named_parameters() if weight.shape != (head_dim,))
    return {path.partition(".")[0] for path in paths}


def _experts_plan(module: Any, plan_entries: Mapping[str, str]) -> dict[str, str]:
    """Return transformers' plan that gives each rank some whole experts. Empty if the tensor-parallel plan
    divides experts itself."""
    experts: dict[str, str] = getattr(text_of(module.config), "base_model_ep_plan", None) or {}
    return {} if plan_entries.keys() & experts.keys() else experts


def _fed(holder: nn.Module, own: str) -> bool:
    return any(hasattr(holder, each) for each in FED.get(own, ()))


def _pattern(path: str) -> str:
    """Return the path of a module or parameter with `*` for layer numbers, as plans spell it."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _with_weights(module: Any, named: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the module of each child of `module` that has parameters and is not among the names
    in `named`."""
    for child, submodule in module.named_children():
        if child not in named and next(submodule.parameters(), None) is not None:
            yield child, submodule


def _refuse(name: str, module: Any, need: str) -> NoReturn:
    raise UnsupportedModel(
        f"the model {name} ({module.config.model_type}) cannot be served by several ranks: it needs {need}"
    )
