"""How do the weights of a model become codes, and what is said of it?

A definition that is loaded is given the numbers that the codes stand for: what it computes from then on is
what steps over codes have to agree with (`proof.py`), and what a worker computes that multiplies no codes.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import nn

from baton.engine.quantization.quantized_weight import NotQuantizable, QuantizedWeight, coded
from baton.models.model_files import ModelKind, ModelSource
from baton.runtime.errors import StartupError
from baton.runtime.logging import Log
from baton.runtime.model_options import Quantize

log = Log(__name__)

KEPT: Final = "kept "
BITS: Final = {Quantize.INT8: 8, Quantize.INT4: 4}
OF_THE_HEAD: Final = 8
"""Bits, at least: every token's likelihood is a product with it."""
ELSE: Final = 8
"""Bits of what a file has no blocks for that are kept."""


@dataclass(frozen=True, slots=True)
class WeightQuantization:
    """What `--quantize` asks for."""

    how: Quantize
    gguf: Path | None = None
    """The file that the model was made of, whose blocks are kept."""
    multiplied: bool = True
    """Codes are what is multiplied; else the numbers that they stand for."""

    def __str__(self) -> str:
        return f"--quantize {self.how.value}"


def weight_quantization(how: Quantize, source: ModelSource, *, multiplied: bool) -> WeightQuantization | None:
    """What `--quantize` asks for of the model at `source`. `multiplied`: by whoever computes with it; else it
    computes with the numbers that codes stand for."""
    if how is Quantize.NONE:
        return None
    return WeightQuantization(how, source.path if source.kind is ModelKind.GGUF else None, multiplied)


def code(name: str, module: Any, coding: WeightQuantization) -> Mapping[nn.Linear, QuantizedWeight]:
    """Codes for each weight of `module`, the model `name`, which gets the numbers that they stand for. Raises
    StartupError for a weight that has none, and where none is in blocks that are kept."""
    codes_of = _maker(module, coding)
    found: dict[nn.Linear, QuantizedWeight] = {}
    kinds: Counter[str] = Counter()
    for path, linear in module.named_modules():
        if isinstance(linear, nn.Linear):
            kind, codes = codes_of(path, linear)
            for which, numbers in codes.in_parts():
                linear.weight.data[which] = numbers
            found[linear] = codes
            kinds[kind] += 1
    if coding.how is Quantize.KEEP and not any(kind.startswith(KEPT) for kind in kinds):
        raise StartupError(
            f"{coding}: no weight of {name} is in blocks that are kept ({', '.join(kinds)}): "
            f"give --quantize int8 or int4"
        )
    log.info(
        "weights are kept as codes" if coding.multiplied else "weights are those that codes stand for",
        quantize=coding.how.value,
        weights=", ".join(f"{count} {kind}" for kind, count in kinds.items()),
        bytes=sum(each.nbytes for each in found.values()),
    )
    return found


def _maker(
    module: Any, coding: WeightQuantization
) -> Callable[[str, nn.Linear], tuple[str, QuantizedWeight]]:
    head = module.get_output_embeddings()
    if coding.how is Quantize.KEEP:
        return _kept(coding)

    def made(path: str, linear: nn.Linear) -> tuple[str, QuantizedWeight]:
        bits = max(BITS[coding.how], OF_THE_HEAD if linear is head else 0)
        return f"int{bits}", _made(path, linear, bits, coding)

    return made


def _kept(coding: WeightQuantization) -> Callable[[str, nn.Linear], tuple[str, QuantizedWeight]]:
    if coding.gguf is None:
        raise AssertionError("blocks are kept of a model that has none")
    from baton.engine.quantization.gguf_blocks import GgufBlocks

    blocks = GgufBlocks(coding.gguf)

    def kept(path: str, linear: nn.Linear) -> tuple[str, QuantizedWeight]:
        try:
            return f"{KEPT}{blocks.kind(f'{path}.weight')}", blocks.codes(
                f"{path}.weight", linear.weight.data
            )
        except NotQuantizable as why:
            return f"int{ELSE} for {why}", _made(path, linear, ELSE, coding)

    return kept


def _made(path: str, linear: nn.Linear, bits: int, coding: WeightQuantization) -> QuantizedWeight:
    try:
        return coded(linear.weight.data, bits)
    except NotQuantizable as why:
        raise StartupError(f"{coding}: the weight {path} cannot be kept as codes: {why}") from why
