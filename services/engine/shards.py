"""How does a rank get its part of a model, and no more, from the files?

The definition is made without memory for its weights, cut, and then filled: of each weight that part is read
which this rank holds.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM

from services.engine.attention import NAME
from services.engine.split import Slice
from services.runtime.model_facts import ModelUnreadable, weight_files


def bare_module(config: Any, dtype: torch.dtype) -> Any:
    """The definition of `config`'s model, with the weights on the meta device and everything else real."""
    with _weights_without_memory():
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=NAME, trust_remote_code=False
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


def fill(module: Any, slices: dict[str, Slice], directory: Path, device: torch.device) -> None:
    """Read every parameter of `module`, whose names are those in the files of `directory`, in its own number
    format, onto `device`. Raises ModelUnreadable for one that is not there or has another shape."""
    tied: dict[str, str] = dict(getattr(module, "all_tied_weights_keys", None) or {})
    tied.update({source: target for target, source in tied.items()})
    wholes: dict[str, torch.Tensor] = {}
    with ExitStack() as stack:
        files = _Files(directory, stack)
        for path, weight in list(module.named_parameters(remove_duplicate=False)):
            source = path if path in files else tied.get(path, path)
            part = slices.get(path)
            if source in wholes and (part is None or part.dim == 0):
                # A head that is tied to an embedding which is whole on this rank takes no memory of its own.
                values = wholes[source] if part is None else wholes[source][part.start : part.stop]
            else:
                found = files.read(source, tuple(weight.shape), part)
                # A copy: what is read may be a view of the file, of which then all would be held.
                values = torch.empty(found.shape, dtype=weight.dtype, device=device).copy_(found)
            if part is None:
                wholes[source] = values
            parent, _, name = path.rpartition(".")
            module.get_submodule(parent).register_parameter(name, nn.Parameter(values, requires_grad=False))
        for path, buffer in module.named_buffers():
            if path in files:
                buffer.copy_(files.read(path, tuple(buffer.shape), None))


class _Files:
    """The weights of a model directory, by name, wherever they lie."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._places: dict[str, Any] = {}
        for file in weight_files(directory):
            opened = stack.enter_context(safe_open(file, framework="pt"))
            self._places.update(dict.fromkeys(opened.keys(), opened))

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def read(self, name: str, shape: tuple[int, ...], part: Slice | None) -> torch.Tensor:
        """The weight `name`, which as a whole has `shape`, or a part of it."""
        if name not in self._places:
            raise ModelUnreadable(
                f"{self._directory}: the files lack the model's weight {name}; one that the library would "
                "make of others as it loads them is not made for several ranks"
            )
        found = self._places[name].get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise ModelUnreadable(
                f"{self._directory}: the weight {name} has the shape {found.get_shape()}, not {list(shape)}"
            )
        if part is None:
            values: torch.Tensor = found[:]
        elif part.dim == 0:
            values = found[part.start : part.stop]
        else:
            values = found[:, part.start : part.stop]
        return values
