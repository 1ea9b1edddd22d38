"""Tests of models whose layers have states: pages of states, what the check finds, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3_5TextConfig

from baton.engine.execution.attention_span import Geometry, LayerStates, StateTensor
from baton.engine.execution.row_cache import StateLayer
from baton.engine.execution.state_mixers import StatePages
from baton.engine.kv_cache import PagedKvCache, PagedStates, make_cache
from baton.engine.loading.engine_loading import load_engine
from baton.engine.loading.model_loading import load_model
from baton.engine.loading.row_by_row_probe import CONTINUED, OTHER_STATES
from baton.engine.loading.state_batching import TOGETHER
from baton.engine.quantization.weight_quantization import WeightQuantization
from baton.inference.collectives import LocalCollectives
from baton.models.model_facts import UnsupportedModel
from baton.pages.layout import KvKind
from baton.runtime.model_options import Quantize
from baton.topology import Topology
from tests.inference.engine_worker import ShuffledWorker
from tests.models import recipes

CPU = torch.device("cpu")
STATES = LayerStates(
    (0, 2), (StateTensor("conv", (6, 3), torch.bfloat16), StateTensor("recurrent", (2, 4, 4), torch.float32))
)
GEOMETRY = Geometry(3, 2, 2, 8, attention_layers=(1, 2), states=(STATES,))


def saved(kind: str, directory: Path) -> Path:
    return recipes.save(recipes.recipe(kind), directory / kind)


def test_layers_with_attention_and_layers_with_states_are_two_groups() -> None:
    attention, states = GEOMETRY.groups("bfloat16", 16, 512)
    assert (attention.kind, attention.layers, attention.page_tokens) == (KvKind.FULL, (1, 2), 16)
    assert (states.kind, states.layers, states.dtype) == (KvKind.STATE, (0, 2), "float32")
    assert [plane.elements for plane in states.planes] == [18, 32]
    assert states.page_bytes == 4 * 2 * (18 + 32)
    assert states.pages_for(1) == states.pages_for(512) == 1


def test_a_model_without_attention_has_states_alone() -> None:
    assert [group.is_state for group in replace(GEOMETRY, attention_layers=()).groups("float32", 16, 8)] == [
        True
    ]


def test_a_page_has_the_states_of_each_layer_one_after_the_other() -> None:
    attention, group = GEOMETRY.groups("float32", 16, 512)
    assert isinstance(make_cache(attention, 2, CPU), PagedKvCache)
    cache = make_cache(group, 3, CPU)
    assert isinstance(cache, PagedStates)
    for layer in group.layers:
        for name, pages in cache.states(layer).items():
            pages[1] = torch.arange(pages.shape[1]) + 100 * layer + (50 if name == "recurrent" else 0)
    expected = [
        100 * layer + 50 * plane + each
        for layer in (0, 2)
        for plane in (0, 1)
        for each in range((18, 32)[plane])
    ]
    assert cache.tensor[1].flatten().tolist() == expected
    assert not cache.tensor[[0, 2]].any()
    before, address = cache.tensor.clone(), cache.address
    cache.move()
    assert cache.address != address
    assert torch.equal(cache.tensor, before)
    assert cache.states(2)["conv"][1, 0] == 200


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_in_chunks_continues_in_the_state_of_its_page(tmp_path: Path, dtype: str) -> None:
    """In bfloat16, too, a state comes back from its page as it was."""
    engine = load_engine(saved("lfm2", tmp_path), dtype=dtype, device="cpu", kv_cache_memory=2**22)
    assert (engine.facts.chunked_prompts, engine.facts.drafts) == (True, False)
    prompt = list(range(3, 60))
    worker = ShuffledWorker(engine)
    whole = worker.admit(prompt, 3)
    worker.step([whole], 512)
    parts = worker.admit(prompt, 3)
    worker.step([parts], 20)
    other = worker.admit(prompt[::-1], 3)
    while not parts.sequence.output:
        worker.step([parts, other], 20)
    cache = engine.caches[1].tensor
    mine, right = (cache[tenant.tables[1][0]] for tenant in (parts, whole))
    close = 1e-5 if dtype == "float32" else 0.1
    assert float((mine - right).norm() / right.norm()) < close
    assert not torch.equal(cache[other.tables[1][0]], right)


def forgetful(make: Any) -> Any:
    """Return an initializer that drops the states before the row."""
    return lambda layer, count, _: make(layer, count, {})


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2"])
def test_probe_can_fail_states_that_begin_anew_in_each_row_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    directory = saved(kind, tmp_path)
    assert load_model(directory, "float32", "cpu").geometry.states
    monkeypatch.setattr(StateLayer, "__init__", forgetful(StateLayer.__init__))
    with pytest.raises(UnsupportedModel, match=f"it needs {CONTINUED};"):
        load_model(directory, "float32", "cpu")


def test_probe_can_fail_states_that_grow_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def update(layer: Any, states: torch.Tensor, state_idx: int = 0, **_: object) -> torch.Tensor:
        before = layer.conv_states[state_idx]
        layer.conv_states[state_idx] = states if before is None else torch.cat((before, states), -1)
        layer.has_previous_state[state_idx] = True
        grown: torch.Tensor = layer.conv_states[state_idx]
        return grown

    directory = saved("lfm2", tmp_path)
    monkeypatch.setattr(StateLayer, "update_conv_state", update)
    with pytest.raises(UnsupportedModel, match=f"it needs {OTHER_STATES};"):
        load_model(directory, "float32", "cpu")


def test_a_definition_that_computes_single_tokens_otherwise_gets_whole_prompts(tmp_path: Path) -> None:
    """Nemotron-H bounds the time steps of several tokens, and not that of one."""
    directory = saved("nemotron_h", tmp_path)
    engine = load_engine(directory, dtype="float32", device="cpu", kv_cache_memory=2**24)
    assert not engine.facts.chunked_prompts
    assert not engine.facts.batch_invariant
    assert engine.whole.groups[0].layers == (2,)


@pytest.mark.parametrize(
    ("kind", "topology", "need"),
    [
        ("lfm2", Topology(1, 2), "a pipeline plan"),
        ("mamba2", Topology(2), "a layer with attention|its configuration does not say"),
        ("jamba", Topology(2), CONTINUED),
    ],
)
def test_what_several_ranks_lack_for_states_is_named(
    tmp_path: Path, kind: str, topology: Topology, need: str
) -> None:
    with pytest.raises(UnsupportedModel, match=f"cannot be served by several ranks: .*({need})"):
        load_model(saved(kind, tmp_path), "float32", "cpu", LocalCollectives(topology, 0))


def test_a_state_mixer_that_a_plan_divides_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = {"layers.*.linear_attn.in_proj_qkv": "colwise"}
    monkeypatch.setattr(Qwen3_5TextConfig, "base_model_tp_plan", plan)
    with pytest.raises(UnsupportedModel, match="it needs states divided among ranks, as its tensor-parallel"):
        load_model(saved("qwen3_5_text", tmp_path), "float32", "cpu", LocalCollectives(Topology(2), 0))


def test_probe_can_fail_a_rank_whose_rows_differ_together_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = StatePages.continued

    def continued(pages: Any, layer: int, hidden: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        return own(pages, layer, hidden.flip(0), *given, **named)

    monkeypatch.setattr(StatePages, "continued", continued)
    with pytest.raises(UnsupportedModel, match=f"by several ranks: it needs {TOGETHER}"):
        load_model(saved("qwen3_5_text", tmp_path), "float32", "cpu", LocalCollectives(Topology(2), 0))


def test_a_stage_without_a_layer_of_a_group_has_no_memory_of_it(tmp_path: Path) -> None:
    topology = Topology(1, 2)
    engine = load_engine(
        saved("qwen3_5_text", tmp_path),
        dtype="float32",
        device="cpu",
        kv_cache_memory=2**20,
        topology=topology,
        rank_group=LocalCollectives(topology, 0),
    )
    attention, states = engine.caches
    assert (attention.group.layers, states.group.layers) == ((), (0, 1))
    assert (attention.length, attention.tensor.numel()) == (1, 0)
    before = attention.address
    attention.move()
    assert attention.address != before


def test_quantized_weights_of_a_model_with_states_are_refused(tmp_path: Path) -> None:
    quantization = WeightQuantization(Quantize.INT8, multiplied=True)
    with pytest.raises(UnsupportedModel, match="it needs states of layers"):
        load_model(saved("lfm2", tmp_path), "float32", "cpu", quantization=quantization)
