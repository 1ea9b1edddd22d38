"""How is a step computed in one call?

On a CPU a step is one call of `step.c`: all layers, over weights in blocks and the pages as they lie. In
float32, weights that are all numbers of bfloat16, as most models are published, are kept and read as such:
what is computed is the same. Library calls one by one read weights at two thirds of the memory's speed, keys
and values at a third, and spend a quarter of a prompt's time between the products: no library that we know of
has either fused, or takes such pages. What a row gets does not depend on what else is in the step.

It is used where `proof.py` has seen it agree with the library's definition.
"""

import ctypes
from collections import abc
from itertools import accumulate, chain
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from baton.engine.execution.attention_span import AttentionSpan
from baton.engine.execution.linear_layers import joined
from baton.engine.execution.model_structure import LayerStructure, ModelStructure, Norm
from baton.engine.execution.step_compiler import Kernel
from baton.engine.execution.step_plan import integers
from baton.engine.execution.weight_memory import WeightMemory
from baton.engine.kv_cache import PagedKvCache
from baton.engine.quantization import quantized_weight as coded
from baton.engine.quantization.quantized_weight import GROUPS, QuantizedWeight
from baton.engine_interface import Row
from baton.runtime.model_options import POSITIONS_MAX

STRIP: Final = 32
"""Numbers that the kernel takes at once."""
HEAD_STRIPS: Final = 8
HALF: Final = 16
"""Gates that it computes together, at most."""
SIDE: Final = 4
"""A page has a multiple of so many tokens."""
GROUP_MIN: Final = min(GROUPS)
ROWS_A_LOOK: Final = 1024
"""Of a weight: it is looked at without a copy of it."""

KernelFor: TypeAlias = abc.Callable[[torch.dtype, torch.dtype], Kernel]
"""The compiled function for numbers and weights of these dtypes. Raises KernelUnavailable."""

_Pointer: Final = ctypes.c_void_p
_Count: Final = ctypes.c_int64
_Number: Final = ctypes.c_float


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Weight(ctypes.Structure):
    """`struct weight` of the source, as the others."""

    _fields_ = [("blocks", _Pointer), *_fields(ctypes.c_int32, "bits group scale_bytes has_leasts")]


class _Layer(ctypes.Structure):
    _fields_ = [
        *_fields(_Weight, "qkv out gate_and_up down"),
        *_fields(_Pointer, "qkv_bias out_bias gate_and_up_bias down_bias"),
        *_fields(_Pointer, "before_attention query_norm key_norm before_gate"),
        *_fields(_Number, "before_attention_epsilon query_norm_epsilon key_norm_epsilon before_gate_epsilon"),
        *_fields(_Number, "scaling"),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *_fields(_Count, "layers hidden heads kv_heads head_dim projected width vocabulary"),
        ("layer", ctypes.POINTER(_Layer)),
        *_fields(_Pointer, "norm"),
        *_fields(_Weight, "head"),
        *_fields(_Pointer, "head_bias"),
        *_fields(_Number, "norm_epsilon"),
        *_fields(ctypes.c_int32, "threads"),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *_fields(_Count, "rows tokens wanted page_tokens longest"),
        *_fields(_Count, "page_stride head_stride layer_stride plane_stride"),
        *_fields(_Pointer, "cache positions row_of begins tables table keep windows cosine sine"),
        *_fields(_Pointer, "x normed qkv seen gated scores keys values logits sums"),
        *_fields(_Count, "scored laid"),
    ]


class UnsupportedShapes(Exception):
    """The kernel does not know such a model. The text names the first reason."""


def check(
    anatomy: ModelStructure, head_dim: int, page_tokens: int, reaches: abc.Iterable[AttentionSpan] = ()
) -> torch.dtype:
    """Of the model's numbers. Raises UnsupportedShapes for a model that no kernel can compute over such pages."""
    if any(reach.in_chunks for reach in reaches):
        raise UnsupportedShapes("layers that look at chunks of a sequence")
    hidden, width = anatomy.embedding.shape[1], anatomy.layers[0].down.in_features
    for what, size, of in (
        ("hidden size", hidden, STRIP),
        ("head", head_dim, STRIP),
        ("feed-forward width", width, HALF),
        ("page", page_tokens, SIDE),
    ):
        if size % of:
            raise UnsupportedShapes(f"a {what} of {size}, which is no multiple of {of}")
    if head_dim > HEAD_STRIPS * STRIP:
        raise UnsupportedShapes(f"a head of {head_dim}, which is more than {HEAD_STRIPS * STRIP}")
    norms = [
        anatomy.norm,
        *(norm for each in anatomy.layers for norm in (each.before_attention, each.before_gate)),
    ]
    if any(norm.weight.shape != (hidden,) for norm in norms):
        raise UnsupportedShapes("norms of another width than what they are of")
    dtypes = {linear.weight.dtype for linear in anatomy.linears}
    if dtypes not in ({torch.bfloat16}, {torch.float32}):
        raise UnsupportedShapes(f"weights in {' and '.join(sorted(map(str, dtypes)))}")
    return dtypes.pop()


def narrow(linears: abc.Iterable[nn.Linear]) -> bool:
    """All weights are numbers of bfloat16, whatever they are kept in."""
    weights = (each.weight.data for each in linears if each.weight.dtype is not torch.bfloat16)
    parts = (part for each in weights for part in torch.split(each, ROWS_A_LOOK))
    return all(part.equal(part.bfloat16().to(part.dtype)) for part in parts)


class CompiledModel:
    """A whole model as the kernel knows it. Takes its weights: `anatomy` is empty afterwards."""

    def __init__(
        self,
        anatomy: ModelStructure,
        head_dim: int,
        kernel: Kernel,
        codes: abc.MutableMapping[nn.Linear, QuantizedWeight] | None = None,
    ) -> None:
        """Of an anatomy that `check` lets pass, whose weights the kernel's hold without loss, or whose
        `codes` stand for. `codes` is empty afterwards, too."""
        self.numbers = anatomy.head.weight.dtype
        """Of its keys and values."""
        self.products = kernel.products
        self._weights = kernel.weights
        self._block = kernel.block
        self.rows = kernel.rows
        self.weight_bytes = 0
        """What a step reads of them."""
        first = anatomy.layers[0]
        self.heads, self.kv_heads, _ = (each.out_features // head_dim for each in first.projections)
        self.projected = sum(each.out_features for each in first.projections)
        """Queries, keys and values of a token."""
        self.hidden = anatomy.embedding.shape[1]
        self.width = first.down.in_features
        self.head_dim = head_dim
        self.rotary: Any = anatomy.rotary
        self.vocabulary = anatomy.head.out_features
        self.threads = torch.get_num_threads()
        self._kernel = kernel.step
        self._codes = codes
        self._held: list[torch.Tensor] = []
        """What `_layers` and `_model` point to."""
        self._memory = WeightMemory()
        self._layers = (_Layer * len(anatomy.layers))()
        for place, parts in enumerate(anatomy.layers):
            self._layers[place] = self._layer(parts)
            for linear in parts.linears:
                del linear.weight, linear.bias
        head, bias = self._product([anatomy.head])
        del anatomy.head.weight
        if codes is not None:
            codes.clear()
        self._codes = None
        self.embedding = self._memory.put(anatomy.embedding)
        self._model = _Model(
            len(self._layers),
            *(self.hidden, self.heads, self.kv_heads, head_dim, self.projected, self.width, self.vocabulary),
            self._layers,
            *(self._norm(anatomy.norm), head, bias),
            anatomy.norm.epsilon,
            self.threads,
        )

    def compute(self, step: _Step) -> None:
        self._kernel(ctypes.byref(self._model), ctypes.byref(step))

    def _layer(self, parts: LayerStructure) -> _Layer:
        products = [
            self._product(parts.projections),
            self._product([parts.out]),
            self._product(parts.gate_and_up, paired=True),
            self._product([parts.down]),
        ]
        norms = (parts.before_attention, parts.query_norm, parts.key_norm, parts.before_gate)
        return _Layer(
            *(blocks for blocks, _ in products),
            *(bias for _, bias in products),
            *map(self._norm, norms),
            *(0.0 if norm is None else norm.epsilon for norm in norms),
            parts.scaling,
        )

    def _product(self, parts: list[nn.Linear], *, paired: bool = False) -> tuple[_Weight, int | None]:
        """The weight of these, side by side, as it lies in blocks, and where the bias is, if there is one.
        `paired`: of each block the first half is the first part's."""
        weight, bias = joined(parts)
        order = _paired(torch.arange(len(weight))[:, None], self._block)[:, 0] if paired else None
        at = None if bias is None else self._hold((bias if order is None else bias[order]).float())
        sizes: tuple[int, ...] = ()
        if self._codes is None:
            blocks = _in_blocks((weight if order is None else weight[order]).to(self._weights), self._block)
        else:
            codes = coded.joined([self._codes.pop(each) for each in parts])
            codes = codes if order is None else codes.rows(order)
            blocks = coded.in_blocks(codes, self._block)
            sizes = (codes.bits, codes.group, codes.scale.itemsize, codes.least is not None)
        self.weight_bytes += blocks.nbytes
        return _Weight(self._hold(blocks), *sizes), at

    def _norm(self, norm: Norm | None) -> int | None:
        return None if norm is None else self._hold(norm.weight.float())

    def _hold(self, tensor: torch.Tensor) -> int:
        """Where a copy lies. The library's tensors may be views of a file, which they would keep mapped."""
        self._held.append(self._memory.put(tensor))
        return self._held[-1].data_ptr()


class CompiledSteps:
    """Of one model over one cache. One step at a time."""

    def __init__(
        self, model: CompiledModel, cache: PagedKvCache, reaches: abc.Mapping[int, AttentionSpan]
    ) -> None:
        """`reaches`: of the layers, by id, whose tokens see a window alone."""
        self._model = model
        self._cache = cache
        seen = (reaches.get(layer) for layer in cache.group.layers)
        self._windows = integers([POSITIONS_MAX if each is None else each.tokens for each in seen])
        self._scored = max(model.heads // model.kv_heads, model.rows)
        self._of_token = model.kv_heads * model.head_dim
        if cache.tensor.dtype is not model.numbers:
            raise ValueError(f"a cache of {cache.tensor.dtype} for a model in {model.numbers}")
        longest = max(model.hidden, model.heads * model.head_dim, model.width)
        self._parts = (
            (model.hidden, model.products),
            (model.projected, torch.float32),
            (model.heads * model.head_dim, model.products),
            (model.width, model.products),
            (-(-longest // GROUP_MIN), torch.float32),
        )
        """Columns of what a step computes of each token on its way."""

    def logits(self, rows: abc.Sequence[Row], *, everywhere: bool = False, later: int = 0) -> torch.Tensor:
        """[N, vocabulary] in float32, of what the checked `rows` want, in their order; `everywhere`: of all
        positions, row by row. `later`: by how much queries and keys are turned as if they came later."""
        size, count = self._cache.group.page_tokens, len(rows)
        used = [-(-row.stop // size) for row in rows]
        begins = [0, *accumulate(row.stop - row.start for row in rows)]
        fed = begins[-1]
        told: tuple[list[int], ...] = (
            [each for row in rows for each in row.sequence.tokens(row.start, row.stop)],
            [each for row in rows for each in range(row.start, row.stop)],
            [place for place, row in enumerate(rows) for _ in range(row.start, row.stop)],
            begins,
            [0, *accumulate(used)],
            [page for row, pages in zip(rows, used, strict=True) for page in row.pages[:pages]],
            [*range(fed)]
            if everywhere
            else [
                begin - row.start + each
                for row, begin in zip(rows, begins, strict=False)
                for each in row.wanted
            ],
        )
        numbers = integers([*chain.from_iterable(told)])
        tokens, *where = torch.split(numbers, [*map(len, told)])
        wanted = len(told[-1])
        x = functional.embedding(tokens, self._model.embedding).float()
        turns = [each.float().contiguous() for each in self._model.rotary(x, where[0][None] + later)]
        if any(each.shape != (1, fed, self._model.head_dim) for each in turns):
            raise ValueError(f"rotations of {[tuple(each.shape) for each in turns]}")
        longest, several = _reach(rows), _reach(row for row in rows if row.stop - row.start > 1)
        *parts, sums = [x.new_empty(fed, columns, dtype=dtype) for columns, dtype in self._parts]
        scores = x.new_empty(self._model.threads, self._scored, longest)
        laid = x.new_empty(self._cache.planes, self._of_token * several, dtype=self._model.products)
        logits = x.new_empty(wanted, self._model.vocabulary)
        step = _Step(
            *(count, fed, wanted, size, longest, *self._cache.tensor.stride()[:4], self._cache.address),
            *map(_at, (*where, self._windows, *turns, x, *parts, scores, *laid, logits, sums)),
            *(self._scored, several),
        )
        self._model.compute(step)
        return logits


def _reach(rows: abc.Iterable[Row]) -> int:
    """Positions of the longest, up to whole strips."""
    return -(-max((row.stop for row in rows), default=0) // STRIP) * STRIP


def _paired(weight: torch.Tensor, block: int) -> torch.Tensor:
    halves = weight.view(2, -1, block // 2, weight.shape[1])
    return halves.transpose(0, 1).reshape(weight.shape)


def _in_blocks(weight: torch.Tensor, block: int) -> torch.Tensor:
    """[outs, depth] as [blocks, depth / pair, block, pair], the last block filled up with zeros. A pair fills
    four bytes."""
    outs, depth = weight.shape
    pair = 4 // weight.itemsize
    if outs % block:
        weight = torch.cat((weight, weight.new_zeros(-outs % block, depth)))
    return weight.view(-1, block, depth // pair, pair).transpose(1, 2)


def _at(tensor: torch.Tensor) -> int:
    """Where it lies: whoever asks keeps it."""
    return tensor.data_ptr()
