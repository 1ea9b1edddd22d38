"""Tests that modules on several ranks compute what one rank would, and that placeholders give no numbers."""

import copy

import pytest
import torch
import transformers
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2RMSNorm

from baton.engine.loading.rank_exchanges import (
    MissingEmbedding,
    ParallelHead,
    ParallelNorm,
    SkippedLayer,
    SkippedTail,
    dispatch_experts,
    receive_input,
)
from baton.engine.loading.rank_shard import RankLink
from baton.inference.collectives import LocalCollectives
from baton.models.model_facts import UnsupportedModel
from baton.topology import Topology
from tests.engine import tiny_models

ALONE = Topology()


class Summing(LocalCollectives):
    """A rank group whose other ranks add `others`."""

    def __init__(self, others: torch.Tensor) -> None:
        super().__init__(ALONE, 0)
        self._others = others

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + self._others


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def test_a_head_is_as_wide_as_its_weight_whatever_its_definition_says() -> None:
    """The head's weight may be tied to an embedding of fewer tokens."""
    head = nn.Linear(4, 9, bias=False)
    head.weight = nn.Parameter(numbers(5, 4))
    assert ParallelHead(head, RankLink(LocalCollectives(ALONE, 0)), 5)(numbers(1, 2, 4)).shape == (1, 2, 5)


@pytest.mark.parametrize("copies", [1, 2])
def test_a_norm_over_all_heads_is_that_of_one_rank_however_many_hold_a_head(copies: int) -> None:
    whole, hidden = MiniMaxM2RMSNorm(12), numbers(1, 5, 12)
    whole.weight = nn.Parameter(numbers(12))
    expected, parts = whole(hidden), [hidden[..., begin : begin + 4] for begin in (0, 4, 8)]
    for place, mine in enumerate(parts):
        rest = [each for other, each in enumerate(parts) for _ in range(copies - (other == place))]
        squares = torch.cat(rest, -1).square().sum(-1, keepdim=True)
        norm = ParallelNorm(whole, RankLink(Summing(squares)), copies)
        norm.weight = nn.Parameter(whole.weight[4 * place : 4 * place + 4])
        assert torch.allclose(norm(mine), expected[..., 4 * place : 4 * place + 4], atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_a_norm_of_another_kind_is_not_taken_for_one_over_all_heads(bias: bool) -> None:
    ParallelNorm(nn.RMSNorm(12, eps=0.3), RankLink(LocalCollectives(ALONE, 0)), 1)
    with pytest.raises(ValueError, match="a LayerNorm"):
        ParallelNorm(nn.LayerNorm(12, bias=bias), RankLink(LocalCollectives(ALONE, 0)), 1)


def test_experts_that_are_dealt_out_add_up_to_all() -> None:
    config = transformers.GptOssConfig(**tiny_models.SHAPE, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "grouped_mm"
    experts, hidden = GptOssExperts(config), numbers(9, tiny_models.SHAPE["hidden_size"])
    for weight in experts.parameters():
        weight.data = numbers(*weight.shape) * 0.3
    weights, chosen = numbers(9, 4).softmax(-1).topk(2)
    halves = []
    for own in (range(2), range(2, 4)):
        half = copy.deepcopy(experts)
        for name, weight in experts.named_parameters():
            setattr(half, name, nn.Parameter(weight[own.start : own.stop]))
        dispatch_experts(half, own, RankLink(LocalCollectives(ALONE, 0)))
        halves.append(half(hidden, chosen, weights))
    assert torch.allclose(halves[0] + halves[1], experts(hidden, chosen, weights), atol=1e-5)
    assert not torch.allclose(halves[0], halves[1])


def test_an_embedding_that_a_stage_lacks_gives_no_numbers_in_a_step_and_a_tokens_own_to_a_look() -> None:
    link = RankLink(LocalCollectives(ALONE, 0))
    blank, ids = MissingEmbedding(nn.Embedding(9, 6, dtype=torch.bfloat16), link), torch.tensor([[3, 1, 3]])
    step = blank(ids.to(blank.weight.device))
    assert step.shape == (1, 3, 6)
    assert step.dtype == torch.bfloat16
    assert step.isnan().all()
    with link.cut():
        look = blank(ids)
    assert torch.equal(look[0, 0], look[0, 2])
    assert not torch.equal(look[0, 0], look[0, 1])
    assert dict(blank.state_dict()) == {}


def test_a_layer_that_a_stage_lacks_passes_on_what_it_is_given_and_answers_as_the_layer() -> None:
    layer = nn.Linear(4, 4)
    layer.attention_type = "sliding_attention"  # type: ignore[assignment]
    elsewhere, hidden = SkippedLayer(layer), numbers(1, 2, 4)
    assert elsewhere(hidden, position_ids=None) is hidden
    assert elsewhere.attention_type == "sliding_attention"
    assert list(elsewhere.parameters()) == []


def test_a_stage_computes_what_it_receives_however_its_first_layer_is_called() -> None:
    class Other(LocalCollectives):
        def receive(self, like: torch.Tensor) -> torch.Tensor:
            return torch.ones_like(like)

    class Layer(nn.Module):
        def forward(self, hidden_states: torch.Tensor, scale: int) -> torch.Tensor:
            return hidden_states * scale

    layer = Layer()
    receive_input(layer, RankLink(Other(ALONE, 0)))
    for told in (layer(torch.zeros(2), 3), layer(hidden_states=torch.zeros(2), scale=3)):
        assert told.tolist() == [3, 3]


def test_what_comes_behind_the_last_layer_is_passed_over_there_alone() -> None:
    last, hidden = nn.Identity(), numbers(1, 2, 4)
    later = SkippedTail("mine", last)
    for _ in range(2):
        with pytest.raises(UnsupportedModel, match="the model mine cannot be served by several ranks"):
            later(hidden)
        assert later(last(hidden)) is hidden
