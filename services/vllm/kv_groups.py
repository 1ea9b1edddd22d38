"""Groups of KV pages from vLLM's KV cache specifications of a model's layers.

Layers whose pages have the same geometry are one group. Windows and chunks are a matter of a layer's
attention, so such layers are kept as full attention. Recurrent and convolution layers keep a state for each
sequence.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from baton.models.model_facts import UnsupportedModel
from baton.models.model_requirements import LATER
from baton.pages.layout import DTYPE_BYTES, GROUPS_MAX, KvGroup, KvKind, KvPlane, state_group
from baton.runtime.errors import StartupError
from baton.vllm.memory import DTYPE_NAMES

ATTENTION = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
"""Specifications of layers that keep keys and values of each token."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of this rank whose pages have one geometry."""

    names: tuple[str, ...]
    """vLLM's names of the layers, in the order of their ids."""
    ids: tuple[int, ...]
    """Global ids of the layers."""
    spec: Any
    """Specification of each of them, without its window or chunk, and without padding."""
    backend: Any
    """vLLM's attention back end of the first of them."""
    chunks: frozenset[int] = frozenset()
    """Sizes of the chunks within which layers attend, in tokens."""

    @property
    def is_state(self) -> bool:
        """Whether the layers keep a state for each sequence."""
        return isinstance(self.spec, MambaSpec)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of these layers."""
        size: int = self.spec.page_size_bytes
        return size * len(self.names)


def group_layers(
    name: str, layers: int, specs: Mapping[str, Any], backends: Mapping[str, Any]
) -> list[LayerGroup]:
    """Return the groups of the layers in vLLM's `specs`, by layer name.

    `name`: of the model. `layers`: its number of layers. vLLM numbers the second cache of a layer behind the
    last layer (Falcon-H1). `backends`: attention back ends, by layer name. Raises UnsupportedModel, which
    names all that is missing.
    """
    missing = missing_features(list(specs.values()))
    if missing:
        raise UnsupportedModel.needing(name, "--engine vllm", missing)
    alike: dict[Any, list[str]] = defaultdict(list)
    for layer in sorted(specs, key=extract_layer_index):
        alike[_plain(specs[layer]), backends[layer].get_name()].append(layer)
    groups = [
        LayerGroup(
            tuple(names),
            tuple(extract_layer_index(each) % layers for each in names),
            spec,
            backends[names[0]],
            frozenset(chunk for each in names if (chunk := getattr(specs[each], "attention_chunk_size", 0))),
        )
        for (spec, _), names in alike.items()
    ]
    if any(len(set(each.ids)) < len(each.ids) for each in groups):
        raise UnsupportedModel.needing(name, "--engine vllm", ["layers with two caches of one kind"])
    return groups


def missing_features(specs: Sequence[Any]) -> list[str]:
    """Return the features of layers with these specifications that are not served, in a few words each."""
    served = [each for each in specs if isinstance(each, (*ATTENTION, MambaSpec))]
    kinds = {type(each).__name__ for each in specs} - {type(each).__name__ for each in served}
    missing = [f"layers of kind {kind}" for kind in sorted(kinds)]
    stored = {dtype for each in served if not isinstance(each, MambaSpec) for dtype in (each.dtype,)}
    missing += [f"keys and values in {dtype}" for dtype in sorted(map(str, stored - DTYPE_NAMES.keys()))]
    states = {dtype for each in served if isinstance(each, MambaSpec) for dtype in each.dtypes}
    missing += [f"states in {dtype}" for dtype in sorted(map(str, states - DTYPE_NAMES.keys()))]
    if any(getattr(each, "non_causal", False) for each in served):
        missing.append(LATER)
    return missing if specs else ["layers with keys and values"]


def check_layout(backend: Any, layout: str, heads: int) -> None:
    """Raise StartupError unless attention takes pages in vLLM's `layout`. `heads`: KV heads of a rank."""
    layouts = backend.supported_kv_cache_layouts()
    taken = layout if layouts is None else [each.name for each in layouts]
    if layout not in taken and not (heads == 1 and "BLHNC" in taken):  # the same for one head
        raise StartupError(f"vLLM's attention {backend.get_name()} takes pages as {taken}, not as {layout}")


def kv_group(layers: LayerGroup, heads: int, ranks: int, context_length: int) -> KvGroup:
    """Return the KV group of `layers`. Its encoding has the attention's name.

    `heads`: KV heads over all tensor-parallel ranks. `ranks`: number of these ranks.
    MLA keeps one latent vector a token and layer, the same on all tensor ranks. Keys and values of different
    lengths are one vector, too.
    """
    spec, encoding = layers.spec, f"vllm-{_spelled(layers.backend.get_name())}"
    if layers.is_state:
        return _state_group(layers, ranks, context_length, encoding)
    planes: tuple[KvPlane, ...] = (KvPlane("k", spec.head_size), KvPlane("v", spec.head_size))
    elements = spec.page_size_bytes // spec.block_size // spec.dtype.itemsize // spec.num_kv_heads
    if elements != 2 * spec.head_size:
        planes = (KvPlane("vector", elements),)
    ids = (0,) if isinstance(spec, MLAAttentionSpec) else tuple(range(heads))
    dtype = DTYPE_NAMES[spec.dtype]
    return KvGroup(KvKind.FULL, dtype, spec.block_size, layers.ids, ids, planes, encoding)


def merge_groups(parts: Iterable[KvGroup]) -> list[KvGroup]:
    """Return the groups of which `parts` have layers: attention first, in the order of their first layers.

    Raises StartupError for too many groups.
    """
    layers: dict[KvGroup, set[int]] = defaultdict(set)
    for part in parts:
        layers[replace(part, layers=())].update(part.layers)
    groups = [replace(each, layers=tuple(sorted(ids))) for each, ids in layers.items()]
    if len(groups) > GROUPS_MAX:
        raise StartupError(
            f"the model's layers have {len(groups)} KV groups, at most {GROUPS_MAX} are served"
        )
    return sorted(groups, key=lambda each: (each.is_state, each.layers))


def _plain(spec: Any) -> Any:
    """Return the specification without what does not change a page."""
    if isinstance(spec, MambaSpec):
        return replace(spec, page_size_padded=None)
    if type(spec) is FullAttentionSpec:
        return replace(spec, sliding_window=None, attention_chunk_size=None)
    if isinstance(spec, FullAttentionSpec):
        return spec
    given = {name: getattr(spec, name) for name in ("block_size", "num_kv_heads", "head_size", "dtype")}
    return FullAttentionSpec(**given, head_size_v=getattr(spec, "head_size_v", None))


def _state_group(layers: LayerGroup, ranks: int, context_length: int, encoding: str) -> KvGroup:
    """Return the KV group of layers with states, which vLLM divides among tensor ranks by a rule of its own.

    One head stands for the share of a rank, so that only equal shares fit together.
    """
    spec = layers.spec
    names = [DTYPE_NAMES[dtype] for dtype in spec.dtypes]
    dtype = min(names, key=DTYPE_BYTES.__getitem__)
    planes = tuple(
        KvPlane(f"state{index}", prod(shape) * each.itemsize // DTYPE_BYTES[dtype])
        for index, (shape, each) in enumerate(zip(spec.shapes, spec.dtypes, strict=True))
    )
    heads = (0,) if spec.tp_replicated else tuple(range(ranks))
    return state_group(dtype, context_length, layers.ids, heads, planes, "-".join((encoding, *names)))


def _spelled(name: str) -> str:
    return name.lower().replace("_", "-")
