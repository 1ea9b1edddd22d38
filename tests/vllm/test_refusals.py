"""Tests that what the engine on vLLM cannot do is refused at the start, all of it at once."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
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


@pytest.mark.parametrize(
    ("backend", "layout", "heads", "is_taken"),
    [
        ("cpu_attn.CPUAttentionBackend", "LBHNC", 2, True),
        ("cpu_attn.CPUAttentionBackend", "BHLNC", 2, False),
        ("mla.cpu_mla.CPUMLABackend", "BHLNC", 2, True),
        ("mla.indexer.DeepseekV4IndexerBackend", "BHLNC", 1, True),
        ("mla.indexer.DeepseekV4IndexerBackend", "BHLNC", 2, False),
    ],
)
def test_attention_takes_pages_as_they_are(backend: str, layout: str, heads: int, is_taken: bool) -> None:
    """A GPU's pages have layers within heads, which is the same as heads within layers for one head."""
    from baton.vllm.kv_groups import check_layout

    module, _, name = backend.rpartition(".")
    found = getattr(import_module(f"vllm.v1.attention.backends.{module}"), name)
    with nullcontext() if is_taken else pytest.raises(StartupError, match=f"not as {layout}"):
        check_layout(found, layout, heads)


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
    later = replace(wide, non_causal=True)
    assert missing_features([later, narrow, OtherSpec()]) == [
        "layers of kind OtherSpec",
        "keys and values in torch.float8_e4m3fn",
        "layers whose keys and values differ in size",
        "attention to later tokens",
    ]
    assert missing_features([]) == ["layers with keys and values"]
