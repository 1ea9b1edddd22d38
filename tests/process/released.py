"""Tiny models of the shapes that people serve, in the formats in which those are released.

What a type is released with is on (`tests/models/recipes.py`), and its weights are random.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.engine.quantization.quantized_files import FORMATS, MXFP4, Format, expert_by_expert, write
from tests.models.eight_heads import with_tokenizer
from tests.models.recipes import recipe, save

FP8_IN_BLOCKS: Final = FORMATS["FP8 in blocks (Qwen3-FP8, DeepSeek V3, MiniMax M2)"]
FP8_BY_TENSOR: Final = FORMATS["FP8 by tensor (Ministral 3, Devstral 2)"]
FP8_BY_ROW: Final = FORMATS["FP8 of compressed-tensors, by row (…-FP8-dynamic)"]
INT4: Final = FORMATS["int4 of compressed-tensors, with zero points and in order of activations (…-w4a16)"]


@dataclass(frozen=True)
class Shape:
    """Shape of one released model."""

    kind: str
    """The model's `model_type`."""
    form: Format | None = None
    """Format of the model's files. None: plain numbers."""

    def save(self, directory: Path, demo: Path) -> tuple[Path, Path]:
        """Save two models in `directory`: the served one, with the tokenizer of `demo`, and one of the plain
        numbers that its weights stand for."""
        plain = with_tokenizer(save(recipe(self.kind), directory / "plain"), demo)
        return (plain, plain) if self.form is None else write(plain, directory, self.form)


SHAPES: Final[dict[str, Shape]] = {
    "gemma 2": Shape("gemma2"),
    "gemma 3, int4": Shape("gemma3", INT4),
    "qwen 3, fp8": Shape("qwen3", FP8_IN_BLOCKS),
    "qwen 3 vl, fp8": Shape("qwen3_vl", FP8_IN_BLOCKS),
    "mistral small, fp8": Shape("mistral3", FP8_BY_TENSOR),
    "olmo 3": Shape("olmo3"),
    "command a": Shape("cohere2"),
    "llama 4, fp8": Shape("llama4", expert_by_expert(turned=True)),
    "gpt-oss, mxfp4": Shape("gpt_oss", MXFP4),
    "minimax m2, fp8": Shape("minimax_m2", FP8_IN_BLOCKS),
    "glm 4.5, fp8": Shape("glm4_moe", FP8_BY_ROW),
    "deepseek v3, fp8": Shape("deepseek_v3", FP8_IN_BLOCKS),
    "kimi k2.5, int4": Shape("kimi_k25", INT4),
}
