"""Tests that ranks compute what one rank would for models with windows and chunks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.engine.loading.model_loading import load_model
from baton.inference.collectives import LocalCollectives
from baton.topology import Topology
from tests.engine import tiny_models
from tests.engine.matrix.table import TYPES
from tests.engine.ranks import rank_scenarios
from tests.engine.ranks.rank_processes import Crew
from tests.engine.test_equals_reference import random_prompts
from tests.models import recipes
from tests.oracle import reference_greedy

OUTPUT_TOKENS = 8
PROMPTS = random_prompts((5, 150))
CUT = {
    "mistral, window": Topology(2),
    "gemma2": Topology(2),
    "gemma3": Topology(1, 2),  # two kinds of rotations, by the layer's place
    "phi3, window": Topology(2),  # queries, keys and values in one weight, and a gate in another
    "olmo3": Topology(2),  # norms over all heads
    "gpt-oss": Topology(2),  # experts dealt out
    "granite, windows and sinks": Topology(2),
    "command a": Topology(1, 2),
    "deepseek v3": Topology(2),  # one latent on both ranks
    "deepseek v2, queries not compressed": Topology(2, 2),
    "text of mistral small 4": Topology(1, 2),
    "llama 4, chunks, scaled by length": Topology(2),  # experts that lie turned
    "text of qwen3-vl": Topology(2),
    "text of llama 4": Topology(1, 2),  # no pipeline plan of its own
    "text of gemma3": Topology(1, 2),
}
OF_TYPES: dict[str, tuple[dict[str, Any], Topology]] = {
    "minimax_m2": ({}, Topology(4)),  # norms over all heads, of which two ranks have the same
    "longcat_flash": ({}, Topology(2, 2)),  # two attentions a layer, experts that return their input
    "gpt_neox": ({}, Topology(2, 2)),  # queries, keys and values of a head in one weight, its own names
    "cohere": ({"use_qk_norm": True}, Topology(2)),  # a norm for each head
    "sarvam_moe": ({}, Topology(2)),  # one weight of the files for three
    "muse_spark": ({}, Topology(2)),  # a norm behind each expert
    "granitemoehybrid": ({}, Topology(2, 2)),  # states, and a stage without attention
    "afmoe": ({}, Topology(2)),  # a gate of heads, an attention that its plan leaves whole
}


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    made = Crew()
    yield made
    made.close()


@pytest.mark.parametrize("name", CUT)
def test_tokens_of_several_ranks_are_those_of_generate(crew: Crew, tmp_path: Path, name: str) -> None:
    directory, topology = tiny_models.save(TYPES[name].make(), tmp_path / "mine"), CUT[name]
    expected = reference_greedy(directory, PROMPTS, OUTPUT_TOKENS)
    told = crew.play(topology, rank_scenarios.answers, directory, PROMPTS, OUTPUT_TOKENS, (40,), 2**23)
    assert [each["outputs"] for each in told] == [[expected]] * topology.ranks


@pytest.mark.parametrize("kind", OF_TYPES)
def test_tokens_of_a_types_ranks_are_those_of_generate(crew: Crew, tmp_path: Path, kind: str) -> None:
    fields, topology = OF_TYPES[kind]
    config = recipes.recipe(kind)
    config.update(fields)
    directory = recipes.save(config, tmp_path / kind)
    expected = reference_greedy(directory, PROMPTS, OUTPUT_TOKENS)
    told = crew.play(topology, rank_scenarios.answers, directory, PROMPTS, OUTPUT_TOKENS, (40,), 2**23)
    assert [each["outputs"] for each in told] == [[expected]] * topology.ranks


def test_what_a_models_own_plan_leaves_whole_is_cut_all_the_same(tmp_path: Path) -> None:
    """Qwen3-VL's names its embedding alone."""
    directory = tiny_models.save(TYPES["text of qwen3-vl"].make(), tmp_path / "mine")
    whole, half = (
        {
            name: each.numel()
            for name, each in load_model(directory, "float32", "cpu", rank_group).module.named_parameters()
        }
        for rank_group in (None, LocalCollectives(Topology(2), 0))
    )
    products = [name for name in whole if ".layers." in name and name.endswith("_proj.weight")]
    assert len(products) == 7 * tiny_models.SHAPE["num_hidden_layers"]
    assert all(2 * half[name] == whole[name] for name in products)
