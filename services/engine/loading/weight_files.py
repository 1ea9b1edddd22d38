"""Reading of the weights in a model directory's files, and filling of a transformers implementation with
them.

The implementation is made without memory for its weights, partitioned, and then filled. Of each weight only
this rank's part is read.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import torch
from safetensors import safe_open
from torch import nn

from baton.engine.loading.text_model import attention_of, maker_of
from baton.engine.loading.weight_mapping import (
    Box,
    Cut,
    FileWeight,
    ShapesDiffer,
    Source,
    UnknownOperation,
    Weights,
    read_source,
    sources_of,
)
from baton.engine.quantization.checkpoint_tensors import CheckpointTensors
from baton.engine.quantization.packed_weights import PackedWeight, PartsMismatch, numbers_of
from baton.models.checkpoint_quantization import CheckpointQuantization
from baton.models.model_facts import ModelUnreadable, UnsupportedModel, own_name, stored_types, weight_files

SPREAD: Final = 0.02


def empty_module(config: Any, dtype: torch.dtype, *, ours: bool = True) -> Any:
    """Return the transformers implementation of `config` with weights on the meta device and everything else
    real.

    Parameters that the implementation wants in float32 whatever the model's dtype is are in float32. `ours`:
    use our attention.
    """
    with _weights_without_memory():
        module = maker_of(config).from_config(
            config, dtype=dtype, attn_implementation=attention_of(config, ours=ours), trust_remote_code=False
        )
    for pattern, wide in module._get_dtype_plan(dtype).items():
        named = re.compile(pattern.replace("*", ".*"))
        for path, each in [*module.named_parameters(), *module.named_buffers()]:
            if named.search(path):
                each.data = each.data.to(wide)
    return module


@contextmanager
def _weights_without_memory() -> Iterator[None]:
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def bytes_of(module: Any, cuts: Mapping[str, Cut]) -> int:
    """Return the bytes of memory that `fill` will take for the parameters of the model `module`.

    `cuts`: this rank's parts, by parameter.
    """
    total = 0
    for path, weight in module.named_parameters():
        cut = cuts.get(path)
        shape = weight.shape if cut is None else cut.of(weight.shape)
        total += prod(shape) * weight.element_size()
    return total


def plain_sources(weights: Weights) -> dict[str, Source]:
    """Return a source for each weight, by name, for a model whose parameters have the same names as the
    weights in its files."""
    return {name: FileWeight(weights, name) for name in weights.names}


def fill(module: Any, cuts: Mapping[str, Cut], sources: Mapping[str, Source], device: torch.device) -> None:
    """Give every parameter of `module` its values, or this rank's part of them, on `device`.

    `cuts`: this rank's parts, by parameter. `sources`: sources of all parameters that are not tied. Raises
    ModelUnreadable.
    """
    tied = _tied(module)
    wholes: dict[str, torch.Tensor] = {}
    for path, weight in list(module.named_parameters(remove_duplicate=False)):
        origin = path if path in sources else tied.get(path, path)
        cut = cuts.get(path)
        if origin in wholes and (cut is None or (cut.dim == 0 and len(cut.ranges) == 1)):
            # A head that is tied to an embedding which is whole on this rank takes no memory of its own.
            whole = wholes[origin]
            values = whole if cut is None else whole[cut.ranges[0].start : cut.ranges[0].stop]
        else:
            values = read_source(sources[origin], cut, weight.dtype, device)
        if cut is None:
            wholes[origin] = values
        parent, _, name = path.rpartition(".")
        module.get_submodule(parent).register_parameter(name, nn.Parameter(values, requires_grad=False))
    for path, buffer in module.named_buffers():
        if path in sources:
            buffer.copy_(read_source(sources[path], None, buffer.dtype, buffer.device))


def _may_lack(module: Any, path: str) -> bool:
    """Return whether the transformers implementation works without the parameter `path` in the model's
    files."""
    patterns = module._keys_to_ignore_on_load_missing or ()
    return any(re.search(pattern, path) for pattern in patterns)


def _ties(module: Any) -> dict[str, str]:
    """Return the name of the weight to which each tied weight is tied, by the name of the tied weight."""
    return dict(getattr(module, "all_tied_weights_keys", None) or {})


def _tied(module: Any) -> dict[str, str]:
    """Return, for each of two weights that are tied, the name of the other one, by name."""
    ties = _ties(module)
    return ties | {source: target for target, source in ties.items()}


class DummyWeights:
    """Random weights of a model's usual scale, in bfloat16, used in place of files (`--load-format dummy`).

    A weight's numbers depend only on its name, on all devices of one kind.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        """Store the names and shapes of the weights to make, those of the whole transformers implementation
        `module`."""
        tied = _ties(module).keys()
        shapes = {name: tuple(each.shape) for name, each in module.named_parameters()}
        self._shapes = {name: shape for name, shape in shapes.items() if name not in tied}
        self._device = device

    @property
    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, box: Box) -> torch.Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            values = torch.full(shape, float(name.endswith("weight")), device=self._device)  # norms, biases
        else:
            numbers = torch.Generator(self._device).manual_seed(crc32(name.encode()))
            values = (
                torch.randn(shape, generator=numbers, device=self._device).mul_(SPREAD).bfloat16().float()
            )
        return values[_slices(box)]


@contextmanager
def weights_in(
    directory: Path, how: CheckpointQuantization | None, dtype: torch.dtype
) -> Iterator["WeightFiles"]:
    """Open the weight files of a directory within the context. Raises ModelUnreadable.

    `how`: quantization of the checkpoint. Quantized weights are read as plain numbers of `dtype`.
    """
    with ExitStack() as stack:
        yield WeightFiles(directory, how, dtype, stack)


class WeightFiles:
    """The weights in the files of a model directory, in any supported format."""

    def __init__(
        self, directory: Path, how: CheckpointQuantization | None, dtype: torch.dtype, stack: ExitStack
    ) -> None:
        self._directory = directory
        self._dtype = dtype
        self._places: dict[str, Any] = {}
        for file in weight_files(directory):
            opened = stack.enter_context(safe_open(file, framework="pt"))
            self._places.update(dict.fromkeys(opened.keys(), opened))
        self.table = CheckpointTensors(directory, stored_types(directory), self._stored, how)
        self._names = {*self.table.plain, *self.table.packed}

    def _stored(self, name: str) -> "StoredTensor":
        return StoredTensor(self._places[name], name)

    @property
    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self.table.packed[name].shape if name in self.table.packed else self._stored(name).shape

    def read(self, name: str, box: Box) -> torch.Tensor:
        packed = self.table.packed.get(name)
        return self._stored(name).part(box) if packed is None else self._dequantised(name, packed, box)

    def sources(self, module: Any) -> dict[str, Source]:
        """Return the sources in these files of each parameter of `module`, a whole transformers
        implementation, by parameter name.

        Raises UnsupportedModel or ModelUnreadable.
        """
        try:
            sources = sources_of(module, self)
        except UnknownOperation as operation:
            raise UnsupportedModel(
                f"the model {own_name(self._directory)} ({module.config.model_type}) cannot be served by "
                f"several ranks: it needs weights that the library makes by {operation}"
            ) from operation
        except ShapesDiffer as weight:
            raise ModelUnreadable(
                f"{self._directory}: the weight {weight} has another shape than those that it is joined with"
            ) from weight
        tied = _tied(module)
        for name, each in module.state_dict().items():
            source = sources.get(name) or sources.get(tied.get(name, name))
            if source is None and not _may_lack(module, name):
                raise ModelUnreadable(f"{self._directory}: the files lack the model's weight {name}")
            if source is not None and source.shape != tuple(each.shape):
                raise ModelUnreadable(
                    f"{self._directory}: the weight {name} has the shape {list(source.shape)}, not "
                    f"{list(each.shape)}"
                )
        return sources

    def _dequantised(self, name: str, packed: PackedWeight, box: Box) -> torch.Tensor:
        try:
            return numbers_of(packed, self._dtype, box)
        except PartsMismatch as error:
            raise ModelUnreadable(f"{self._directory}: the weight {name} is damaged: {error}") from error

    def _copied(self, name: str) -> torch.Tensor:
        """Return a copy of a tensor, which does not keep the whole file mapped as a view would."""
        return self._stored(name).whole().clone()

    def pending(self) -> "dict[str, PendingWeight]":
        """Return all weights by name as transformers expects them: a weight is read from its file only when
        it is indexed."""
        plain = {name: PendingWeight(partial(self._copied, name)) for name in self.table.plain}
        packed = {
            name: PendingWeight(partial(self._dequantised, name, each, tuple(map(range, each.shape))))
            for name, each in self.table.packed.items()
        }
        return plain | packed


class StoredTensor:
    """A tensor in a safetensors file, of which parts can be read. A part may be a view of the mapped file."""

    def __init__(self, file: Any, name: str) -> None:
        self._file = file
        self._name = name
        self._slice = file.get_slice(name)
        self.shape = tuple(self._slice.get_shape())

    def whole(self) -> torch.Tensor:
        return self.part(tuple(map(range, self.shape)))

    def rows(self, start: int, stop: int) -> torch.Tensor:
        values: torch.Tensor = self._slice[start:stop]
        return values

    def columns(self, start: int, stop: int) -> torch.Tensor:
        values: torch.Tensor = self._slice[:, start:stop]
        return values

    def part(self, box: Sequence[range]) -> torch.Tensor:
        values: torch.Tensor = self._slice[_slices(box)] if box else self._file.get_tensor(self._name)
        return values


def _slices(box: Sequence[range]) -> tuple[slice, ...]:
    return tuple(slice(each.start, each.stop) for each in box)


class PendingWeight:
    """A weight that is read or computed only when it is indexed."""

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        self._compute = compute

    def __getitem__(self, which: Any) -> torch.Tensor:
        return self._compute()[which]
