"""How are the weights of a released checkpoint quantised, and which tensors of its files make each of them?

All that is known here is dequantised as it is loaded: what computes is the model's own definition, over
plain numbers. Tensors are told by their names, which each format gives beside a weight's own; what they mean,
by the configuration. What is not understood is refused, so that no codes are taken for numbers.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Final

from services.engine.unpacking import WORD, Awq, Experts, Fp4, Gptq, PackedWeight, Scaled, TensorSource, Words
from services.runtime.model_facts import CONFIG_FILE, Json, ModelUnreadable, json_object, stored_types

KEYS: Final = ("quantization_config", "compression_config")
EXPORTED: Final = "hf_quant_config.json"
"""Where ModelOpt says it, if the configuration does not."""
CODES: Final = frozenset({"F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "I8", "U8", "I32", "U32"})
"""Types of stored numbers that are no weights by themselves."""
WHOLE: Final = frozenset({"I8", "U8", "I32", "U32"})
"""Those that a mask or a table of places may have as well."""
WEIGHTS: Final = frozenset({"weight", "qweight", "qzeros", "weight_packed"})
"""Ends of the names of what is neither."""
FP8: Final = "fp8"
MODELOPT: Final = "modelopt"
COMPRESSED: Final = "compressed-tensors"
GPTQ: Final = "gptq"
AWQ: Final = "awq"
MXFP4: Final = "mxfp4"
PATTERN: Final = "re:"
"""Begins a pattern of compressed-tensors for modules' names."""
KIND: Final = "Linear"
"""Of all modules that are quantised here."""
PLAIN_FORMATS: Final = ("float-quantized", "naive-quantized", "int-quantized")
"""Of compressed-tensors: a number has a tensor's element for itself."""
PACKED_FORMATS: Final = ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")
BITS: Final = (2, 4, 8)
"""That words hold a whole number of."""
COMPUTED: Final = frozenset(
    {"input_scale", "activation_scale", "input_global_scale", "output_scale"}
    | {"k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale"}
)
"""Ends of the names of tensors by which other servers quantise what they compute, which is not done here."""
HELP: Final = "take the release in bfloat16, or one in FP8, MXFP4, GPTQ, AWQ or compressed-tensors"


class Untold(Exception):
    """The configuration does not say how a weight is stored. The text says of which, or why."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """Of a checkpoint, as its configuration tells it."""

    method: str
    words: Json = field(default_factory=dict, repr=False)

    @property
    def missing(self) -> tuple[str, ...]:
        """What nothing here dequantises: in a few words each."""
        known = METHODS.get(self.method)
        if known is None:
            return (f"weights quantised by {self.method} ({HELP})",)
        return tuple(f"weights quantised by {self.method} {each} ({HELP})" for each in known(self.words))

    @property
    def of_the_cache(self) -> bool:
        """It wants keys and values quantised as well."""
        told = (self.words.get("kv_cache_scheme"), self.words.get("kv_cache_quant_algo"))
        return any(told)

    def group_of(self, module: str) -> Json:
        """Of compressed-tensors: how the weights of `module` are stored. As there, its own name goes before a
        pattern, and a pattern before a kind of modules. Raises Untold."""
        groups = _groups_of(self.words)
        if len(groups) < 2:
            return next(iter(groups), {})
        wanted = sorted(((each, group) for group in groups for each in group["targets"]), key=itemgetter(0))
        found = [group for name, group in wanted if name == module]
        found += [group for name, group in wanted if _matches(name, module)]
        found += [group for name, group in wanted if name == KIND]
        if not found:
            raise Untold(f"of the groups of its quantization_config none has {module}")
        return found[0]

    def block_of(self, module: str) -> tuple[int, int] | None:
        """Rows and columns of its weights that share a scale, where that is told. Raises Untold."""
        group = self.group_of(module)
        told = group.get("block_structure") or self.words.get("weight_block_size")
        if isinstance(told, list) and len(told) == 2 and all(isinstance(each, int) for each in told):
            return told[0], told[1]
        size = group.get("group_size")
        return (1, size) if isinstance(size, int) and size > 0 else None


def quantisation_of(directory: Path) -> Quantisation | None:
    """Of the checkpoint in `directory`; None where it does not tell of any. Raises ModelUnreadable."""
    config = json_object(directory / CONFIG_FILE, required=True)
    text = config.get("text_config")
    places = (config, text if isinstance(text, dict) else {})
    told = next((place[key] for place in places for key in KEYS if place.get(key)), None)
    if told is None:
        exported = json_object(directory / EXPORTED).get("quantization")
        told = exported and {"quant_method": MODELOPT, **exported}
    if told is None:
        return None
    if not isinstance(told, dict):
        raise ModelUnreadable(f"{directory / CONFIG_FILE}: its quantization_config is no object")
    method = told.get("quant_method") or (COMPRESSED if "config_groups" in told else "an unnamed method")
    return Quantisation(str(method), told)


def _groups_of(words: Json) -> list[Json]:
    """Of compressed-tensors: how the weights of each group of modules are stored, and of which."""
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
    """Raises Untold."""
    if not target.startswith(PATTERN):
        return False
    try:
        return re.match(target.removeprefix(PATTERN), module) is not None
    except re.error as error:
        raise Untold(f"the target {target} of its quantization_config is no pattern: {error}") from error


def _compressed_misses(words: Json) -> list[str]:
    found = []
    for key, what in (("transform_config", "with transforms"), ("sparsity_config", "with sparsity")):
        told = words.get(key)
        if told and told.get("format") != "dense":
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
"""Of each method that is known, what of it is not: in a few words each."""


class WeightTable:
    """Which tensors of a checkpoint make each of its weights."""

    def __init__(
        self,
        directory: Path,
        types: Mapping[str, str],
        stored: Callable[[str], TensorSource],
        how: Quantisation | None,
    ) -> None:
        """`types`: of each tensor of the files, what its numbers are; `stored`: gives one. Raises
        ModelUnreadable for a tensor of codes that belongs to no weight."""
        self._directory = directory
        self._types = types
        self._stored = stored
        self._how = how or Quantisation("")
        self._taken: set[str] = set()
        self.packed: dict[str, PackedWeight] = {}
        """By the names that the model's definition has."""
        if how is not None:
            for name in types:
                self._enter(name)
        passed = COMPUTED if how is not None else frozenset()
        self.plain = [name for name in types if name not in self._taken and _end(name) not in passed]
        """Tensors that are what their numbers are."""
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
                weight = Experts(self._part(name), self._part(f"{target}_scales"))
            elif self._types[name] in CODES and not name.endswith(("_scale", "_scale_inv", "_scale_2")):
                target, weight = name, self._scaled(name)
        except KeyError as lacks:
            raise ModelUnreadable(
                f"{self._directory}: the files lack {lacks.args[0]}, part of {target}"
            ) from None
        except Untold as error:
            raise ModelUnreadable(f"{self._directory}: {error}") from error
        if weight is not None:
            self._taken.add(name)
            self.packed[target] = weight

    def _part(self, name: str) -> TensorSource:
        """Raises KeyError, by its name, for one that is not there."""
        if name not in self._types:
            raise KeyError(name)
        self._taken.add(name)
        return self._stored(name)

    def _if_there(self, name: str) -> TensorSource | None:
        return self._part(name) if name in self._types else None

    def _scaled(self, name: str) -> PackedWeight | None:
        """None where there are no scales: then it is for the caller to say what it is."""
        scale = self._if_there(f"{name}_scale_inv") or self._if_there(f"{name}_scale")
        if scale is None:
            return None
        if self._types[name] == "U8":
            return Fp4(self._stored(name), scale, self._if_there(f"{name}_scale_2"))
        zero = self._if_there(f"{name}_zero_point")
        block = self._how.block_of(name.rpartition(".")[0])
        return Scaled(self._stored(name), scale, block, zero)

    def _words(self, stem: str) -> PackedWeight:
        codes, scale = self._stored(f"{stem}.weight_packed"), self._part(f"{stem}.weight_scale")
        if self._types[f"{stem}.weight_packed"] != "I32":
            return Fp4(codes, scale, self._if_there(f"{stem}.weight_global_scale"), divides=True)
        bits = int(self._how.group_of(stem).get("num_bits", 4))
        shape = self._part(f"{stem}.weight_shape").whole().tolist()
        zero, order = (self._if_there(f"{stem}.weight_{each}") for each in ("zero_point", "g_idx"))
        return Words(codes, scale, bits, int(shape[1]), zero, order)

    def _integers(self, stem: str) -> PackedWeight:
        words, zeros, scales = (
            self._stored(f"{stem}.qweight"),
            self._part(f"{stem}.qzeros"),
            self._part(f"{stem}.scales"),
        )
        if self._how.method == AWQ:
            return Awq(words, zeros, scales)
        order = self._if_there(f"{stem}.g_idx")
        bits = words.shape[0] * WORD // order.shape[0] if order else int(self._how.words["bits"])
        added = int(self._how.words.get("checkpoint_format", "gptq") == "gptq")
        return Gptq(words, zeros, scales, bits, added, order)


def _end(name: str) -> str:
    return name.rpartition(".")[2]


def refuse_codes(directory: Path) -> None:
    """Raise ModelUnreadable if the files in `directory`, which tells of no quantisation, hold codes."""

    def unread(name: str) -> TensorSource:
        raise AssertionError(name)

    WeightTable(directory, stored_types(directory), unread, None)
