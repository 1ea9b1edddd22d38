"""Tests of attention over latents: the sizes of its pages, its results, and which definitions have it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from baton.engine.execution.attention_span import AttentionSpan
from baton.engine.execution.latent_attention import LatentAttention, absorbed, expanded, projected
from baton.engine.execution.step_plan import make_plan
from baton.engine.kv_cache import PagedKvCache
from baton.engine.loading import model_loading
from baton.engine.loading.model_loading import load_model
from baton.engine.loading.rank_shard import CannotSplit
from baton.engine_interface import Row, Sequence
from baton.ids import PageId
from baton.inference.collectives import LocalCollectives
from baton.models.model_facts import UnsupportedModel
from baton.pages.layout import KvPlane, latent_group
from baton.pages.rank_layout import rank_layout
from baton.rooms.request import Request
from baton.topology import Topology
from tests.engine import tiny_models
from tests.engine.conftest import MakeEngine
from tests.engine.execution.test_paged_attention import SPANS
from tests.models import recipes

NAME = "deepseek-v3-latents"
RELEASED = DeepseekV3Config()


@pytest.mark.parametrize("topology", [Topology(), Topology(2), Topology(3, 3)], ids=str)
def test_pages_hold_one_latent_a_token_and_layer_whatever_the_ranks(
    tiny_engine: MakeEngine, topology: Topology
) -> None:
    """Each rank has all of a latent, of its own layers."""
    engine, config = tiny_engine(NAME), tiny_models.ARCHITECTURES[NAME]
    heads = config.num_attention_heads * (24 + 16 + 12)
    for rank in range(topology.ranks):
        (group,) = rank_layout(engine.whole, topology, rank).groups
        assert (group.heads, group.planes) == ((0,), (KvPlane("latent", 20 + 16),))
        assert group.token_bytes * heads == len(group.layers) * heads * 4 * (20 + 16)
        assert group.token_bytes * heads < len(group.layers) * heads * 4 * heads / 8


def test_a_latent_of_deepseek_v3_takes_576_numbers_of_the_40960_of_its_keys_and_values(
    tmp_path: Path,
) -> None:
    """With the sizes of attention as released, in one small layer. A page stores these numbers."""
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
    config = DeepseekV3Config(
        **small, q_lora_rank=32, pad_token_id=None, bos_token_id=None, eos_token_id=None
    )
    engine_model = load_model(tiny_models.save(config, tmp_path / "wide"), "bfloat16", "cpu")
    group = engine_model.geometry.kv_group("bfloat16", 16)
    heads, key, value = config.num_attention_heads, config.qk_head_dim, config.v_head_dim
    assert (heads, key, value) == (128, 192, 128)
    assert group.token_bytes == 2 * 576
    assert group.token_bytes / (2 * heads * (key + value)) == 576 / (128 * (192 + 128))


def attention_module() -> Any:
    """Return a random attention module of the library's."""
    torch.manual_seed(3)
    module: Any = DeepseekV3Attention(tiny_models.ARCHITECTURES[NAME], layer_idx=7)
    for each in module.parameters():
        each.data.normal_(std=0.3)
    return module.eval().requires_grad_(False)


@pytest.mark.parametrize("span", [None, AttentionSpan(9)], ids=str)
def test_each_row_attends_to_what_the_librarys_module_makes_of_its_latents(
    span: AttentionSpan | None,
) -> None:
    """Single tokens, whole prompts and later chunks share a step."""
    module, cpu, numbers = attention_module(), torch.device("cpu"), torch.Generator().manual_seed(3)
    group = latent_group("float32", 4, (6, 7), 36)
    cache = PagedKvCache(group, 400, cpu)
    cache.tensor.normal_(generator=numbers)
    free = iter(torch.randperm(400, generator=numbers).tolist())
    rows = []
    for start, stop in SPANS:
        pages = tuple(PageId(next(free)) for _ in range(group.pages_for(stop)))
        rows.append(Row(Sequence(Request("mine", (0,) * stop, 8), []), start, stop, (pages,), sample=True))
    plan = make_plan(rows, cache, cpu)
    tokens = plan.tokens.shape[1]
    query, compressed, rotated = (
        torch.randn(1, heads, tokens, width, generator=numbers)
        for heads, width in ((6, 40), (1, 20), (1, 16))
    )
    other_layer = cache.tensor[:, :, 0].clone()
    attention = LatentAttention(plan, cache, {} if span is None else {7: span})
    (seen,) = attention(module, query, compressed, rotated, {"scaling": 0.3})
    assert torch.equal(cache.tensor[:, :, 0], other_layer)
    ends = dict(zip(map(id, rows), plan.keep.tolist(), strict=True))
    for row in rows:
        end = ends[id(row)] + 1
        own = slice(end - (row.stop - row.start), end)
        latents = cache.tensor[list(row.tables[0]), 0, 1, 0].flatten(0, 1)[: row.stop]
        assert torch.equal(latents[row.start :], torch.cat((compressed, rotated), 3)[0, 0, own])
        keys, values = module.expand_kv(latents[None, None, :, :20], latents[None, None, :, 20:])
        positions = torch.arange(row.stop)
        hidden = positions > positions[row.start :, None]
        if span is not None:
            hidden |= span.hidden(positions[row.start :], 0, row.stop)
        scores = (query[:, :, own] @ keys.transpose(2, 3) * 0.3).masked_fill(hidden, float("-inf"))
        right = (torch.softmax(scores, -1) @ values)[0].transpose(0, 1)
        torch.testing.assert_close(seen[own], right, rtol=1e-4, atol=1e-5)


def test_the_absorbed_projection_is_the_expanded_one() -> None:
    module, numbers = attention_module(), torch.Generator().manual_seed(4)
    latents, query = torch.randn(9, 36, generator=numbers), torch.randn(5, 6, 40, generator=numbers)
    keys, values = expanded(module, latents)
    torch.testing.assert_close(
        torch.einsum("thl,sl->ths", absorbed(module, query), latents),
        torch.einsum("thd,hsd->ths", query, keys),
        rtol=1e-4,
        atol=1e-4,
    )
    each_head = latents[:, None].expand(-1, 6, -1)
    torch.testing.assert_close(projected(module, each_head), values.transpose(0, 1), rtol=1e-4, atol=1e-4)


def assert_row_by_row(directory: Path, need: str) -> None:
    """Assert that our attention refuses a model for `need`, and that the library's own computes it over
    latents."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_loading, "load_row_by_row", refusing)
        with pytest.raises(UnsupportedModel, match=f"it needs {need}"):
            load_model(directory, "float32", "cpu")
    model = load_model(directory, "float32", "cpu")
    assert model.definition is not None
    assert model.geometry.latent == (20, 16)


def refusing(*_: object) -> NoReturn:
    raise UnsupportedModel("refused")


Expand = Callable[[Any, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def with_a_bias(expand: Expand) -> Expand:
    return lambda module, *latents: (expand(module, *latents)[0] + 0.5, expand(module, *latents)[1])


def with_other_values(expand: Expand) -> Expand:
    return lambda module, *latents: (expand(module, *latents)[0], expand(module, *latents)[1].tanh())


@pytest.mark.parametrize("change", [with_a_bias, with_other_values])
def test_probe_can_fail_an_expansion_that_is_no_projection_is_left_to_the_library(
    tiny_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, change: Callable[[Expand], Expand]
) -> None:
    monkeypatch.setattr(DeepseekV3Attention, "expand_kv", change(DeepseekV3Attention.expand_kv))
    assert_row_by_row(tiny_dir(NAME), "latents that one projection does not expand")


def test_probe_can_fail_what_is_done_to_expanded_keys_is_left_to_the_library(
    tiny_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The definition scales its keys after their expansion, which latents do not show."""

    class Scaled:
        """Attention functions of the library, with longer keys."""

        def get_interface(self, *which: Any) -> Any:
            attend = ALL_ATTENTION_FUNCTIONS.get_interface(*which)
            return lambda module, query, key, *rest, **options: attend(
                module, query, key * 1.5, *rest, **options
            )

    monkeypatch.setattr(modeling_deepseek_v3, "ALL_ATTENTION_FUNCTIONS", Scaled())
    assert_row_by_row(tiny_dir(NAME), "positions that it counts by itself")


def test_a_rank_has_its_heads_of_the_projections_and_all_of_the_latents(
    tiny_dir: Callable[[str], Path],
) -> None:
    whole, half = (
        {
            name.removeprefix("model.layers.1.self_attn."): each.shape
            for name, each in load_model(tiny_dir(NAME), "float32", "cpu", ranks).module.named_parameters()
            if name.startswith("model.layers.1.self_attn.")
        }
        for ranks in (None, LocalCollectives(Topology(2), 1))
    )
    own = {"q_b_proj.weight": 0, "kv_b_proj.weight": 0, "o_proj.weight": 1}
    for name, shape in whole.items():
        assert half[name] == torch.Size(
            size // 2 if own.get(name) == dim else size for dim, size in enumerate(shape)
        )
    assert own.keys() < whole.keys()


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_with_one_of_a_layers_two_attentions_is_refused(tmp_path: Path, stage: int) -> None:
    """LongCat's KV layers are its attentions. Of 8 in 4 layers, stage 0 would have 3, and stage 1 too."""
    directory = recipes.save(recipes.recipe("longcat_flash"), tmp_path / "longcat")
    with pytest.raises(CannotSplit, match=r"^--pp 3: a stage of the model longcat would end within a layer$"):
        load_model(directory, "float32", "cpu", LocalCollectives(Topology(1, 3), stage))
