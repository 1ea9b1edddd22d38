"""Tiny models of the shapes that people serve, in the formats in which those are released.

What a type is released with is on (`tests/engine/matrix`), and its weights are random.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from transformers import Glm4MoeConfig, MiniMaxM2Config, PreTrainedConfig, Qwen3Config

from tests.engine import tiny
from tests.engine.matrix.table import TYPES
from tests.engine.quantisers import FORMATS, MXFP4, Format, write
from tests.models.eight_heads import TOKENIZER

FP8_IN_BLOCKS: Final = FORMATS["FP8 in blocks (Qwen3-FP8, DeepSeek V3, MiniMax M2)"]
FP8_BY_TENSOR: Final = FORMATS["FP8 by tensor (Ministral 3, Devstral 2)"]
FP8_BY_ROW: Final = FORMATS["FP8 of compressed-tensors, by row (…-FP8-dynamic)"]
INT4: Final = FORMATS["int4 of compressed-tensors, with zero points and in order of activations (…-w4a16)"]
MINIMAX: Final[dict[str, Any]] = {
    **tiny.SHAPE,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "partial_rotary_factor": 0.5,
}
GLM: Final[dict[str, Any]] = {
    **tiny.SHAPE,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}


@dataclass(frozen=True)
class Shape:
    """Of one model."""

    make: Callable[[], PreTrainedConfig]
    form: Format | None = None
    """Its files', where they do not have plain numbers."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Where the format has no place for the matrix's."""

    def save(self, directory: Path, demo: Path) -> tuple[Path, Path]:
        """Two models in `directory`: what is served, with the tokenizer of `demo`, and the plain numbers that
        it stands for."""
        config = self.make()
        for name, size in self.sizes.items():
            setattr(config, name, size)
        plain = tiny.save(config, directory / "plain")
        for name in TOKENIZER:
            shutil.copyfile(demo / name, plain / name)
        return (plain, plain) if self.form is None else write(plain, directory, self.form)


SHAPES: Final[dict[str, Shape]] = {
    "gemma 2": Shape(TYPES["gemma2"].make),
    "gemma 3, int4": Shape(TYPES["text of gemma3"].make, INT4),
    "qwen 3, fp8": Shape(lambda: Qwen3Config(**tiny.SHAPE, tie_word_embeddings=False), FP8_IN_BLOCKS),
    "qwen 3 vl, fp8": Shape(TYPES["text of qwen3-vl"].make, FP8_IN_BLOCKS),
    "mistral small, fp8": Shape(TYPES["text of mistral small"].make, FP8_BY_TENSOR),
    "olmo 3": Shape(TYPES["olmo3"].make),
    "command a": Shape(TYPES["command a"].make),
    "llama 4": Shape(TYPES["text of llama 4"].make),
    "gpt-oss, mxfp4": Shape(TYPES["gpt-oss"].make, MXFP4, {"hidden_size": 64, "intermediate_size": 96}),
    "minimax m2, fp8": Shape(lambda: MiniMaxM2Config(**MINIMAX), FP8_IN_BLOCKS),
    "glm 4.5, fp8": Shape(lambda: Glm4MoeConfig(**GLM), FP8_BY_ROW),
}
