"""Assignment of a quantized checkpoint's tensors to the weights that they make together.

All known formats are dequantized as they are loaded, and the model's own transformers implementation computes
over plain numbers. Tensors are recognized by the suffixes that each format adds to a weight's name. The
configuration states what they mean. Unknown ones are refused, so that codes are never taken for numbers.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from baton.engine.quantization.packed_weights import PackedWeight, TensorSource
from baton.engine.quantization.weight_formats import (
    WORD,
    AwqWeight,
    CompressedTensorsWeight,
    Fp4Weight,
    GptqWeight,
    Mxfp4Experts,
    ScaledWeight,
)
from baton.models.checkpoint_quantization import AWQ, MXFP4, CheckpointQuantization, UnspecifiedQuantization
from baton.models.model_facts import ModelUnreadable, stored_types

CODES: Final = frozenset({"F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "I8", "U8", "I32", "U32"})
"""Stored types of tensors that may contain quantized codes instead of plain weights, as safetensors spells
them."""
WHOLE: Final = frozenset({"I8", "U8", "I32", "U32"})
"""Types in CODES that a mask or an index table may have, too. A tensor of such a type need not contain codes.
"""
WEIGHTS: Final = frozenset({"weight", "qweight", "qzeros", "weight_packed"})
"""Suffixes of the names of tensors that contain weights. Integers in such a tensor are quantized codes,
because it is neither a mask nor an index table."""
COMPUTED: Final = frozenset(
    {"input_scale", "activation_scale", "input_global_scale", "output_scale"}
    | {"k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale"}
)
"""Suffixes of the names of tensors with scales for quantized activations or KV. They are ignored, since
neither is quantized."""


class CheckpointTensors:
    """Tensors of a quantized checkpoint, in groups: the tensors of a group together make one weight."""

    def __init__(
        self,
        directory: Path,
        types: Mapping[str, str],
        stored: Callable[[str], TensorSource],
        how: CheckpointQuantization | None,
    ) -> None:
        """Group the tensors of the checkpoint in `directory`.

        `types`: stored type of each tensor, by name. `stored`: returns a tensor by name. `how`: quantization
        of the checkpoint, None if it states none. Raises ModelUnreadable for a tensor of codes that belongs
        to no weight.
        """
        self._directory = directory
        self._types = types
        self._stored = stored
        self._how = how or CheckpointQuantization("")
        self._taken: set[str] = set()
        self.packed: dict[str, PackedWeight] = {}
        """Quantized weights by their names in the model's transformers implementation."""
        if how is not None:
            for name in types:
                self._enter(name)
        passed = COMPUTED if how is not None else frozenset()
        self.plain = [name for name in types if name not in self._taken and _end(name) not in passed]
        """Names of the tensors that are weights by themselves, unquantized."""
        codes = next((name for name in self.plain if self._is_codes(name)), None)
        if codes is not None:
            raise ModelUnreadable(
                f"{directory}: {codes} holds codes ({types[codes]}), and neither config.json nor the other "
                "tensors say what they stand for"
            )

    def _is_codes(self, name: str) -> bool:
        kind = self._types[name]
        return kind in CODES and (kind not in WHOLE or _end(name) in WEIGHTS or name.endswith("_blocks"))

    def _enter(self, name: str) -> None:
        stem, end = name.rpartition(".")[0], _end(name)
        weight: PackedWeight | None = None
        target = f"{stem}.weight"
        try:
            if end == "qweight":
                weight = self._integers(stem)
            elif end == "weight_packed":
                weight = self._words(stem)
            elif name.endswith("_blocks") and self._how.method == MXFP4:
                target = name.removesuffix("_blocks")
                weight = Mxfp4Experts(self._part(name), self._part(f"{target}_scales"))
            elif self._types[name] in CODES and not name.endswith(("_scale", "_scale_inv", "_scale_2")):
                target, weight = name, self._scaled(name)
        except KeyError as lacks:
            raise ModelUnreadable(
                f"{self._directory}: the files lack {lacks.args[0]}, part of {target}"
            ) from None
        except UnspecifiedQuantization as error:
            raise ModelUnreadable(f"{self._directory}: {error}") from error
        if weight is not None:
            self._taken.add(name)
            self.packed[target] = weight

    def _part(self, name: str) -> TensorSource:
        """Return the tensor `name`, and note that it is a part of a weight. Raises KeyError with the name if
        there is no such tensor."""
        if name not in self._types:
            raise KeyError(name)
        self._taken.add(name)
        return self._stored(name)

    def _if_there(self, name: str) -> TensorSource | None:
        return self._part(name) if name in self._types else None

    def _scaled(self, name: str) -> PackedWeight | None:
        """Return the quantized weight `name`, made of its codes and its scales. None if the checkpoint has no
        scales for it."""
        scale = self._if_there(f"{name}_scale_inv") or self._if_there(f"{name}_scale")
        if scale is None:
            return None
        if self._types[name] == "U8":
            return Fp4Weight(self._stored(name), scale, self._if_there(f"{name}_scale_2"))
        zero = self._if_there(f"{name}_zero_point")
        block = self._how.block_of(name.rpartition(".")[0])
        return ScaledWeight(self._stored(name), scale, block, zero)

    def _words(self, stem: str) -> PackedWeight:
        codes, scale = self._stored(f"{stem}.weight_packed"), self._part(f"{stem}.weight_scale")
        if self._types[f"{stem}.weight_packed"] != "I32":
            return Fp4Weight(codes, scale, self._if_there(f"{stem}.weight_global_scale"), divides=True)
        bits = int(self._how.group_of(stem).get("num_bits", 4))
        shape = self._part(f"{stem}.weight_shape").whole().tolist()
        zero, order = (self._if_there(f"{stem}.weight_{each}") for each in ("zero_point", "g_idx"))
        return CompressedTensorsWeight(codes, scale, bits, int(shape[1]), zero, order)

    def _integers(self, stem: str) -> PackedWeight:
        words, zeros, scales = (
            self._stored(f"{stem}.qweight"),
            self._part(f"{stem}.qzeros"),
            self._part(f"{stem}.scales"),
        )
        if self._how.method == AWQ:
            return AwqWeight(words, zeros, scales)
        order = self._if_there(f"{stem}.g_idx")
        bits = words.shape[0] * WORD // order.shape[0] if order else int(self._how.words["bits"])
        added = int(self._how.words.get("checkpoint_format", "gptq") == "gptq")
        return GptqWeight(words, zeros, scales, bits, added, order)


def _end(name: str) -> str:
    return name.rpartition(".")[2]


def refuse_quantized_files(directory: Path) -> None:
    """Raise ModelUnreadable if weights in `directory`, whose configuration states no quantization, are
    quantized codes."""

    def unread(name: str) -> TensorSource:
        raise AssertionError(name)

    CheckpointTensors(directory, stored_types(directory), unread, None)
