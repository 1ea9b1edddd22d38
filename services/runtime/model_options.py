"""Options for loading and sampling a model, with the values that the settings accept."""

from enum import Enum
from typing import Final

POSITIONS_MAX: Final = 2**31 - 1
"""Largest context length that can be set, in tokens."""


class LoadFormat(Enum):
    """Source of a model's weights."""

    AUTO = "auto"
    """Weights are loaded from the model's files."""
    DUMMY = "dummy"
    """No weights are loaded. They are arbitrary numbers in the right shapes, equal in all processes whose
    devices are of one kind."""


class EngineName(Enum):
    """Engine that computes a worker's steps."""

    AUTO = "auto"
    """vLLM's engine on a GPU where vLLM is installed, else Baton's engine on PyTorch."""
    TORCH = "torch"
    """Baton's own engine, on PyTorch."""
    VLLM = "vllm"
    """Engine that runs vLLM's worker and model runner."""


class Quantize(Enum):
    """Format in which the engine stores weights: unquantized, or codes of a few bits."""

    NONE = "none"
    """Weights are not quantized."""
    INT8 = "int8"
    INT4 = "int4"
    KEEP = "keep"
    """Weights stay quantized as a GGUF file has them."""


class GenerationConfig(Enum):
    """Source of the sampling parameters that a request leaves out."""

    AUTO = "auto"
    """Defaults come from the model's generation_config.json."""
    NONE = "none"
    """Defaults are those of the HTTP API that was called."""
