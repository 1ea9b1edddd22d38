"""Checkpoints in released quantization formats, and the plain numbers that they stand for.

Each format is written here from its definition, by loops over numbers and not by what reads it: a tensor's
name, its weight → the tensors of the file, and the weight as it is to be read.
"""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Quantise = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]

FP8_MAX: Final = 448.0
GROUP: Final = 16
BLOCK: Final = (40, 24)
"""Rows and columns of a block. Neither divides a weight's, so the last blocks are cut short."""
FP4: Final = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
LINEAR: Final = re.compile(r"^(?!.*vision).*(_proj(_with_mqa)?|\.w[123])\.weight$")
"""Pattern of the linear layers of a text model, and of experts with weights of their own."""
EXPERTS: Final = re.compile(r"\.experts\.\w+_proj$")
"""Pattern of gpt-oss's experts, [expert, in, out]."""
AWQ_COLUMNS: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""Order of the columns in a word, from the lowest bits."""


@dataclass(frozen=True)
class Format:
    """A quantization format of released checkpoints."""

    config: Mapping[str, Any]
    """The quantization_config."""
    quantise: Quantise
    ignored: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Tensors beside each weight that are not read."""
    of: re.Pattern[str] = LINEAR
    """Return the names of the weights in this format."""


def write(plain: Path, target: Path, form: Format) -> tuple[Path, Path]:
    """Write the model in `plain` in the format, and the model it stands for, to two directories below
    `target`."""
    quantised, meant = target / "quantised", target / "meant"
    for directory in (quantised, meant):
        shutil.copytree(plain, directory)
    stored: Tensors = {}
    numbers: Tensors = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if not form.of.search(name):
            stored[name] = numbers[name] = weight
            continue
        stem = name.removesuffix(".weight")
        parts, numbers[name] = form.quantise(stem, weight)
        stored.update(parts)
        stored.update({f"{stem}.{end}": value.clone() for end, value in form.ignored.items()})
    save_file({name: each.contiguous() for name, each in stored.items()}, quantised / "model.safetensors", PT)
    save_file({name: each.contiguous() for name, each in numbers.items()}, meant / "model.safetensors", PT)
    config = json.loads((plain / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": form.config}))
    return quantised, meant


PT: Final = {"format": "pt"}


def fp8_of(weight: torch.Tensor, scale: float) -> torch.Tensor:
    return (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def in_blocks(rows: int, columns: int, end: str = "weight_scale_inv", dtype: Any = torch.float32) -> Quantise:
    """FP8 with a scale for each rectangle, or for whole rows if it is as wide as they are."""

    def quantise(stem: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        high, wide = rows or weight.shape[0], columns or weight.shape[1]
        grid = -(-weight.shape[0] // high), -(-weight.shape[1] // wide)
        scales = torch.empty(grid, dtype=dtype)
        codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
        meant = torch.empty_like(weight)
        for row in range(grid[0]):
            for column in range(grid[1]):
                part = slice(row * high, (row + 1) * high), slice(column * wide, (column + 1) * wide)
                scales[row, column] = weight[part].abs().max() / FP8_MAX
                scale = float(scales[row, column])
                codes[part] = fp8_of(weight[part], scale)
                meant[part] = codes[part].float() * scales[row, column].float()
        return {f"{stem}.weight": codes, f"{stem}.{end}": scales}, meant

    return quantise


def by_tensor(end: str) -> Quantise:
    """FP8 with one scale."""

    def quantise(stem: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        tensors, meant = in_blocks(0, 0, end, torch.bfloat16)(stem, weight)
        return tensors | {f"{stem}.{end}": tensors[f"{stem}.{end}"].reshape(())}, meant

    return quantise


def int8_by_row(stem: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Integers with a scale and a zero point for each row."""
    low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    scale = ((high - low) / 255).bfloat16()
    zero = (-128 - low / scale.float()).round().clamp(-128, 127)
    codes = (weight / scale.float() + zero).round().clamp(-128, 127)
    tensors = {
        f"{stem}.weight": codes.to(torch.int8),
        f"{stem}.weight_scale": scale,
        f"{stem}.weight_zero_point": zero.to(torch.int8),
    }
    return tensors, (codes - zero) * scale.float()


def words_of(codes: np.ndarray[Any, Any], bits: int) -> torch.Tensor:
    """Pack codes along the last dimension into words of 32 bits, the first one lowest."""
    each = 32 // bits
    words = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // each)), dtype=np.uint32)
    for place in range(codes.shape[-1]):
        words[..., place // each] |= codes[..., place].astype(np.uint32) << np.uint32(bits * (place % each))
    return torch.from_numpy(words.view(np.int32).copy())


def grouped(
    weight: torch.Tensor, bits: int, group_of: np.ndarray[Any, Any], dtype: Any, *, symmetric: bool
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], torch.Tensor, torch.Tensor]:
    """Return [out, in] codes from 0 on, [out, group] zero points, scales, and the numbers they stand for."""
    rows, groups = weight.shape[0], int(group_of.max()) + 1
    codes = np.zeros(weight.shape, dtype=np.int64)
    zeros = np.full((rows, groups), 1 << bits - 1, dtype=np.int64)
    scales = torch.zeros(rows, groups, dtype=dtype)
    meant = torch.zeros_like(weight)
    top = (1 << bits) - 1
    for group in range(groups):
        columns = np.flatnonzero(group_of == group)
        part = weight[:, columns]
        if symmetric:
            scales[:, group] = part.abs().amax(1) / (1 << bits - 1)
        else:
            scales[:, group] = (part.amax(1) - part.amin(1)) / top
            zeros[:, group] = (-part.amin(1) / scales[:, group].float()).round().clamp(1, top).numpy()
        scale = scales[:, group].float()[:, None]
        zero = torch.from_numpy(zeros[:, group]).float()[:, None]
        code = (part / scale + zero).round().clamp(0, top)
        codes[:, columns] = code.long().numpy()
        meant[:, columns] = (code - zero) * scale
    return codes, zeros, scales, meant


def neighbours(columns: int) -> np.ndarray[Any, Any]:
    return np.arange(columns) // GROUP


def shuffled(columns: int) -> np.ndarray[Any, Any]:
    """Return groups of columns by their importance, as activation order makes them."""
    return np.random.default_rng(5).permutation(neighbours(columns)).astype(np.int32)


def compressed_words(bits: int, *, symmetric: bool, ordered: bool = False) -> Quantise:
    def quantise(stem: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = (shuffled if ordered else neighbours)(weight.shape[1])
        codes, zeros, scales, meant = grouped(weight, bits, groups, torch.bfloat16, symmetric=symmetric)
        tensors = {
            f"{stem}.weight_packed": words_of(codes, bits),
            f"{stem}.weight_scale": scales,
            f"{stem}.weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors[f"{stem}.weight_zero_point"] = words_of(zeros.T, bits).T
        if ordered:
            tensors[f"{stem}.weight_g_idx"] = torch.from_numpy(groups)
        return tensors, meant

    return quantise


def gptq(bits: int, *, ordered: bool, added: int) -> Quantise:
    def quantise(stem: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = (shuffled if ordered else neighbours)(weight.shape[1])
        codes, zeros, scales, meant = grouped(weight, bits, groups, torch.float16, symmetric=False)
        tensors = {
            f"{stem}.qweight": words_of(codes, bits).T,
            f"{stem}.qzeros": words_of(zeros.T - added, bits),
            f"{stem}.scales": scales.T,
            f"{stem}.g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return tensors, meant

    return quantise


def awq(stem: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    codes, zeros, scales, meant = grouped(
        weight, 4, neighbours(weight.shape[1]), torch.float16, symmetric=False
    )
    order = [place // 8 * 8 + AWQ_COLUMNS[place % 8] for place in range(weight.shape[0])]
    tensors = {
        f"{stem}.qweight": words_of(codes.T[:, order], 4),
        f"{stem}.qzeros": words_of(zeros.T[:, order], 4),
        f"{stem}.scales": scales.T,
    }
    return tensors, meant


def fp4_codes(numbers: torch.Tensor) -> torch.Tensor:
    """Return the nearest code of each number, from 0 to 15."""
    table = torch.tensor([*FP4, *(-each for each in FP4)])
    return (numbers[..., None] - table).abs().argmin(-1).to(torch.uint8)


def fp4_meant(codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor([*FP4, *(-each for each in FP4)])[codes.long()]


def nvfp4(*, compressed: bool) -> Quantise:
    """Groups of 16 with a scale in FP8, and one scale of the tensor in float32."""

    def quantise(stem: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        parts = weight.reshape(len(weight), -1, 16)
        most = parts.abs().amax(-1) / 6.0
        factor = most.max() / FP8_MAX
        scale = (most / factor).to(torch.float8_e4m3fn)
        whole = 1 / factor if compressed else factor
        each = scale.float() / whole if compressed else scale.float() * whole
        codes = fp4_codes(parts / each[..., None])
        meant = (fp4_meant(codes) * each[..., None]).flatten(1)
        pairs = codes.flatten(1)
        packed = pairs[:, ::2] | pairs[:, 1::2] << 4
        if compressed:
            names = ("weight_packed", "weight_scale", "weight_global_scale")
        else:
            names = ("weight", "weight_scale", "weight_scale_2")
        values = (packed, scale, whole.reshape(1) if compressed else whole.reshape(()))
        return {f"{stem}.{name}": value for name, value in zip(names, values, strict=True)}, meant

    return quantise


def mxfp4_experts(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Experts as in gpt-oss."""
    blocks, scales, meant = mxfp4(weight)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, meant


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return blocks, scales and the numbers they stand for, of gpt-oss's experts [expert, in, out]."""
    parts = weight.transpose(1, 2).reshape(len(weight), weight.shape[2], -1, 32)
    exponents = (parts.abs().amax(-1) / 6.0).log2().ceil()
    codes = fp4_codes(parts / exponents.exp2()[..., None])
    meant = (fp4_meant(codes) * exponents.exp2()[..., None]).flatten(2).transpose(1, 2)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8), meant


def by_expert(quantise: Quantise, *, turned: bool) -> Quantise:
    """Apply a format of linear layers to experts of one tensor, one by one. `turned`: that tensor is [expert,
    in, out]."""

    def each(stem: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        if weight.ndim == 2:
            return quantise(stem, weight)
        place, _, name = stem.rpartition(".")
        parts = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
        tensors: Tensors = {}
        experts = []
        for number, expert in enumerate(weight.transpose(1, 2) if turned else weight):
            made = [
                quantise(f"{place}.{number}.{part}", half.contiguous())
                for part, half in zip(parts, expert.chunk(len(parts)), strict=True)
            ]
            tensors |= {key: value for its, _ in made for key, value in its.items()}
            experts.append(torch.cat([numbers for _, numbers in made]))
        meant = torch.stack(experts)
        return tensors, meant.transpose(1, 2) if turned else meant

    return each


def compressed(form: str, weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "input_activations": None, "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        **more,
    }


INT4: Final = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
KV_SCHEME: Final = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
ONE: Final = torch.ones(())

FP8_BLOCKS: Final = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": list(BLOCK)}


def by_module(stem: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Apply the format that the configuration `MIXED` gives a module."""
    if "down_proj" in stem:
        return compressed_words(8, symmetric=True)(stem, weight)
    if "self_attn" in stem:
        return in_blocks(*BLOCK, "weight_scale")(stem, weight)
    return compressed_words(4, symmetric=True)(stem, weight)


def group(form: str, targets: list[str], weights: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": form, "targets": targets, "weights": weights}


MIXED: Final = {
    "rest": group("pack-quantized", ["Linear"], {**INT4, "symmetric": True}),
    "attention": group("float-quantized", ["re:.*self_attn.*"], FP8_BLOCKS),
    "downwards": group("pack-quantized", [r"re:.*\.down_proj$"], {**INT4, "num_bits": 8, "symmetric": True}),
}

FORMATS: Final[dict[str, Format]] = {
    "FP8 in blocks (Qwen3-FP8, DeepSeek V3, MiniMax M2)": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": BLOCK},
        in_blocks(*BLOCK),
    ),
    "FP8 by tensor (Ministral 3, Devstral 2)": Format(
        {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None},
        by_tensor("weight_scale_inv"),
        {"activation_scale": ONE},
    ),
    "FP8 by row (Llama 3.1 405B of Meta's own)": Format(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, in_blocks(1, 0, "weight_scale")
    ),
    "FP8 of ModelOpt, with scales of the cache": Format(
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": KV_SCHEME},
        by_tensor("weight_scale"),
        {"input_scale": ONE, "k_scale": ONE, "v_scale": ONE},
    ),
    "NVFP4 of ModelOpt": Format(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4(compressed=False), {"input_scale": ONE}
    ),
    "FP8 of compressed-tensors, by row (…-FP8-dynamic)": Format(
        compressed(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "channel"},
            kv_cache_scheme=KV_SCHEME,
        ),
        in_blocks(1, 0, "weight_scale", torch.bfloat16),
        {"k_scale": ONE},
    ),
    "FP8 of compressed-tensors, in blocks": Format(
        compressed(
            "float-quantized",
            FP8_BLOCKS,
        ),
        in_blocks(*BLOCK, "weight_scale"),
    ),
    "int8 of compressed-tensors, with zero points (…-w8a8)": Format(
        compressed("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}), int8_by_row
    ),
    "int4 of compressed-tensors (Kimi K2)": Format(
        compressed("pack-quantized", {**INT4, "symmetric": True}), compressed_words(4, symmetric=True)
    ),
    "int4 of compressed-tensors, with zero points and in order of activations (…-w4a16)": Format(
        compressed("pack-quantized", {**INT4, "symmetric": False, "actorder": "group"}),
        compressed_words(4, symmetric=False, ordered=True),
    ),
    "int8 of compressed-tensors, packed (…-w8a16)": Format(
        compressed("pack-quantized", {**INT4, "num_bits": 8, "symmetric": True}),
        compressed_words(8, symmetric=True),
    ),
    "FP8 and int4 of compressed-tensors, by module": Format(
        {**compressed("mixed-precision", {}), "config_groups": MIXED}, by_module
    ),
    "NVFP4 of compressed-tensors": Format(
        compressed(
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        ),
        nvfp4(compressed=True),
        {"input_global_scale": torch.ones(1)},
    ),
    "GPTQ of 4 bits, in order of activations": Format(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False},
        gptq(4, ordered=True, added=1),
    ),
    "GPTQ of 8 bits, its second version": Format(
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        gptq(8, ordered=False, added=0),
    ),
    "AWQ": Format(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq
    ),
}
MXFP4: Final = Format(
    {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4_experts, of=EXPERTS
)
"""Format of gpt-oss."""


def expert_by_expert(*, turned: bool) -> Format:
    """FP8 as in Llama 4 and Qwen3-VL, whose plain releases have their experts in one tensor."""
    return Format(
        compressed("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        by_expert(in_blocks(1, 0, "weight_scale", torch.bfloat16), turned=turned),
        of=re.compile(f"{LINEAR.pattern}|{EXPERTS.pattern}"),
    )
