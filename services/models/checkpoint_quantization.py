"""Quantization of a released checkpoint, as its configuration file describes it.

The module does not need the tensor library, so that an unknown method is refused before anything is started.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Final

from baton.models.model_facts import CONFIG_FILE, ModelUnreadable, json_object
from baton.models.model_requirements import Json

KEYS: Final = ("quantization_config", "compression_config")
EXPORTED: Final = "hf_quant_config.json"
"""Name of the file in which ModelOpt describes the quantization, if the model's configuration does not."""
FP8: Final = "fp8"
MODELOPT: Final = "modelopt"
COMPRESSED: Final = "compressed-tensors"
GPTQ: Final = "gptq"
AWQ: Final = "awq"
MXFP4: Final = "mxfp4"
PATTERN: Final = "re:"
"""Prefix that marks a pattern of module names in a compressed-tensors configuration."""
KIND: Final = "Linear"
"""Target in a compressed-tensors configuration that names all modules that can be quantized."""
PLAIN_FORMATS: Final = ("float-quantized", "naive-quantized", "int-quantized")
"""Formats of compressed-tensors in which each weight is one tensor element of its own."""
PACKED_FORMATS: Final = ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
BITS: Final = (2, 4, 8)
"""Supported bits per weight in GPTQ: those of which a 32-bit word holds a whole number."""
HELP: Final = "take the release in bfloat16, or one in FP8, MXFP4, GPTQ, AWQ or compressed-tensors"


class UnspecifiedQuantization(Exception):
    """A checkpoint's configuration does not describe how a weight is stored. The text names the weight or the
    reason."""


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """Quantization method and parameters of a checkpoint, as its configuration file states them."""

    method: str
    words: Json = field(default_factory=dict, repr=False)

    @property
    def missing(self) -> tuple[str, ...]:
        """Descriptions of what Baton does not support in this checkpoint's quantization. Empty if everything
        is supported."""
        known = METHODS.get(self.method)
        if known is None:
            return (f"weights quantised by {self.method} ({HELP})",)
        return tuple(f"weights quantised by {self.method} {each} ({HELP})" for each in known(self.words))

    @property
    def of_the_cache(self) -> bool:
        """Whether the checkpoint wants keys and values in the KV cache to be quantized as well."""
        stated = (self.words.get("kv_cache_scheme"), self.words.get("kv_cache_quant_algo"))
        return any(stated)

    def group_of(self, module: str) -> Json:
        """Return the parameters by which compressed-tensors stores the weights of `module`.

        As there, the module's name wins over a pattern, and a pattern over a kind of modules. Raises
        UnspecifiedQuantization.
        """
        groups = _groups_of(self.words)
        if len(groups) < 2:
            return next(iter(groups), {})
        wanted = sorted(((each, group) for group in groups for each in group["targets"]), key=itemgetter(0))
        found = [group for name, group in wanted if name == module]
        found += [group for name, group in wanted if _matches(name, module)]
        found += [group for name, group in wanted if name == KIND]
        if not found:
            raise UnspecifiedQuantization(f"of the groups of its quantization_config none has {module}")
        return found[0]

    def block_of(self, module: str) -> tuple[int, int] | None:
        """Return the size (rows, columns) of the blocks in which `module`'s weights share a scale, or None if
        none is stated.

        Raises UnspecifiedQuantization.
        """
        group = self.group_of(module)
        stated = group.get("block_structure") or self.words.get("weight_block_size")
        if isinstance(stated, list) and len(stated) == 2 and all(isinstance(each, int) for each in stated):
            return stated[0], stated[1]
        size = group.get("group_size")
        return (1, size) if isinstance(size, int) and size > 0 else None


def read_quantization(directory: Path) -> CheckpointQuantization | None:
    """Return the quantization of the checkpoint in `directory`, or None if it is not quantized.

    Raises ModelUnreadable.
    """
    config = json_object(directory / CONFIG_FILE, required=True)
    text = config.get("text_config")
    sections = (config, text if isinstance(text, dict) else {})
    stated = next((section[key] for section in sections for key in KEYS if section.get(key)), None)
    if stated is None:
        exported = json_object(directory / EXPORTED).get("quantization")
        stated = exported and {"quant_method": MODELOPT, **exported}
    if stated is None:
        return None
    if not isinstance(stated, dict):
        raise ModelUnreadable(f"{directory / CONFIG_FILE}: its quantization_config is no object")
    method = stated.get("quant_method") or (COMPRESSED if "config_groups" in stated else "an unnamed method")
    return CheckpointQuantization(str(method), stated)


def _groups_of(words: Json) -> list[Json]:
    """Return the groups of a compressed-tensors configuration. A group names modules, and the parameters of
    their weights' quantization."""
    groups = words.get("config_groups")
    if not isinstance(groups, dict):
        return []
    found = []
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            form, targets = group.get("format") or words.get("format"), group.get("targets") or ()
            found.append({**weights, "format": form, "targets": [str(each) for each in targets]})
    return found


def _matches(target: str, module: str) -> bool:
    """Return whether `target` is a pattern that matches the name of a module. Raises
    UnspecifiedQuantization."""
    if not target.startswith(PATTERN):
        return False
    try:
        return re.match(target.removeprefix(PATTERN), module) is not None
    except re.error as error:
        raise UnspecifiedQuantization(
            f"the target {target} of its quantization_config is no pattern: {error}"
        ) from error


def _compressed_misses(words: Json) -> list[str]:
    found = []
    for key, what in (("transform_config", "with transforms"), ("sparsity_config", "with sparsity")):
        stated = words.get(key)
        if stated and stated.get("format") != "dense":
            found.append(what)
    formats = {str(group["format"]) for group in _groups_of(words)} or {str(words.get("format"))}
    found += [f"in the format {each}" for each in sorted(formats - {*PLAIN_FORMATS, *PACKED_FORMATS})]
    widths = {group.get("num_bits") for group in _groups_of(words)}
    found += [f"of {each} bits" for each in sorted(widths - {4, 8}, key=str)]
    return found


def _gptq_misses(words: Json) -> list[str]:
    version, bits = words.get("checkpoint_format", "gptq"), words.get("bits")
    found = [] if version in ("gptq", "gptq_v2") else [f"in the format {version}"]
    return found if bits in BITS else [*found, f"of {bits} bits"]


def _awq_misses(words: Json) -> list[str]:
    version, bits = str(words.get("version", "gemm")).lower(), words.get("bits", words.get("w_bit", 4))
    found = [] if version == "gemm" else [f"in the version {version}"]
    return found if bits == 4 else [*found, f"of {bits} bits"]


def _modelopt_misses(words: Json) -> list[str]:
    algorithm = str(words.get("quant_algo") or "")
    return [] if algorithm in ("FP8", "NVFP4", "FP8_PB_WO") else [f"with {algorithm or 'no quant_algo'}"]


METHODS: Final[Mapping[str, Callable[[Json], list[str]]]] = {
    FP8: lambda words: [] if words.get("fmt", "e4m3") == "e4m3" else [f"in {words['fmt']}"],
    "fbgemm_fp8": lambda _: [],
    MODELOPT: _modelopt_misses,
    COMPRESSED: _compressed_misses,
    GPTQ: _gptq_misses,
    AWQ: _awq_misses,
    MXFP4: lambda _: [],
}
"""Function for each quantization method that lists what Baton does not support in a checkpoint's
configuration."""
