"""Options of how a model is loaded and sampled, as settings name them."""

from enum import Enum
from typing import Final

POSITIONS_MAX: Final = 2**31 - 1
"""Most tokens of a context length."""


class LoadFormat(Enum):
    """Source of the weights."""

    AUTO = "auto"
    """From the model's files."""
    DUMMY = "dummy"
    """From no file: arbitrary numbers in the right shapes, equal in all processes whose devices are of one
    kind."""


class EngineName(Enum):
    """Engine that computes a worker's steps."""

    AUTO = "auto"
    """vLLM's on a GPU where it is installed, else torch's."""
    TORCH = "torch"
    """Baton's own, on PyTorch."""
    VLLM = "vllm"
    """vLLM's worker and model runner."""


class Quantize(Enum):
    """Number of bits in which weights are stored, in place of the numbers that were loaded."""

    NONE = "none"
    """Not quantized."""
    INT8 = "int8"
    INT4 = "int4"
    KEEP = "keep"
    """In the codes of a GGUF file."""


class GenerationConfig(Enum):
    """Source of sampling parameters that a request leaves out."""

    AUTO = "auto"
    """The model's generation_config.json."""
    NONE = "none"
    """The API's own defaults."""
