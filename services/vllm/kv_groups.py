"""Groups of KV pages from vLLM's KV cache specifications of a model's layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

from baton.models.model_facts import UnsupportedModel
from baton.models.model_requirements import LATER
from baton.pages.layout import KvGroup, KvKind, KvPlane
from baton.runtime.errors import StartupError
from baton.vllm.memory import DTYPE_NAMES


@dataclass(frozen=True, slots=True)
class LayerSpecs:
    """The layers of this rank that keep KV, and what each of them keeps."""

    names: tuple[str, ...]
    """vLLM's names of the layers, in the order of their ids."""
    ids: tuple[int, ...]
    """Global ids of the layers."""
    spec: Any
    """Specification of each of them, but for its window."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of these layers."""
        size: int = self.spec.page_size_bytes
        return size * len(self.names)


def read_specs(name: str, specs: Mapping[str, Any]) -> LayerSpecs:
    """Return the layers in vLLM's `specs`, by layer name. `name`: of the model.

    Windows are kept as full attention. Raises UnsupportedModel, which names all that is missing.
    """
    missing = missing_features(list(specs.values()))
    if missing:
        raise UnsupportedModel.needing(name, "--engine vllm", missing)
    names = sorted(specs, key=extract_layer_index)
    return LayerSpecs(tuple(names), tuple(map(extract_layer_index, names)), specs[names[0]])


def missing_features(specs: Sequence[Any]) -> list[str]:
    """Return the features of layers with these specifications that are not served, in a few words each."""
    served = [each for each in specs if isinstance(each, (FullAttentionSpec, SlidingWindowSpec))]
    kinds = {type(each).__name__ for each in specs} - {type(each).__name__ for each in served}
    missing = [f"layers of kind {kind}" for kind in sorted(kinds)]
    dtypes = {str(each.dtype) for each in served if each.dtype not in DTYPE_NAMES}
    missing += [f"keys and values in {dtype}" for dtype in sorted(dtypes)]
    if len({(type(each) is MLAAttentionSpec, each.block_size, each.page_size_bytes) for each in served}) > 1:
        missing.append("layers whose keys and values differ in size")
    if any(getattr(each, "non_causal", False) for each in served):
        missing.append(LATER)
    return missing if specs else ["layers with keys and values"]


def check_layout(backend: Any, layout: str, heads: int) -> None:
    """Raise StartupError unless attention takes pages in vLLM's `layout`. `heads`: KV heads of a rank."""
    layouts = backend.supported_kv_cache_layouts()
    taken = layout if layouts is None else [each.name for each in layouts]
    if layout not in taken and not (heads == 1 and "BLHNC" in taken):  # the same for one head
        raise StartupError(f"vLLM's attention {backend.get_name()} takes pages as {taken}, not as {layout}")


def kv_group(layers: Sequence[int], heads: Sequence[int], spec: Any) -> KvGroup:
    """Return the group of `layers` with these KV heads.

    MLA keeps one latent vector a token and layer, the same on all tensor ranks. Keys and values of different
    lengths are one vector, too.
    """
    dtype = DTYPE_NAMES[spec.dtype]
    if isinstance(spec, MLAAttentionSpec):
        heads = (0,)
    planes: tuple[KvPlane, ...] = (KvPlane("k", spec.head_size), KvPlane("v", spec.head_size))
    elements = spec.page_size_bytes // spec.block_size // spec.dtype.itemsize // spec.num_kv_heads
    if elements != 2 * spec.head_size:
        planes = (KvPlane("vector", elements),)
    return KvGroup(KvKind.FULL, dtype, spec.block_size, tuple(layers), tuple(heads), planes)
