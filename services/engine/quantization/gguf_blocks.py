"""Quantized blocks of a GGUF file, as weights of the model that was converted from it.

The file's own blocks of codes are used as they are. The transformers library permutes the rows of some
weights as it reads a file. So rows are matched by the numbers that they stand for. A weight whose rows match
no tensor of the file has no codes.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, ReaderTensor, get_tensor_name_map

from baton.engine.gguf.gguf_file import Reader
from baton.engine.quantization.quantized_weight import NotQuantizable, QuantizedWeight

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""Array of bytes, mostly of the shape [blocks, bytes per block]."""


class GgufBlocks:
    """The quantized blocks in one GGUF file, by the model's weight names."""

    def __init__(self, path: Path) -> None:
        """Open the GGUF file `path`. Raises the errors of the gguf package for a file that it cannot read."""
        file = Reader(path)
        self._tensors: Mapping[str, ReaderTensor] = {each.name: each for each in file.tensors}
        architecture = file.fields["general.architecture"].contents()
        kinds = [kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture]
        layers = file.fields.get(f"{architecture}.block_count")
        count = 0 if layers is None else int(layers.contents())
        self._names = get_tensor_name_map(kinds[0], count) if kinds else None

    def kind(self, name: str) -> str:
        """Return the name of the GGUF type, such as Q4_K, of the file's tensor for the model's weight `name`.
        Raises NotQuantizable."""
        return str(self._tensor(name).tensor_type.name)

    def codes(self, name: str, weight: torch.Tensor) -> QuantizedWeight:
        """Return the quantized form of `weight`, the model's weight called `name`, from the file's blocks.

        Raises NotQuantizable if the file has no usable blocks for it.
        """
        tensor = self._tensor(name)
        unpack = UNPACKED.get(tensor.tensor_type)
        if unpack is None:
            raise NotQuantizable(tensor.tensor_type.name)
        outs, depth = weight.shape
        if tuple(map(int, tensor.shape)) != (depth, outs):
            raise NotQuantizable("a tensor of another shape")
        codes = unpack(np.asarray(tensor.data).reshape(outs, -1))
        return _in_order(codes, weight)

    def _tensor(self, name: str) -> ReaderTensor:
        found = None if self._names is None else self._names.get_name(name, (".weight", ".bias"))
        if found == "output.weight" and found not in self._tensors:
            found = "token_embd.weight"  # the head is the embedding
        if found is None or found not in self._tensors:
            raise NotQuantizable("no tensor of its name")
        return self._tensors[found]


def _in_order(codes: QuantizedWeight, weight: torch.Tensor) -> QuantizedWeight:
    """Return quantized codes of a GGUF tensor with their rows in the order of the rows of `weight`.

    Raises NotQuantizable if a row of `weight` has other numbers than any row of the codes.
    """
    parts = [numbers.to(weight.dtype) for _, numbers in codes.in_parts()]
    numbers = torch.cat(parts)
    if numbers.equal(weight):
        return codes
    indices = {row.tobytes(): index for index, row in enumerate(_bytes(numbers))}
    order = [indices.get(row.tobytes(), -1) for row in _bytes(weight)]
    if -1 in order:
        raise NotQuantizable("other numbers than the file's")
    return codes.rows(torch.tensor(order))


def _bytes(rows: torch.Tensor) -> Bytes:
    return rows.contiguous().view(torch.uint8).numpy()


def _halves(blocks: Bytes, at: int) -> torch.Tensor:
    """Return the float16 number at byte `at` of each GGUF block."""
    return torch.from_numpy(np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0])


def _nibbles(packed: Bytes) -> Bytes:
    """Return the lower four bits of all bytes [..., bytes], followed by the upper four bits."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _in_blocks(rows: Bytes, size: int) -> Bytes:
    return rows.reshape(len(rows), -1, size)


def _codes(numbers: Any, kind: type[np.generic]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers.astype(kind).reshape(len(numbers), -1)))


def _q8_0(rows: Bytes) -> QuantizedWeight:
    blocks = _in_blocks(rows, 34)
    return QuantizedWeight(_codes(blocks[..., 2:].view(np.int8), np.int8), _halves(blocks, 0))


def _q4_0(rows: Bytes) -> QuantizedWeight:
    blocks = _in_blocks(rows, 18)
    return QuantizedWeight(_codes(_nibbles(blocks[..., 2:]), np.uint8), _halves(blocks, 0))


def _q4_1(rows: Bytes) -> QuantizedWeight:
    blocks = _in_blocks(rows, 20)
    return QuantizedWeight(
        _codes(_nibbles(blocks[..., 4:]), np.uint8), _halves(blocks, 0), _halves(blocks, 2)
    )


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    words = np.ascontiguousarray(blocks[..., at : at + 4])
    return np.unpackbits(words, axis=-1, bitorder="little")


def _q5_0(rows: Bytes) -> QuantizedWeight:
    blocks = _in_blocks(rows, 22)
    codes = _nibbles(blocks[..., 6:]) | _fifth_bits(blocks, 2) << 4
    return QuantizedWeight(_codes(codes.astype(np.int8) - 16, np.int8), _halves(blocks, 0))


def _q5_1(rows: Bytes) -> QuantizedWeight:
    blocks = _in_blocks(rows, 24)
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks, 4) << 4
    return QuantizedWeight(_codes(codes, np.int8), _halves(blocks, 0), _halves(blocks, 2))


def _of_eight(blocks: Bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and least numbers of the eight groups in each Q4_K or Q5_K block.

    A block begins with two numbers and 12 bytes that hold eight pairs of 6 bits.
    """
    packed = blocks[..., 4:16]
    first, second, upper = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate((first & 63, upper & 15 | first >> 6 << 4), axis=-1)
    leasts = np.concatenate((second & 63, upper >> 4 | second >> 6 << 4), axis=-1)
    scale = _halves(blocks, 0).float()[..., None] * torch.from_numpy(scales).float()
    least = _halves(blocks, 2).float()[..., None] * torch.from_numpy(leasts).float()
    return scale.flatten(1), -least.flatten(1)


def _pairs(packed: Bytes) -> Bytes:
    """Return, for each group of 32 bytes, their lower four bits and then their upper four bits."""
    return _nibbles(packed.reshape(*packed.shape[:-1], -1, 32))


def _q4_k(rows: Bytes) -> QuantizedWeight:
    blocks = _in_blocks(rows, 144)
    return QuantizedWeight(_codes(_pairs(blocks[..., 16:]), np.uint8), *_of_eight(blocks))


def _q5_k(rows: Bytes) -> QuantizedWeight:
    blocks = _in_blocks(rows, 176)
    fifth = blocks[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    lower = _pairs(blocks[..., 48:]).reshape(fifth.shape)
    return QuantizedWeight(_codes(lower | fifth << 4, np.int8), *_of_eight(blocks))


def _q6_k(rows: Bytes) -> QuantizedWeight:
    blocks = _in_blocks(rows, 210)
    lower = blocks[..., :128].reshape(*blocks.shape[:-1], 2, 1, 64) >> np.array([[0], [4]], np.uint8) & 15
    upper = (
        blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8)
        & 3
    )
    codes = lower.reshape(*blocks.shape[:-1], -1) | upper.reshape(*blocks.shape[:-1], -1) << 4
    scales = torch.from_numpy(np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)).float()
    scale = _halves(blocks, 208).float()[..., None] * scales
    return QuantizedWeight(_codes(codes.astype(np.int8) - 32, np.int8), scale.flatten(1), group=16)


UNPACKED: Final[Mapping[GGMLQuantizationType, Callable[[Bytes], QuantizedWeight]]] = {
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}
"""Functions that unpack the rows of a tensor into codes and scales, by the GGUF type of the tensor.

Tensors of other types cannot be used as codes.
"""
