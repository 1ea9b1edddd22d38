"""How is a step of single tokens computed in one call?

On a CPU that multiplies bfloat16 a step of one token a row is one call of `decode_step.c`: all layers, over
weights in blocks and the pages as they lie. Library calls one by one read weights at two thirds of the
memory's speed, and keys and values at a third: no library that we know of has either fused, or takes such
pages. What a row gets does not depend on what else is in the step.

It is used where `proof.py` has seen it agree with the library's definition; whatever has more than one token
of a row is computed by `decoder.py`.
"""

import ctypes
from collections import abc
from itertools import chain
from typing import Any, Final

import torch
from torch.nn import functional

from services.engine.decoder import Decoder, Layer, RmsNorm
from services.engine.kv_cache import PagedKvCache
from services.engine.linears import Blocked, Linear
from services.engine.rows import Row

LANES: Final = 16
PAIRS: Final = 2 * LANES
"""Numbers that the kernel takes at once, in float32 and in bfloat16."""
HEAD_DIM_MAX: Final = 8 * PAIRS

_Pointer: Final = ctypes.c_void_p
_Count: Final = ctypes.c_int64
_Number: Final = ctypes.c_float


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Layer(ctypes.Structure):
    """`struct layer` of the source, as the others."""

    _fields_ = [
        *_fields(_Pointer, "qkv out gate_and_up down"),
        *_fields(_Pointer, "qkv_bias out_bias gate_and_up_bias down_bias"),
        *_fields(_Pointer, "before_attention query_norm key_norm before_gate"),
        *_fields(_Number, "before_attention_epsilon query_norm_epsilon key_norm_epsilon before_gate_epsilon"),
        *_fields(_Number, "scaling"),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *_fields(_Count, "layers hidden heads kv_heads head_dim width vocabulary"),
        ("layer", ctypes.POINTER(_Layer)),
        *_fields(_Pointer, "norm head head_bias"),
        *_fields(_Number, "norm_epsilon"),
        *_fields(ctypes.c_int32, "threads"),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *_fields(_Count, "rows wanted pages page_tokens longest"),
        *_fields(_Pointer, "cache positions table keep cosine sine"),
        *_fields(_Pointer, "x normed qkv seen gated scores logits"),
    ]


class CompiledSteps:
    """Of a model whose weights lie in blocks, over one cache. One step at a time."""

    def __init__(self, decoder: Decoder, cache: PagedKvCache, kernel: Any) -> None:
        """Raises ValueError where the kernel does not know such shapes."""
        first = decoder.layers[0]
        heads, kv_heads = first.heads
        hidden = decoder.embedding.shape[1]
        for what, size, of in (
            ("hidden size", hidden, PAIRS),
            ("head", first.head_dim, PAIRS),
            ("feed-forward width", first.width, LANES),
            ("page", cache.layout.page_tokens, 2),
        ):
            if size % of:
                raise ValueError(f"a {what} of {size}, which is no multiple of {of}")
        if first.head_dim > HEAD_DIM_MAX:
            raise ValueError(f"a head of {first.head_dim}, which is more than {HEAD_DIM_MAX}")
        self._decoder = decoder
        self._cache = cache
        self._kernel = kernel
        self._threads = torch.get_num_threads()
        self._group = heads // kv_heads
        self._widths = {
            "normed": hidden,
            "qkv": (heads + 2 * kv_heads) * first.head_dim,
            "seen": heads * first.head_dim,
            "gated": first.width,
        }
        self._vocabulary = _blocked(decoder.head).outs
        befores = [decoder.first, *(layer.then for layer in decoder.layers)]
        told = map(_told, decoder.layers, befores)
        self._layers = (_Layer * len(decoder.layers))(*told)
        head = _blocked(decoder.head)
        self._model = _Model(
            len(decoder.layers),
            *(hidden, heads, kv_heads, first.head_dim, first.width, self._vocabulary),
            self._layers,
            *(_at(befores[-1].weight), _at(head.blocks), _at(head.bias)),
            befores[-1].epsilon,
            self._threads,
        )

    def logits(self, rows: abc.Sequence[Row]) -> torch.Tensor | None:
        """[N, vocabulary] in float32, of the checked `rows` that sample, in their order; None, and nothing
        was done, for a step that has more than one token of a row."""
        if any(row.stop - row.start > 1 for row in rows):
            return None
        size, count = self._cache.layout.page_tokens, len(rows)
        used = [-(-row.stop // size) for row in rows]
        width = max(used)
        tables = ([*row.pages[:pages], *[0] * (width - pages)] for row, pages in zip(rows, used, strict=True))
        wanted = [place for place, row in enumerate(rows) if row.sample]
        ids = chain.from_iterable(row.sequence.tokens(row.start, row.stop) for row in rows)
        starts = (row.start for row in rows)
        numbers = torch.tensor([*ids, *starts, *chain.from_iterable(tables), *wanted])
        sizes = [count, count, count * width, len(wanted)]
        tokens, positions, table, keep = torch.split(numbers, sizes)
        x = functional.embedding(tokens, self._decoder.embedding).float()
        cosine, sine = self._decoder.rotary(x, positions[None])
        longest = -(-max(row.stop for row in rows) // LANES) * LANES + LANES
        parts = {
            name: x.new_empty(count, columns, dtype=torch.float32 if name == "qkv" else torch.bfloat16)
            for name, columns in self._widths.items()
        }
        scores = x.new_empty(self._threads, self._group, longest)
        logits = x.new_empty(len(wanted), self._vocabulary)
        places = (positions, table, keep, cosine.contiguous(), sine.contiguous(), x)
        step = _Step(
            *(count, len(wanted), width, size, longest, self._cache.address),
            *map(_at, (*places, *parts.values(), scores, logits)),
        )
        self._kernel(ctypes.byref(self._model), ctypes.byref(step))
        return logits


def _told(layer: Layer, before: RmsNorm) -> _Layer:
    parts = [*map(_blocked, (layer.qkv, layer.out, layer.gate_and_up, layer.down))]
    norms = (before, layer.query_norm, layer.key_norm, layer.before_gate)
    return _Layer(
        *(_at(part.blocks) for part in parts),
        *(_at(part.bias) for part in parts),
        *(_at(None if norm is None else norm.weight) for norm in norms),
        *(0.0 if norm is None else norm.epsilon for norm in norms),
        layer.scaling,
    )


def _blocked(linear: Linear) -> Blocked:
    if not isinstance(linear, Blocked):
        raise TypeError("a weight that does not lie in blocks")
    return linear


def _at(tensor: torch.Tensor | None) -> int | None:
    """Where it lies: whoever asks keeps it."""
    return None if tensor is None else tensor.data_ptr()
