"""How is a model's definition cut so that each rank computes its part of it?

By the model's own plans, which the library keeps beside each definition: the tensor-parallel one names the
weights that are cut and how, the pipeline one what comes before the layers and after them. What a plan asks
for and is not known here is refused by name.

Within a stage every rank has the whole hidden states. The embedding stays whole: on every tensor rank of the
first stage. The head is cut by the vocabulary. Stages take turns: while one computes the others wait.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import torch
from torch import nn

from services.engine.container import base_of, text_of
from services.engine.share import CannotSplit, Link, Share
from services.engine.supported import Geometry
from services.runtime.model_facts import UnsupportedModel

COLUMNS: Final = "colwise"
ROWS: Final = "rowwise"
HEAD: Final = ("colwise_gather_output", "colwise_rep")
"""Cut like columns, and what comes out is put together again: on the rank that draws."""
WHOLE: Final = (
    "replicate",
    "replicated_with_grad_allreduce",
    "embedding_rowwise",
    "embedding_colwise",
    "local_params",
)
"""What every rank may compute by itself."""
ATTENTION: Final = {"q_proj": COLUMNS, "k_proj": COLUMNS, "v_proj": COLUMNS, "o_proj": ROWS}
BESIDE: Final = {"sinks": COLUMNS}
"""How an attention is cut by heads whose plan leaves it whole. What lies beside the products is one number a
head."""
BY_HEAD: Final = ("q_norm", "k_norm")
"""What such an attention may have between its products: of each head alone, and so whole on every rank."""
PRODUCT: Final = {"gate_proj": COLUMNS, "up_proj": COLUMNS, "down_proj": ROWS}
"""How a layer's product is cut that its plan leaves whole."""
BY_KV_HEAD: Final = ("k_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class Slice:
    """[start, stop) of a weight, along one dimension."""

    dim: int
    start: int
    stop: int


class RowWise(nn.Module):
    """Columns of a linear layer whose input is cut as its weight is: each rank has a part of every sum."""

    def __init__(self, linear: nn.Linear, link: Link) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self._link = link

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self._link.team.sum(nn.functional.linear(hidden, self.weight))
        return out if self.bias is None else out + self.bias


class Head(nn.Module):
    """Rows of the last linear layer, of which the first tensor rank is to have everything that comes out."""

    def __init__(self, linear: nn.Linear, link: Link, each: int) -> None:
        """`each`: the most rows that a rank has; the last may have fewer."""
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self._link = link
        self._each = each
        self._width = linear.out_features

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = nn.functional.linear(hidden, self.weight, self.bias)
        out = nn.functional.pad(out, (0, self._each - out.shape[-1]))
        return self._link.team.gather(out)[..., : self._width]


class Blank(nn.Module):
    """In the place of an embedding that another stage has: the shape of what it gives."""

    def __init__(self, like: nn.Embedding) -> None:
        super().__init__()
        self._width = like.embedding_dim
        self._dtype = like.weight.dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(*ids.shape, self._width, dtype=self._dtype, device=ids.device)


class Layers(nn.ModuleDict):
    """Some of a model's layers, by their ids, which are part of their weights' names; run through as a list
    of all of them would be."""

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, slice) else super().__getitem__(key)

    def __iter__(self) -> Any:
        return iter(self.values())


def cut_stages(name: str, module: Any, share: Share) -> Any:
    """Leave of `module` what the stage of `share` computes. Returns what the stage runs: all that is left, or
    without the head."""
    if share.layers == tuple(range(share.whole.layers)):
        return module
    path, base = base_of(name, module)
    plan: dict[str, Any] = getattr(text_of(module.config), "base_model_pp_plan", None) or {}
    held = [key for key in plan if isinstance(getattr(base, key, None), nn.ModuleList)]
    if len(held) != 1:
        _refuse(name, module, "a pipeline plan, which its definition lacks")
    for child, _ in _with_weights(base, plan):
        _refuse(name, module, f"a stage for {child}, which its pipeline plan does not name")
    for child, _ in _with_weights(module, (*(module._pp_plan or ()), path.partition(".")[0])):
        _refuse(name, module, f"a stage for {child}, which its pipeline plan does not name")
    all_layers = list(getattr(base, held[0]))
    place = list(plan).index(held[0])
    if share.layers[0] > 0:
        for key in list(plan)[:place]:
            embedding = getattr(base, key, None)
            if not isinstance(embedding, nn.Embedding):
                _refuse(name, module, f"a stage that begins behind {key}, which is no embedding")
            setattr(base, key, Blank(embedding))
        all_layers[share.layers[0]].register_forward_pre_hook(
            lambda _, given: (share.link.team.receive(given[0]), *given[1:])
        )
    if not share.last:
        for key in list(plan)[place + 1 :]:
            setattr(base, key, nn.Identity())
        for key in module._pp_plan or ():
            setattr(module, key, nn.Identity())
    setattr(base, held[0], Layers({str(layer): all_layers[layer] for layer in share.layers}))
    return module if share.last else base


def cut_weights(name: str, module: Any, share: Share) -> dict[str, Slice]:
    """Replace what the model's tensor-parallel plan cuts. Returns which part of which parameter, all on the
    meta device still, this rank has."""
    ranks, here = share.tensor_ranks, share.tensor_rank
    if ranks == 1:
        return {}
    plan = _tensor_plan(name, module, share.whole)
    slices: dict[str, Slice] = {}
    for path, child in [*module.named_modules(), *module.named_parameters()]:
        style = plan.get(_pattern(path))
        if style is None or style in WHOLE or isinstance(child, Blank | nn.Identity):
            continue
        parent, _, own = path.rpartition(".")
        if isinstance(child, nn.Parameter) and style == COLUMNS and child.shape == (share.whole.query_heads,):
            slices[path] = _even(name, path, 0, len(child), ranks, here)
            continue
        known = (COLUMNS, ROWS) if parent else HEAD
        if not isinstance(child, nn.Linear) or style not in known:
            _refuse(name, module, f"the tensor-parallel style {style} (for {_pattern(path)})")
        if style in HEAD:
            each = -(-child.out_features // ranks)
            part = Slice(0, min(here * each, child.out_features), min((here + 1) * each, child.out_features))
            setattr(module.get_submodule(parent), own, Head(child, share.link, each))
        elif style == ROWS:
            part = _even(name, path, 1, child.in_features, ranks, here)
            setattr(module.get_submodule(parent), own, RowWise(child, share.link))
        elif own in BY_KV_HEAD:
            width = child.out_features // share.whole.kv_heads
            part = Slice(0, share.kv_heads[0] * width, (share.kv_heads[-1] + 1) * width)
        else:
            part = _even(name, path, 0, child.out_features, ranks, here)
        slices[f"{path}.weight"] = part
        if child.bias is not None and part.dim == 0:
            slices[f"{path}.bias"] = part
    return slices


def _tensor_plan(name: str, module: Any, whole: Geometry) -> dict[str, str]:
    base = getattr(text_of(module.config), "base_model_tp_plan", None)
    if not base:
        _refuse(name, module, "a tensor-parallel plan, which its definition lacks")
    place, text = base_of(name, module)
    added = {} if any(".self_attn." in path for path in base) else _attention_plan(text, whole)
    if not any(path.startswith("layers.*.mlp") for path in base):
        added |= _product_plan(text)
    plan = {f"{place}.{path}": style for path, style in {**added, **base}.items()}
    return {**plan, **(type(module)._tp_plan or {})}


def _attention_plan(text: Any, whole: Geometry) -> dict[str, str]:
    """How the attention of every layer of `text` is cut, of which its own plan does not tell, if it consists
    of the common parts."""
    attention = getattr(next(iter(text.layers)), "self_attn", None)
    if not isinstance(attention, nn.Module):
        return {}
    beside = {name: style for name, style in BESIDE.items() if name in dict(attention.named_parameters())}
    between = {name for name in BY_HEAD if _is_of_a_head(getattr(attention, name, None), whole)}
    if {name for name, _ in attention.named_children()} - between != ATTENTION.keys():
        return {}
    return {f"layers.*.self_attn.{name}": style for name, style in {**ATTENTION, **beside}.items()}


def _product_plan(text: Any) -> dict[str, str]:
    """The same of what comes behind it."""
    product = getattr(next(iter(text.layers)), "mlp", None)
    if not isinstance(product, nn.Module):
        return {}
    held = {name for name, each in product.named_children() if next(each.parameters(), None) is not None}
    return (
        {f"layers.*.mlp.{name}": style for name, style in PRODUCT.items()} if held == PRODUCT.keys() else {}
    )


def _is_of_a_head(norm: Any, whole: Geometry) -> bool:
    return isinstance(norm, nn.Module) and all(each.shape == (whole.head_dim,) for each in norm.parameters())


def _pattern(path: str) -> str:
    """As plans name it."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _even(name: str, path: str, dim: int, size: int, ranks: int, here: int) -> Slice:
    if size % ranks:
        raise CannotSplit(
            f"--tp {ranks}: {_pattern(path)} of the model {name} is {size} wide, which is no multiple of it"
        )
    each = size // ranks
    return Slice(dim, here * each, (here + 1) * each)


def _with_weights(module: Any, named: Any) -> Iterator[tuple[str, Any]]:
    """The children that are not `named` and have parameters."""
    for child, held in module.named_children():
        if child not in named and next(held.parameters(), None) is not None:
            yield child, held


def _refuse(name: str, module: Any, need: str) -> NoReturn:
    raise UnsupportedModel(
        f"the model {name} ({module.config.model_type}) cannot be served by several ranks: it needs {need}"
    )
