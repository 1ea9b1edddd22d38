"""Tests that what the engine on vLLM cannot do is refused at the start, all of it at once."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from baton.models.model_facts import read_model
from baton.pages.compatibility import check_fit
from baton.pages.errors import LayoutMismatch
from baton.pages.layout import GROUPS_MAX, KvGroup, KvLayout, KvPlane, full_group, state_group
from baton.pages.rank_layout import rank_layout
from baton.runtime.errors import StartupError
from baton.topology import Topology
from tests.engine.tiny_models import save
from tests.vllm.conftest import settings
from tests.vllm.families import FAMILIES


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
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    from baton.vllm.kv_groups import missing_features

    wide = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
    narrow = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float8_e4m3fn)
    state = MambaSpec(block_size=512, shapes=((4, 8),), dtypes=(torch.float64,))
    assert missing_features([wide, replace(wide, head_size=32)]) == []
    later = replace(wide, non_causal=True)
    assert missing_features([later, narrow, state, OtherSpec()]) == [
        "layers of kind OtherSpec",
        "keys and values in torch.float8_e4m3fn",
        "states in torch.float64",
        "attention to later tokens",
    ]
    assert missing_features([]) == ["layers with keys and values"]


def test_more_groups_than_a_record_counts() -> None:
    from baton.vllm.kv_groups import merge_groups

    groups = [full_group("float32", 32, (layer,), (0,), 32 * layer) for layer in range(1, GROUPS_MAX + 2)]
    assert merge_groups(reversed(groups[:-1])) == groups[:-1]
    with pytest.raises(StartupError, match="the model's layers have 5 KV groups, at most 4"):
        merge_groups(groups)


def test_groups_of_stages_are_merged() -> None:
    """Attention comes before states, each kind in the order of its first layers."""
    from baton.vllm.kv_groups import merge_groups

    def parts(layers: tuple[int, ...]) -> list[KvGroup]:
        state = state_group("float32", 512, layers, (0,), (KvPlane("state0", 8),))
        first, second = (replace(each, layers=(layers[0] + step,)) for step, each in enumerate((long, short)))
        return [state, second, first]

    long, short = (full_group("float32", 32, (), (0, 1), size) for size in (64, 32))
    merged = merge_groups([*parts((4, 5)), *parts((0, 1))])
    assert [each.layers for each in merged] == [(0, 4), (1, 5), (0, 1, 4, 5)]
    assert [each.is_state for each in merged] == [False, False, True]


@pytest.mark.parametrize("is_replicated", [False, True])
def test_states_fit_those_of_as_many_tensor_ranks(is_replicated: bool) -> None:
    """vLLM divides a state by a rule of its own, so a rank's share of it is compared as a whole."""
    import torch
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend
    from vllm.v1.kv_cache_interface import MambaSpec

    from baton.vllm.kv_groups import LayerGroup, kv_group

    def layouts(ranks: int, width: int) -> list[KvLayout]:
        """Layouts of a worker's ranks, each of which has states of `width` columns."""
        spec = MambaSpec(
            block_size=512,
            shapes=((3, width), (4, width)),
            dtypes=(torch.bfloat16, torch.float32),
            tp_replicated=is_replicated,
        )
        layers = LayerGroup(("layers.0", "layers.2"), (0, 2), spec, GDNAttentionBackend)
        group = kv_group(layers, ranks, ranks, 512)
        assert group.encoding == "vllm-gdn-attn-bfloat16-float32"
        topology = Topology(tensor=ranks)
        whole = KvLayout("model", (group,), 512)
        own = [rank_layout(whole, topology, rank) for rank in range(ranks)]
        assert {each.groups[0].page_bytes for each in own} == {layers.page_bytes}
        return own

    check_fit(layouts(2, 32), layouts(2, 32))
    if is_replicated:
        check_fit(layouts(1, 64), layouts(2, 64))
    else:
        with pytest.raises(LayoutMismatch, match="planes"):
            check_fit(layouts(1, 64), layouts(2, 32))


def test_inputs_of_each_layer_are_refused_over_stages(tmp_path: Path) -> None:
    """Gemma 4's smaller models: vLLM computes the layers behind the first stage without them."""
    from baton.vllm.worker import start_worker

    chosen = settings(str(save(FAMILIES["gemma4"](), tmp_path)))
    facts = read_model(tmp_path)
    with pytest.raises(StartupError, match=r"--pp with --engine vllm.* it needs inputs of each layer"):
        start_worker(chosen, tmp_path, facts, Topology(1, 2), 0)
