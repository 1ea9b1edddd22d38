"""Execution of a step in one call of a compiled C function, on a CPU.

`step.c` computes all layers in one call, over weights in blocks and the pages in place. If float32 weights
are all exact in bfloat16, as in most published models, they are stored as bfloat16, with the same result.
Separate library calls read weights at two thirds of the memory's speed, and keys and values at a third. They
spend a quarter of a prompt's time between products. No library that we know fuses these or reads such pages.
The result of a row does not depend on the other rows of its step.

It is used if `runner_selection` has found that it agrees with the transformers implementation.
"""

import ctypes
from collections import abc
from itertools import accumulate, chain
from typing import Any, Final, TypeAlias

import torch
from torch import nn
from torch.nn import functional

from baton.engine.execution.attention_span import AttentionSpan
from baton.engine.execution.execution_kind import ExecutionKind
from baton.engine.execution.linear_layers import join_weights
from baton.engine.execution.model_structure import LayerStructure, ModelStructure, Norm
from baton.engine.execution.step_compiler import Kernel
from baton.engine.execution.step_plan import integers
from baton.engine.execution.weight_memory import WeightMemory
from baton.engine.kv_cache import EngineCache, PagedKvCache, only_attention
from baton.engine.quantization import quantized_weight
from baton.engine.quantization.quantized_weight import GROUPS, QuantizedWeight
from baton.engine_interface import Row
from baton.inference.runner import StatelessRunner
from baton.runtime.model_options import POSITIONS_MAX
from baton.sampling.draft_rows import split_drafts

STRIP: Final = 32
"""Number of elements that the compiled step processes at once. Hidden and head sizes have to be multiples of
it."""
HEAD_STRIPS: Final = 8
"""Largest size of an attention head that the compiled step supports, in strips of STRIP numbers."""
HALF: Final = 16
"""Number of feed-forward gates that the compiled step computes together. The feed-forward width has to be a
multiple of it."""
SIDE: Final = 4
"""Number of which the tokens per page have to be a multiple, so that the compiled step can read the pages."""
GROUP_MIN: Final = min(GROUPS)
ROWS_A_LOOK: Final = 1024
"""Rows of a weight that are checked at once for exactness in bfloat16, so that it is not copied as a
whole."""

KernelFor: TypeAlias = abc.Callable[[torch.dtype, torch.dtype], Kernel]
"""Function (dtype of keys and values, dtype of weights) that returns a compiled step.

Raises KernelUnavailable.
"""

_Pointer: Final = ctypes.c_void_p
_Count: Final = ctypes.c_int64
_Number: Final = ctypes.c_float


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Weight(ctypes.Structure):
    """Mirror of `struct weight` in step.c. The structures below mirror those of step.c likewise."""

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
    """The compiled step does not support a model's sizes. The message names the first such size."""


def check(
    structure: ModelStructure, head_dim: int, page_tokens: int, spans: abc.Iterable[AttentionSpan] = ()
) -> torch.dtype:
    """Return the dtype of the model's weights, if a compiled step can compute the model.

    `page_tokens`: tokens per page. `spans`: attention spans of its layers. Raises UnsupportedShapes if not.
    """
    if any(span.in_chunks for span in spans):
        raise UnsupportedShapes("layers that look at chunks of a sequence")
    hidden, width = structure.embedding.shape[1], structure.layers[0].down.in_features
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
        structure.norm,
        *(norm for each in structure.layers for norm in (each.before_attention, each.before_gate)),
    ]
    if any(norm.weight.shape != (hidden,) for norm in norms):
        raise UnsupportedShapes("norms of another width than what they are of")
    dtypes = {linear.weight.dtype for linear in structure.linears}
    if dtypes not in ({torch.bfloat16}, {torch.float32}):
        raise UnsupportedShapes(f"weights in {' and '.join(sorted(map(str, dtypes)))}")
    return dtypes.pop()


def fits_bfloat16(linears: abc.Iterable[nn.Linear]) -> bool:
    """Return whether all weights of `linears` are exact in bfloat16, whatever their dtype."""
    weights = (each.weight.data for each in linears if each.weight.dtype is not torch.bfloat16)
    parts = (part for each in weights for part in torch.split(each, ROWS_A_LOOK))
    return all(part.equal(part.bfloat16().to(part.dtype)) for part in parts)


class CompiledModel:
    """A model's weights in the memory layout of the compiled step."""

    def __init__(
        self,
        structure: ModelStructure,
        head_dim: int,
        kernel: Kernel,
        codes: abc.MutableMapping[nn.Linear, QuantizedWeight] | None = None,
    ) -> None:
        """Move the weights out of `structure`, whose sizes have passed `check`.

        `codes`: quantized weights by layer, if the step multiplies quantized weights. Both are empty
        afterwards.
        """
        self.numbers = structure.head.weight.dtype
        """Number format (dtype) of the keys and values in KV pages."""
        self.products = kernel.products
        self.weights = kernel.weights
        self._block = kernel.block
        self.rows = kernel.rows
        self.weight_bytes = 0
        """Bytes of weights that each step reads."""
        first = structure.layers[0]
        self.heads, self.kv_heads, _ = (each.out_features // head_dim for each in first.projections)
        self.projected = sum(each.out_features for each in first.projections)
        """Number of elements of the queries, keys and values of one token in one layer, all heads together.
        """
        self.hidden = structure.embedding.shape[1]
        self.width = first.down.in_features
        self.head_dim = head_dim
        self.rotary: Any = structure.rotary
        self.vocabulary = structure.head.out_features
        self.threads = torch.get_num_threads()
        self.kernel = kernel.step
        """The compiled C function that computes a step."""
        self._codes = codes
        self._pinned: list[torch.Tensor] = []
        """Tensors kept alive because the C structures of the model contain their addresses."""
        self._memory = WeightMemory()
        self._layers = (_Layer * len(structure.layers))()
        for index, parts in enumerate(structure.layers):
            self._layers[index] = self._layer(parts)
            for linear in parts.linears:
                del linear.weight, linear.bias
        head, bias = self._product([structure.head])
        del structure.head.weight
        if codes is not None:
            codes.clear()
        self._codes = None
        self.embedding = self._memory.put(structure.embedding)
        self._model = _Model(
            len(self._layers),
            *(self.hidden, self.heads, self.kv_heads, head_dim, self.projected, self.width, self.vocabulary),
            self._layers,
            *(self._norm(structure.norm), head, bias),
            structure.norm.epsilon,
            self.threads,
        )

    def compute(self, step: _Step) -> None:
        self.kernel(ctypes.byref(self._model), ctypes.byref(step))

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
        """Return the weights of `parts` joined into one, in blocks of output rows, and the address of their
        joined bias or None.

        `paired`: take half of each block from each of two parts, the first part first.
        """
        weight, bias = join_weights(parts)
        order = _paired(torch.arange(len(weight))[:, None], self._block)[:, 0] if paired else None
        address = None if bias is None else self._pin((bias if order is None else bias[order]).float())
        sizes: tuple[int, ...] = ()
        if self._codes is None:
            blocks = _in_blocks((weight if order is None else weight[order]).to(self.weights), self._block)
        else:
            codes = quantized_weight.join_quantized([self._codes.pop(each) for each in parts])
            codes = codes if order is None else codes.rows(order)
            blocks = quantized_weight.pack_blocks(codes, self._block)
            sizes = (codes.bits, codes.group, codes.scale.itemsize, codes.least is not None)
        self.weight_bytes += blocks.nbytes
        return _Weight(self._pin(blocks), *sizes), address

    def _norm(self, norm: Norm | None) -> int | None:
        return None if norm is None else self._pin(norm.weight.float())

    def _pin(self, tensor: torch.Tensor) -> int:
        """Copy `tensor`, keep the copy alive, and return its address.

        The original may be a view that keeps a whole file mapped.
        """
        self._pinned.append(self._memory.put(tensor))
        return self._pinned[-1].data_ptr()


class CompiledExecution:
    """Execution of a model by the compiled step on a CPU."""

    kind = ExecutionKind.COMPILED

    def __init__(self, model: CompiledModel, spans: abc.Mapping[int, AttentionSpan]) -> None:
        """Store the model. `spans`: attention spans by layer id, for layers that do not attend to all earlier
        tokens."""
        self.model = model
        self._spans = spans

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    def runner(self, caches: abc.Sequence[EngineCache]) -> "CompiledRunner":
        return self.runner_with(only_attention(caches), self._spans)

    def runner_with(self, cache: PagedKvCache, spans: abc.Mapping[int, AttentionSpan]) -> "CompiledRunner":
        """Return a runner that uses `spans` as attention spans in place of the model's own."""
        return CompiledRunner(self.model, cache, spans)


class CompiledRunner(StatelessRunner):
    """Runner that computes steps over one KV cache by the compiled step, one step at a time."""

    def __init__(
        self, model: CompiledModel, cache: PagedKvCache, spans: abc.Mapping[int, AttentionSpan]
    ) -> None:
        """Prepare to compute steps over `cache`.

        `spans`: attention spans by layer id, for layers that do not attend to all earlier tokens.
        """
        self._model = model
        self._cache = cache
        of_layers = (spans.get(layer) for layer in cache.group.layers)
        self._windows = integers([POSITIONS_MAX if each is None else each.tokens for each in of_layers])
        self._scored = max(model.heads // model.kv_heads, model.rows)
        self._kv_width = model.kv_heads * model.head_dim
        if cache.tensor.dtype is not model.numbers:
            raise ValueError(f"a cache of {cache.tensor.dtype} for a model in {model.numbers}")
        longest = max(model.hidden, model.heads * model.head_dim, model.width)
        self._buffers = (
            (model.hidden, model.products),
            (model.projected, torch.float32),
            (model.heads * model.head_dim, model.products),
            (model.width, model.products),
            (-(-longest // GROUP_MIN), torch.float32),
        )
        """Number of columns and dtype of each buffer for intermediate results. A buffer has one row per token
        of the step."""

    def logits(self, rows: abc.Sequence[Row]) -> torch.Tensor:
        """Return the logits of a step as `Runner.logits` does, in float32."""
        return self.logits_at(split_drafts(rows))

    def logits_at(self, rows: abc.Sequence[Row], *, everywhere: bool = False, later: int = 0) -> torch.Tensor:
        """Return logits [N, vocabulary] in float32 at the wanted positions of `rows`.

        `rows`: checked rows without draft tokens. `everywhere`: return the logits of all positions, row by
        row. `later`: number added to each position before queries and keys are rotated.
        """
        size, count = self._cache.group.page_tokens, len(rows)
        used = [-(-row.stop // size) for row in rows]
        begins = [0, *accumulate(row.stop - row.start for row in rows)]
        fed = begins[-1]
        parts: tuple[list[int], ...] = (
            [each for row in rows for each in row.sequence.tokens(row.start, row.stop)],
            [each for row in rows for each in range(row.start, row.stop)],
            [index for index, row in enumerate(rows) for _ in range(row.start, row.stop)],
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
        numbers = integers([*chain.from_iterable(parts)])
        tokens, *where = torch.split(numbers, [*map(len, parts)])
        wanted = len(parts[-1])
        x = functional.embedding(tokens, self._model.embedding).float()
        rotations = [each.float().contiguous() for each in self._model.rotary(x, where[0][None] + later)]
        if any(each.shape != (1, fed, self._model.head_dim) for each in rotations):
            raise ValueError(f"rotations of {[tuple(each.shape) for each in rotations]}")
        longest = _whole_strips(rows)
        longest_chunk = _whole_strips(row for row in rows if row.stop - row.start > 1)
        *buffers, sums = [x.new_empty(fed, columns, dtype=dtype) for columns, dtype in self._buffers]
        scores = x.new_empty(self._model.threads, self._scored, longest)
        laid = x.new_empty(self._cache.planes, self._kv_width * longest_chunk, dtype=self._model.products)
        logits = x.new_empty(wanted, self._model.vocabulary)
        step = _Step(
            *(count, fed, wanted, size, longest, *self._cache.tensor.stride()[:4], self._cache.address),
            *map(_address, (*where, self._windows, *rotations, x, *buffers, scores, *laid, logits, sums)),
            *(self._scored, longest_chunk),
        )
        self._model.compute(step)
        return logits


def _whole_strips(rows: abc.Iterable[Row]) -> int:
    """Return the length in tokens of the longest sequence in `rows`, rounded up to a multiple of STRIP."""
    return -(-max((row.stop for row in rows), default=0) // STRIP) * STRIP


def _paired(weight: torch.Tensor, block: int) -> torch.Tensor:
    halves = weight.view(2, -1, block // 2, weight.shape[1])
    return halves.transpose(0, 1).reshape(weight.shape)


def _in_blocks(weight: torch.Tensor, block: int) -> torch.Tensor:
    """Return the weight [outs, depth] reordered to [blocks, depth / pair, block, pair].

    A pair is as many neighbouring numbers as four bytes hold. The last block is padded with zeros.
    """
    outs, depth = weight.shape
    pair = 4 // weight.itemsize
    if outs % block:
        weight = torch.cat((weight, weight.new_zeros(-outs % block, depth)))
    return weight.view(-1, block, depth // pair, pair).transpose(1, 2)


def _address(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's data. The caller has to keep `tensor` alive."""
    return tensor.data_ptr()
