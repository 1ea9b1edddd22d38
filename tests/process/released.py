"""Tiny models of the shapes that people serve, in the formats in which those are released.

What a type is released with is on (`tests/engine/matrix`), and its weights are random.
"""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from transformers import PreTrainedConfig, Qwen3Config

from tests.engine import tiny
from tests.engine.matrix.table import TYPES
from tests.engine.quantisers import FORMATS, MXFP4, Format, write
from tests.models import TOKENIZER

FP8_IN_BLOCKS: Final = FORMATS["FP8 in blocks (Qwen3-FP8, DeepSeek V3, MiniMax M2)"]


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
    "command a": Shape(TYPES["command a"].make),
    "qwen 3, fp8": Shape(lambda: Qwen3Config(**tiny.SHAPE, tie_word_embeddings=False), FP8_IN_BLOCKS),
    "qwen 3 vl, fp8": Shape(TYPES["text of qwen3-vl"].make, FP8_IN_BLOCKS),
    "gpt-oss, mxfp4": Shape(TYPES["gpt-oss"].make, MXFP4, {"hidden_size": 64, "intermediate_size": 96}),
}
