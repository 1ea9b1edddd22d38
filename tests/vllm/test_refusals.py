"""Tests that what the engine on vLLM cannot do is refused at the start, all of it at once."""

from dataclasses import dataclass
from typing import Any

import pytest

from baton.runtime.errors import StartupError
from tests.vllm.conftest import settings


def test_settings_that_it_cannot_follow() -> None:
    from baton.vllm.engine_startup import start_rank

    refused = settings("demo", quantize="int8", speculate="model:demo")
    with pytest.raises(StartupError, match=r"--quantize int8: .*; --speculate model:demo"):
        start_rank(refused, 1)


def test_page_sizes_are_named(engine: Any) -> None:
    from baton.inference.kv_memory import check_page_tokens

    sizes = engine.runner.model.page_sizes(32)
    assert sorted(sizes) == [32, 64, 128, 256]
    with pytest.raises(StartupError, match="--page-tokens 16: --engine vllm has pages of 32, 64"):
        check_page_tokens(16, sizes, "vllm")


@dataclass
class OtherSpec:
    """A specification of a kind that is not served."""

    dtype: str = "float32"


def test_all_missing_features_are_named() -> None:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from baton.vllm.kv_groups import missing_features

    wide = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
    narrow = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float8_e4m3fn)
    assert missing_features([wide, wide]) == []
    assert missing_features([wide, narrow, OtherSpec()]) == [
        "layers of kind OtherSpec",
        "keys and values in torch.float8_e4m3fn",
        "layers whose keys and values differ in size",
    ]
    assert missing_features([]) == ["layers with keys and values"]
