"""How does a rank get its part of a model, and no more, from the files?

The definition is made without memory for its weights, cut, and then filled: of each weight that part is read
which this rank holds.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol
from zlib import crc32

import torch
from safetensors import safe_open
from torch import nn

from services.engine.container import attention_of, maker_of
from services.engine.quantised import Quantisation, Table
from services.engine.split import Slice
from services.engine.unpacking import DoesNotFit, Packed, numbers_of
from services.runtime.model_facts import ModelUnreadable, stored_types, weight_files

SPREAD: Final = 0.02


def bare_module(config: Any, dtype: torch.dtype) -> Any:
    """The definition of `config`'s model, with the weights on the meta device and everything else real."""
    with _weights_without_memory():
        return maker_of(config).from_config(
            config, dtype=dtype, attn_implementation=attention_of(config), trust_remote_code=False
        )


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


def bytes_of(module: Any, slices: dict[str, Slice]) -> int:
    """What `fill` will take."""
    total = 0
    for path, weight in module.named_parameters():
        part = slices.get(path)
        whole = weight.numel() * weight.element_size()
        total += whole if part is None else whole // weight.shape[part.dim] * (part.stop - part.start)
    return total


class Weights(Protocol):
    """The weights of a model, by name."""

    def __contains__(self, name: str) -> bool: ...
    def read(self, name: str, shape: tuple[int, ...], part: Slice | None) -> torch.Tensor:
        """The weight `name`, which as a whole has `shape`, or a part of it. Raises ModelUnreadable."""


def fill(module: Any, slices: dict[str, Slice], weights: Weights, device: torch.device) -> None:
    """Give every parameter of `module`, whose names are those of `weights`, its values, in its own number
    format, on `device`. Raises ModelUnreadable for one that is not there or has another shape."""
    tied = _tied(module)
    tied.update({source: target for target, source in tied.items()})
    wholes: dict[str, torch.Tensor] = {}
    for path, weight in list(module.named_parameters(remove_duplicate=False)):
        source = path if path in weights else tied.get(path, path)
        part = slices.get(path)
        if source in wholes and (part is None or part.dim == 0):
            # A head that is tied to an embedding which is whole on this rank takes no memory of its own.
            values = wholes[source] if part is None else wholes[source][part.start : part.stop]
        else:
            found = weights.read(source, tuple(weight.shape), part)
            # A copy: what is read may be a view of the file, of which then all would be held.
            values = torch.empty(found.shape, dtype=weight.dtype, device=device).copy_(found)
        if part is None:
            wholes[source] = values
        parent, _, name = path.rpartition(".")
        module.get_submodule(parent).register_parameter(name, nn.Parameter(values, requires_grad=False))
    for path, buffer in module.named_buffers():
        if path in weights:
            buffer.copy_(weights.read(path, tuple(buffer.shape), None))


def _tied(module: Any) -> dict[str, str]:
    """Names of weights that are others, with those."""
    return dict(getattr(module, "all_tied_weights_keys", None) or {})


class Dummies:
    """Any numbers of bfloat16, as most models are published in, about as large as a model's; the same for a
    name on all devices of one kind."""

    def __init__(self, module: Any, device: torch.device) -> None:
        """`module`: as a whole."""
        self._names = {name for name, _ in module.named_parameters()} - _tied(module).keys()
        self._device = device

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def read(self, name: str, shape: tuple[int, ...], part: Slice | None) -> torch.Tensor:
        if len(shape) == 1:
            values = torch.full(shape, float(name.endswith("weight")), device=self._device)  # norms, biases
        else:
            numbers = torch.Generator(self._device).manual_seed(crc32(name.encode()))
            values = (
                torch.randn(shape, generator=numbers, device=self._device).mul_(SPREAD).bfloat16().float()
            )
        return values if part is None else values.narrow(part.dim, part.start, part.stop - part.start)


@contextmanager
def weights_in(directory: Path, how: Quantisation | None, dtype: torch.dtype) -> Iterator["Files"]:
    """The files' own, those that are quantised as numbers of `dtype`. Raises ModelUnreadable."""
    with ExitStack() as stack:
        yield Files(directory, how, dtype, stack)


class Files:
    """The weights of a model directory, wherever and however they lie."""

    def __init__(
        self, directory: Path, how: Quantisation | None, dtype: torch.dtype, stack: ExitStack
    ) -> None:
        self._directory = directory
        self._dtype = dtype
        self._places: dict[str, Any] = {}
        for file in weight_files(directory):
            opened = stack.enter_context(safe_open(file, framework="pt"))
            self._places.update(dict.fromkeys(opened.keys(), opened))
        self.table = Table(directory, stored_types(directory), self._stored, how)
        self._names = {*self.table.plain, *self.table.packed}

    def _stored(self, name: str) -> "StoredTensor":
        return StoredTensor(self._places[name], name)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def read(self, name: str, shape: tuple[int, ...], part: Slice | None) -> torch.Tensor:
        if name not in self._names:
            raise ModelUnreadable(
                f"{self._directory}: the files lack the model's weight {name}; one that the library would "
                "make of others as it loads them is not made for several ranks"
            )
        packed = self.table.packed.get(name)
        stored = self._stored(name) if packed is None else packed
        if stored.shape != shape:
            raise ModelUnreadable(
                f"{self._directory}: the weight {name} has the shape {list(stored.shape)}, not {list(shape)}"
            )
        if packed is not None:
            return self._dequantised(name, packed, part)
        whole = self._stored(name)
        if part is None:
            return whole.whole()
        return (whole.rows if part.dim == 0 else whole.columns)(part.start, part.stop)

    def _dequantised(self, name: str, packed: Packed, part: Slice | None) -> torch.Tensor:
        cut: list[range | None] = [None, None]
        if part is not None:
            cut[part.dim] = range(part.start, part.stop)
        try:
            return numbers_of(packed, self._dtype, *cut)
        except DoesNotFit as error:
            raise ModelUnreadable(f"{self._directory}: the weight {name} is damaged: {error}") from error

    def pending(self) -> "dict[str, PendingWeight | Any]":
        """Every weight by its name, to be read where it is indexed, as the model library does."""
        plain = {name: self._places[name].get_slice(name) for name in self.table.plain}
        packed = {
            name: PendingWeight(partial(self._dequantised, name, each, None))
            for name, each in self.table.packed.items()
        }
        return plain | packed


class StoredTensor:
    """One of a safetensors file. What is read may be a view of the file."""

    def __init__(self, file: Any, name: str) -> None:
        self._file = file
        self._name = name
        self._slice = file.get_slice(name)
        self.shape = tuple(self._slice.get_shape())

    def whole(self) -> torch.Tensor:
        values: torch.Tensor = self._slice[:] if self.shape else self._file.get_tensor(self._name)
        return values

    def rows(self, start: int, stop: int) -> torch.Tensor:
        values: torch.Tensor = self._slice[start:stop]
        return values

    def columns(self, start: int, stop: int) -> torch.Tensor:
        values: torch.Tensor = self._slice[:, start:stop]
        return values


class PendingWeight:
    """A weight that is computed when all of it is asked for."""

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        self._compute = compute

    def __getitem__(self, which: Any) -> torch.Tensor:
        return self._compute()[which]
