"""Tests of rotary embeddings on a CPU whose queries have a dimension of heads."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

HEADS, ROTATED, OTHERS = 4, 64, 32
POSITIONS = (*range(5), *range(31), *range(7))
"""Those of three requests in one batch."""


@pytest.fixture
def rotary() -> Any:
    """A rotary embedding that calls vLLM's kernel, as workers on CPUs do without torch.compile."""
    from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(custom_ops=["all"]))):
        return RotaryEmbedding(ROTATED, ROTATED, 64, 10_000, True, torch.float32)


def rotate(rotation: Callable[..., Any]) -> torch.Tensor:
    """Return the rotated queries of tokens that differ by position alone. They are parts of wider vectors."""
    numbers = torch.Generator().manual_seed(1)
    token = torch.randn(1, HEADS, OTHERS + ROTATED, generator=numbers)
    queries = token.repeat(len(POSITIONS), 1, 1)[..., OTHERS:]
    key = torch.randn(len(POSITIONS), 1, ROTATED, generator=numbers)
    rotated: torch.Tensor = rotation(torch.tensor(POSITIONS), queries, key)[0]
    return rotated


def test_queries_are_rotated_by_their_own_positions(rotary: Any) -> None:
    from baton.vllm.rotary_embeddings import rotate_by_head

    rotate_by_head(torch.nn.ModuleList([rotary]))
    together = rotate(rotary)
    assert not torch.allclose(together[1], together[2])
    torch.testing.assert_close(together[1], together[6])
    torch.testing.assert_close(together, rotate(rotary.forward_native))


def test_vllm_s_own_kernel_takes_heads_for_tokens(rotary: Any) -> None:
    """If this fails, `rotary_embeddings.py` has become needless."""
    assert not torch.allclose(rotate(rotary), rotate(rotary.forward_native))
