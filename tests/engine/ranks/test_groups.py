"""Tests that ranks compute what one rank would, and fail together. They are real processes over gloo."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import LlamaConfig

from baton.engine_interface import GrammarUnsatisfied, LogitsNotFinite
from baton.pages.kv_checksum import WORD
from baton.pages.layout import GroupHead
from baton.rooms.request import Sampling
from baton.topology import Topology
from tests.engine import tiny_models
from tests.engine.conftest import MakeEngine
from tests.engine.quantization.quantized_files import FORMATS, write
from tests.engine.ranks import rank_scenarios
from tests.engine.ranks.rank_processes import Crew
from tests.engine.test_equals_reference import random_prompts
from tests.engine.test_scores import check_scores
from tests.engine.tiny_models import SHAPE, save
from tests.grammars.answers import NAMED, ids
from tests.oracle import reference_greedy, reference_scores
from tests.sampling.test_grammar_masks import VOCABULARY

TWO_KV_HEADS = "llama-biased-two-kv-heads"
OUTPUT_TOKENS = 12
LENGTHS = (1, 7, 16, 17, 33)

SHAPES = {
    "tp2": Topology(2),
    "tp4": Topology(4),
    "pp2": Topology(1, 2),
    "pp3": Topology(1, 3),
    "tp2-pp2": Topology(2, 2),
}
SQUARE = Topology(2, 2)
ROW_BIASES = ("o_proj.bias", "down_proj.bias")
TIED = "qwen2-biased"
OTHERS = (
    TIED,
    "qwen3-query-key-norm",
    "mistral-no-window",
    "gemma-one-kv-head",
    "granite-own-scaling",
    "apertus-numbers-of-no-dimension",
    "qwen3-moe",
)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    made = Crew()
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(tiny_dir: Callable[[str], Path]) -> Path:
    return tiny_dir(TWO_KV_HEADS)


@pytest.mark.parametrize("topology", SHAPES.values(), ids=SHAPES.keys())
def test_packed_prefill_and_batched_decode_of_several_ranks_equal_generate(
    crew: Crew, model: Path, topology: Topology
) -> None:
    prompts = random_prompts(LENGTHS)
    expected = reference_greedy(model, prompts, OUTPUT_TOKENS)
    told = crew.play(topology, rank_scenarios.answers, model, prompts, OUTPUT_TOKENS, (7, 64))
    assert [each["outputs"] for each in told] == [[expected, expected]] * topology.ranks
    assert len({each["pages"] for each in told}) == 1, "as many pages on every rank"


@pytest.mark.parametrize("architecture", OTHERS)
def test_every_architecture_with_a_plan_equals_generate(
    crew: Crew, tiny_dir: Callable[[str], Path], architecture: str
) -> None:
    directory, prompts = tiny_dir(architecture), random_prompts(LENGTHS)
    expected = reference_greedy(directory, prompts, OUTPUT_TOKENS)
    told = crew.play(SQUARE, rank_scenarios.answers, directory, prompts, OUTPUT_TOKENS, (10,))
    assert [each["outputs"] for each in told] == [[expected]] * 4


@pytest.mark.parametrize("form", ["FP8 in blocks (Qwen3-FP8, DeepSeek V3, MiniMax M2)", "AWQ"])
def test_a_quantised_checkpoint_over_two_ranks_equals_generate_on_what_it_stands_for(
    crew: Crew, model: Path, tmp_path: Path, form: str
) -> None:
    quantised, meant = write(model, tmp_path, FORMATS[form])
    prompts = random_prompts((7, 17))
    expected = reference_greedy(meant, prompts, OUTPUT_TOKENS)
    told = crew.play(Topology(2), rank_scenarios.answers, quantised, prompts, OUTPUT_TOKENS, (10,))
    assert [each["outputs"] for each in told] == [[expected]] * 2


def test_the_demo_model_of_several_ranks_equals_the_reference(crew: Crew, demo_model_dir: Path) -> None:
    """9 query heads, 3 KV heads, 30 layers, a tied head: by layers alone, and by heads and layers."""
    prompts = [[504, 3575, 282, 4649, 314], list(range(900, 920)), [33]]
    expected = reference_greedy(demo_model_dir, prompts, 6)
    for topology in (Topology(1, 3), Topology(3, 2)):
        told = crew.play(topology, rank_scenarios.answers, demo_model_dir, prompts, 6, (16,), 2**24)
        assert [each["outputs"] for each in told] == [[expected]] * topology.ranks, topology


def test_each_rank_has_its_part_of_the_weights_and_no_more(crew: Crew, model: Path) -> None:
    """Memory, in numbers. The vocabulary does not divide by two: the first rank has one row more."""
    sizes = {name: each.numel() for name, each in load_file(model / "model.safetensors").items()}
    layer = {name: size for name, size in sizes.items() if ".layers.0." in name}
    whole = {name for name in layer if "proj" not in name or name.endswith(ROW_BIASES)}
    stage = 2 * sum(size if name in whole else size // 2 for name, size in layer.items())
    row = tiny_models.SHAPE["hidden_size"]
    told = crew.play(SQUARE, rank_scenarios.answers, model, [[1]], 1, (1,))
    first, last = stage + tiny_models.VOCABULARY * row, stage + row
    assert [each["weights"] for each in told] == [first, first, last + 66 * row, last + 65 * row]
    assert [(each["layout"].groups[0].layers, each["layout"].groups[0].heads) for each in told] == [
        ((0, 1), (0,)),
        ((0, 1), (1,)),
        ((2, 3), (0,)),
        ((2, 3), (1,)),
    ]


def test_a_tied_head_takes_no_memory_beside_the_embedding(
    crew: Crew, tiny_dir: Callable[[str], Path]
) -> None:
    row = tiny_models.SHAPE["hidden_size"]
    told = {}
    for stages in (1, 3):
        ranks = crew.play(Topology(2, stages), rank_scenarios.answers, tiny_dir(TIED), [[1]], 1, (1,))
        told[stages] = sum(each["weights"] for each in ranks)
    assert told[3] - told[1] == tiny_models.VOCABULARY * row, (
        "only a last stage that is not the first has its own"
    )


SAMPLINGS = [
    Sampling(temperature=0.0, top_logprobs=0),
    Sampling(seed=3, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, top_logprobs=5),
    Sampling(seed=4, temperature=1.2, frequency_penalty=0.3, top_logprobs=20),
    Sampling(seed=5, logit_bias=((3, 5.0),)),
    Sampling(temperature=0.0, top_logprobs=1),
]


@pytest.mark.parametrize("topology", [Topology(2), SQUARE], ids=["tp2", "tp2-pp2"])
def test_one_rank_draws_for_all(crew: Crew, model: Path, tiny_engine: MakeEngine, topology: Topology) -> None:
    """Ids and logprobs are equal to the last bit on every rank, and equal to one engine's apart from
    rounding."""
    prompts = random_prompts(LENGTHS)
    told = crew.play(topology, rank_scenarios.draws, model, prompts, SAMPLINGS, OUTPUT_TOKENS)
    assert all(each == told[0] for each in told)
    alone = rank_scenarios.drawn(tiny_engine(TWO_KV_HEADS), prompts, SAMPLINGS, OUTPUT_TOKENS)
    for ours, theirs in zip(told[0], alone, strict=True):
        assert [token.id for token in ours] == [token.id for token in theirs]
        for token, other in zip(ours, theirs, strict=True):
            assert (token.logprob is None) == (other.logprob is None)
            assert [each for each, _ in token.top] == [each for each, _ in other.top]
            if token.logprob is not None:
                assert token.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_drawn_is_drawn_all_ranks_take_the_drafts_that_one_has_drawn(crew: Crew, model: Path) -> None:
    """The logprobs at each position are equal too, and there are fewer steps than tokens."""
    asked = model, random_prompts(LENGTHS), SAMPLINGS, OUTPUT_TOKENS
    (alone, *_) = crew.play(SQUARE, rank_scenarios.draws, *asked)
    told = crew.play(SQUARE, rank_scenarios.guessed, *asked, alone)
    assert all(each == told[0] for each in told)
    found, steps = told[0]
    for mine, right in zip(found, alone, strict=True):
        assert [token.id for token in mine] == [token.id for token in right]
        for token, other in zip(mine, right, strict=True):
            assert [each for each, _ in token.top] == [each for each, _ in other.top]
            assert token.logprob == (
                None if other.logprob is None else pytest.approx(other.logprob, abs=1e-4)
            )
    assert steps < OUTPUT_TOKENS


def test_drafts_agreed_all_ranks_hear_what_the_grammar_forces(crew: Crew, tmp_path: Path) -> None:
    """Only the rank that draws knows the grammar state."""
    shape = {**SHAPE, "vocab_size": VOCABULARY, "tie_word_embeddings": False, "num_key_value_heads": 2}
    directory = save(LlamaConfig(**shape), tmp_path)
    told = crew.play(SQUARE, rank_scenarios.proposed, directory, ids("The fox"), NAMED)
    assert all(each == told[0] for each in told)
    output, checked = told[0]
    assert sum(map(len, checked)) > 5
    assert len(output) == len(checked) + sum(map(len, checked))


def test_drafts_agreed_all_ranks_hear_what_the_draft_model_of_one_says(
    crew: Crew, model: Path, tiny_dir: Callable[[str], Path]
) -> None:
    """Only the rank that draws has loaded the draft model."""
    prompts = random_prompts(LENGTHS)
    for drafts, least in ((model, OUTPUT_TOKENS), (tiny_dir("llama-mha-tied"), 1)):
        told = crew.play(
            SQUARE, rank_scenarios.drafted, model, drafts, prompts, Sampling(seed=3), OUTPUT_TOKENS
        )
        assert all(each == told[0] for each in told)
        answers, proposed = told[0]
        assert sum(len(tokens) for step in proposed for tokens in step) >= least
        plain = crew.play(
            SQUARE, rank_scenarios.draws, model, prompts, [Sampling(seed=3)] * 5, OUTPUT_TOKENS
        )[0]
        assert answers == [[token.id for token in each] for each in plain]
        assert drafts != model or len(proposed) < OUTPUT_TOKENS // 2


def test_own_draws_the_choices_of_a_prompt_are_drawn_by_two_ranks_as_by_one(
    crew: Crew, model: Path, tiny_engine: MakeEngine
) -> None:
    asked = random_prompts((16, 33)), Sampling(temperature=1.0), (5, 6, 7), OUTPUT_TOKENS
    told = crew.play(Topology(2), rank_scenarios.several, model, *asked)
    assert told == [rank_scenarios.one_by_one(tiny_engine(TWO_KV_HEADS), *asked)] * 2


@pytest.mark.parametrize("topology", [Topology(2), Topology(1, 2), SQUARE], ids=["tp2", "pp2", "tp2-pp2"])
def test_all_ranks_have_the_prompts_scores(crew: Crew, model: Path, topology: Topology) -> None:
    prompts = random_prompts(LENGTHS)
    told = crew.play(topology, rank_scenarios.scores, model, prompts, 3, 9)
    assert all(each == told[0] for each in told)
    for prompt, scores in zip(prompts, told[0], strict=True):
        check_scores(scores, prompt, reference_scores(model, prompt), 3)


@pytest.mark.parametrize("topology", SHAPES.values(), ids=SHAPES.keys())
def test_the_sum_of_pages_is_the_whole_workers_on_every_rank(
    crew: Crew, model: Path, topology: Topology
) -> None:
    """Each KV head's sum covers the layers of all stages, once, however many ranks hold the head."""
    told = crew.play(topology, rank_scenarios.sums, model, 40, 16)
    heads: dict[GroupHead, dict[tuple[int, ...], int]] = {(0, 0): {}, (0, 1): {}}
    for each in told:
        for head, value in each["here"].items():
            assert heads[0, head].setdefault(each["layers"], value) == value, "copies of a head are the same"
    want = {head: sum(stages.values()) & WORD for head, stages in heads.items()}
    assert [each["everywhere"] for each in told] == [want] * topology.ranks
    assert [each["of none"] for each in told] == [0] * topology.ranks
    assert all("before all ranks have told" in each["early"] for each in told)


def test_a_step_that_fails_on_one_rank_by_its_numbers_fails_alike_on_all(
    crew: Crew, model: Path, tiny_engine: MakeEngine
) -> None:
    """A row fails by NaN logits on the sampling rank, by an invalid range, or by a grammar that is not
    compiled. Other rows are drawn."""
    (prompt,) = random_prompts((9,))
    told = crew.play(SQUARE, rank_scenarios.troubles, model, prompt, 2)
    (expected,) = reference_greedy(model, [prompt], 1)
    (row, nan, drew, held) = told[0]
    assert row.startswith("ValueError: request-0: positions [0, 10)")
    assert (nan, held) == (LogitsNotFinite.__name__, GrammarUnsatisfied.__name__)
    assert drew == f"drew {expected[:1]}"
    assert told == [told[0]] * 4


def test_narrow_numbers_are_added_up_too(crew: Crew, model: Path, tiny_engine: MakeEngine) -> None:
    """The top logprobs in bfloat16 equal those in float32, apart from rounding."""
    (prompt,) = random_prompts((30,))
    sampling = [Sampling(temperature=0.0, top_logprobs=20)]
    told = crew.play(SQUARE, rank_scenarios.draws, model, [prompt], sampling, 1, "bfloat16")
    ((wide,),) = rank_scenarios.drawn(tiny_engine(TWO_KV_HEADS), [prompt], sampling, 1)
    for ((narrow,),) in told:
        ours, theirs = dict(narrow.top), dict(wide.top)
        assert len(set(ours) & set(theirs)) > 10
        assert 0 < max(abs(ours[token] - theirs[token]) for token in set(ours) & set(theirs)) < 0.5


# ---- ranks that go away


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_dies_in_a_step_breaks_the_team_at_once(crew: Crew, model: Path, victim: int) -> None:
    """The group breaks in all stages long before the timeout, and stays broken."""
    told = crew.play(SQUARE, rank_scenarios.end_in_a_step, model, [1, 2, 3], victim, "die", timeout_s=60)
    assert told[victim] is None
    for rank, each in enumerate(told):
        if rank != victim:
            text, seconds = each
            first, second = text.split(" | ")
            assert first.startswith(
                f"rank {rank} of 4: waited for the other ranks of its step, at most 60 s: "
            )
            assert second == first
            assert seconds < 30


def test_a_rank_that_hangs_in_a_step_breaks_the_team_after_the_time_out(crew: Crew, model: Path) -> None:
    topology = Topology(2)
    crew.start(topology, rank_scenarios.end_in_a_step, model, [1, 2, 3], 1, "hang", timeout_s=2)
    try:
        text, seconds = crew.answer(0)
    finally:
        os.kill(crew.pid(1), signal.SIGKILL)
    assert crew.answer(1) is None
    assert text.startswith("rank 0 of 2: waited for the other ranks of its step, at most 2 s: ")
    assert 1 < seconds < 30


def test_a_rank_that_fails_alone_breaks_the_team_and_says_why(crew: Crew, model: Path) -> None:
    told = crew.play(SQUARE, rank_scenarios.end_in_a_step, model, [1, 2, 3], 3, "fail")
    texts = [text.split(" | ")[0] for text, _ in told]
    assert max(seconds for _, seconds in told) < 30, "long before the time-out"
    assert texts[3] == "rank 3 of 4: RuntimeError: out of memory"
    assert all(texts[rank].startswith(f"rank {rank} of 4: waited for the other") for rank in range(3))


def test_a_team_that_is_not_complete_is_not_joined(crew: Crew) -> None:
    told = crew.play(Topology(3), rank_scenarios.apart, 1, timeout_s=2)
    for rank in (0, 2):
        assert told[rank].startswith(f"rank {rank} of 3 has not met its team at 127.0.0.1:")
        assert "waiting at most 2 s" in told[rank]


def test_a_rank_waits_longer_for_what_others_compute_than_for_them_to_come(crew: Crew) -> None:
    assert crew.play(Topology(1, 2), rank_scenarios.slowly, 3.0, timeout_s=1) == [7, 7]
