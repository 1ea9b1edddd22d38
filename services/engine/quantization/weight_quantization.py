"""Quantization of a loaded model's weights, for the setting `--quantize`.

The loaded transformers implementation gets the numbers that the codes stand for. Steps that multiply codes
have to agree with its results (`runner_selection.py`). A worker that does not multiply codes computes with
the implementation.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import nn

from baton.engine.quantization.quantized_weight import NotQuantizable, QuantizedWeight, quantize_weight
from baton.models.model_files import ModelKind, ModelSource
from baton.runtime.errors import StartupError
from baton.runtime.logging import Log
from baton.runtime.model_options import Quantize

log = Log(__name__)

KEPT: Final = "kept "
BITS: Final = {Quantize.INT8: 8, Quantize.INT4: 4}
OF_THE_HEAD: Final = 8
"""Least bits per code for the model's output head, because the probability of every token depends on it."""
ELSE: Final = 8
"""Bits per code of a quantized weight for which the GGUF file has no usable blocks."""


@dataclass(frozen=True, slots=True)
class WeightQuantization:
    """Quantization that the setting `--quantize` requires for a model."""

    how: Quantize
    gguf: Path | None = None
    """Path of the model's GGUF file, whose blocks are used, or None if it has none."""
    multiplied: bool = True
    """Whether steps multiply the quantized codes themselves. If not, steps use the dequantized numbers."""

    def __str__(self) -> str:
        return f"--quantize {self.how.value}"


def weight_quantization(how: Quantize, source: ModelSource, *, multiplied: bool) -> WeightQuantization | None:
    """Return the quantization that the setting `how` requires for the model at `source`, or None for none.

    `multiplied`: whether the worker's steps multiply quantized codes.
    """
    if how is Quantize.NONE:
        return None
    return WeightQuantization(how, source.path if source.kind is ModelKind.GGUF else None, multiplied)


def quantize_model(
    name: str, module: Any, quantization: WeightQuantization
) -> Mapping[nn.Linear, QuantizedWeight]:
    """Quantize each linear layer of `module`, and write the dequantized numbers into it.

    Returns the quantized weights by layer. `name`: name of the model. Raises StartupError for a weight that
    cannot be quantized, and if a GGUF file's blocks are to be used and none can be.
    """
    codes_of = _maker(module, quantization)
    found: dict[nn.Linear, QuantizedWeight] = {}
    kinds: Counter[str] = Counter()
    for path, linear in module.named_modules():
        if isinstance(linear, nn.Linear):
            kind, codes = codes_of(path, linear)
            for which, numbers in codes.in_parts():
                linear.weight.data[which] = numbers
            found[linear] = codes
            kinds[kind] += 1
    if quantization.how is Quantize.KEEP and not any(kind.startswith(KEPT) for kind in kinds):
        raise StartupError(
            f"{quantization}: no weight of {name} is in blocks that are kept ({', '.join(kinds)}): "
            f"give --quantize int8 or int4"
        )
    log.info(
        "weights are kept as codes" if quantization.multiplied else "weights are those that codes stand for",
        quantize=quantization.how.value,
        weights=", ".join(f"{count} {kind}" for kind, count in kinds.items()),
        bytes=sum(each.nbytes for each in found.values()),
    )
    return found


def _maker(
    module: Any, quantization: WeightQuantization
) -> Callable[[str, nn.Linear], tuple[str, QuantizedWeight]]:
    head = module.get_output_embeddings()
    if quantization.how is Quantize.KEEP:
        return _file_codes(quantization)

    def made(path: str, linear: nn.Linear) -> tuple[str, QuantizedWeight]:
        bits = max(BITS[quantization.how], OF_THE_HEAD if linear is head else 0)
        return f"int{bits}", _made(path, linear, bits, quantization)

    return made


def _file_codes(quantization: WeightQuantization) -> Callable[[str, nn.Linear], tuple[str, QuantizedWeight]]:
    if quantization.gguf is None:
        raise AssertionError("blocks are kept of a model that has none")
    from baton.engine.quantization.gguf_blocks import GgufBlocks

    blocks = GgufBlocks(quantization.gguf)

    def codes_of_file(path: str, linear: nn.Linear) -> tuple[str, QuantizedWeight]:
        try:
            return f"{KEPT}{blocks.kind(f'{path}.weight')}", blocks.codes(
                f"{path}.weight", linear.weight.data
            )
        except NotQuantizable as why:
            return f"int{ELSE} for {why}", _made(path, linear, ELSE, quantization)

    return codes_of_file


def _made(path: str, linear: nn.Linear, bits: int, quantization: WeightQuantization) -> QuantizedWeight:
    try:
        return quantize_weight(linear.weight.data, bits)
    except NotQuantizable as why:
        raise StartupError(f"{quantization}: the weight {path} cannot be kept as codes: {why}") from why
