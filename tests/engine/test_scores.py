"""Tests that scores of prompt tokens are the reference library's, however the work is cut into steps."""

from collections import abc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from baton.decode.settings import DecodeSettings
from baton.engine.execution.execution_kind import ExecutionKind
from baton.engine.loading.engine_loading import load_engine
from baton.engine_interface import LogitsNotFinite, PromptScores, Row, Sequence
from baton.prefill.settings import PrefillSettings
from baton.rooms.request import Request, Sampling, Score, Token
from baton.sampling.prompt_scores import LOGITS_BYTES, SCORING_BYTES, scored_positions_max
from baton.sampling.sampler import sample
from tests.engine import tiny_models
from tests.engine.conftest import MakeEngine
from tests.engine.execution.compiled_kernels import Directory, load, needs_kernel
from tests.engine.executions import is_compiled
from tests.engine.ranks.rank_scenarios import scored
from tests.engine.test_equals_reference import random_prompts
from tests.inference.engine_worker import GREEDY, ShuffledWorker
from tests.oracle import reference_greedy, reference_scores

LENGTHS = (1, 2, 7, 16, 33, 64)
TOP = 4
CLOSE = 1e-4


def check_scores(
    scores: abc.Sequence[Score], prompt: abc.Sequence[int], reference: torch.Tensor, top: int
) -> None:
    """`reference`: as `reference_scores` gives it."""
    assert len(scores) == len(prompt) - 1
    for told, token, row in zip(scores, prompt[1:], reference, strict=True):
        assert told.logprob == pytest.approx(row[token].item(), abs=CLOSE)
        assert told.rank == int((row >= row[token]).sum())
        likeliest = row.topk(top)
        assert [each for each, _ in told.top] == likeliest.indices.tolist()
        assert [each for _, each in told.top] == pytest.approx(likeliest.values.tolist(), abs=CLOSE)
        assert (told.rank == 1) == (told.top[0] == (token, told.logprob)), "as lm-eval tells what is greedy"


@pytest.mark.parametrize("chunk", [1, 7, 64], ids="chunk{}".format)
@pytest.mark.parametrize("architecture", ["llama-gqa-untied", "gemma-one-kv-head", "gpt2-learned-positions"])
def test_a_prompts_scores_are_the_librarys(
    tiny_dir: Callable[[str], Path], tiny_engine: MakeEngine, architecture: str, chunk: int
) -> None:
    """Several scored prompts share every step with one that is not scored, and with decode rows."""
    prompts = random_prompts(LENGTHS)
    told = scored(ShuffledWorker(tiny_engine(architecture), seed=chunk), prompts, TOP, chunk)
    for prompt, scores in zip(prompts, told, strict=True):
        check_scores(scores, prompt, reference_scores(tiny_dir(architecture), prompt), TOP)


def test_a_prompts_scores_are_the_librarys_row_by_row(tmp_path: Path) -> None:
    config = transformers.BloomConfig(
        vocab_size=tiny_models.VOCABULARY,
        hidden_size=48,
        n_layer=2,
        n_head=4,
        seq_length=256,
        initializer_range=0.3,
    )
    directory = tiny_models.save(config, tmp_path / "bloom")
    engine = load_engine(directory, dtype="float32", device="cpu", kv_cache_memory=2**22, threads=1)
    assert engine.execution.kind is ExecutionKind.ROW_BY_ROW
    prompts = random_prompts((2, 9, 33))
    for prompt, scores in zip(prompts, scored(ShuffledWorker(engine), prompts, TOP, 7), strict=True):
        check_scores(scores, prompt, reference_scores(directory, prompt), TOP)


@needs_kernel
@pytest.mark.parametrize("chunk", [7, 64], ids="chunk{}".format)
def test_a_prompts_scores_are_the_librarys_by_the_kernel(directory: Directory, chunk: int) -> None:
    where = directory("three queries a head")
    engine = load(where, dtype=torch.float32)
    assert is_compiled(engine)
    prompts = [[each % engine.model.vocab_size for each in prompt] for prompt in random_prompts((2, 40))]
    for prompt, scores in zip(prompts, scored(ShuffledWorker(engine), prompts, TOP, chunk), strict=True):
        check_scores(scores, prompt, reference_scores(where, prompt), TOP)


def test_how_an_answer_is_drawn_changes_no_score(tiny_engine: MakeEngine) -> None:
    (prompt,) = random_prompts((20,))
    odd = Sampling(seed=3, temperature=1.5, repetition_penalty=1.8, logit_bias=((prompt[5], 50.0),))
    told = []
    for sampling in (GREEDY, odd):
        worker = ShuffledWorker(tiny_engine("llama-gqa-untied"))
        tenant = worker.admit(prompt, 1, sampling, prompt_logprobs=2)
        worker.run([tenant], 9)
        assert tenant.sequence.scores is not None
        told.append(tenant.sequence.scores.values)
    assert told[0] == told[1]


def test_what_an_earlier_room_drew_is_not_scored(
    tiny_dir: Callable[[str], Path], tiny_engine: MakeEngine
) -> None:
    """The prompt is scored, though the room computes the output behind it, too."""
    (prompt,) = random_prompts((20,))
    (output,) = reference_greedy(tiny_dir("llama-gqa-untied"), [prompt], 6)
    worker = ShuffledWorker(tiny_engine("llama-gqa-untied"))
    tenant = worker.admit(prompt, 6, prompt_logprobs=TOP)
    tenant.sequence.output += output[:3]
    assert worker.run([tenant], 8) == [output]
    assert tenant.sequence.scores is not None
    check_scores(
        tenant.sequence.scores.values, prompt, reference_scores(tiny_dir("llama-gqa-untied"), prompt), TOP
    )


def test_a_chunk_that_is_no_numbers_fails_its_own_room_before_a_token_is_drawn(
    tiny_engine: MakeEngine,
) -> None:
    engine = tiny_engine("llama-gqa-untied")
    worker = ShuffledWorker(engine)
    spoilt, well = (worker.admit(prompt, 1, prompt_logprobs=0) for prompt in random_prompts((40, 40)))
    worker.step([spoilt, well], 10)
    engine.cache.tensor[spoilt.pages[0]] = float("nan")
    for tenant in (spoilt, well):
        worker.grow(tenant, 20)
    rows = [Row(each.sequence, 10, 20, (each.pages,), sample=False) for each in (spoilt, well)]
    told = engine.step(rows)
    assert isinstance(told[0], LogitsNotFinite)
    assert told[1] == ()


def test_more_positions_than_a_step_may_score_are_refused(
    tiny_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine("llama-gqa-untied")
    monkeypatch.setattr(engine, "scored_max", 20)
    worker = ShuffledWorker(engine)
    tenants = [worker.admit(prompt, 1, prompt_logprobs=0) for prompt in random_prompts((16, 16))]
    worker.step(tenants, 10)
    with pytest.raises(ValueError, match="24 positions to be scored in a step, at most 20 are"):
        worker.step([*tenants, worker.admit(range(30), 1, prompt_logprobs=0)], 14)


def test_a_gap_between_scores_is_refused(tiny_engine: MakeEngine) -> None:
    worker = ShuffledWorker(tiny_engine("llama-gqa-untied"))
    (prompt,) = random_prompts((20,))
    tenant = worker.admit(prompt, 1, prompt_logprobs=0)
    worker.step([tenant], 8)
    tenant.sequence.scores = PromptScores()
    with pytest.raises(ValueError, match="scores behind position 8, and 0 before it"):
        worker.step([tenant], 8)


@pytest.mark.parametrize("vocabulary", [131, 49_152, 151_936, 262_144])
def test_the_logits_of_a_step_that_scores_are_bounded(vocabulary: int) -> None:
    assert scored_positions_max(vocabulary) >= 64
    assert scored_positions_max(vocabulary) * vocabulary * 4 <= LOGITS_BYTES


def test_given_ids_are_told_behind_the_likeliest() -> None:
    scores = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    asked = Sampling(temperature=0.0, top_logprobs=1, logprob_token_ids=(2, 0, 3))
    (token,) = sample(scores, [Sequence(Request("r", (1,), 4, sampling=asked), [])])
    logprobs = torch.log_softmax(scores, dim=-1)[0].tolist()
    assert token == Token(3, logprobs[3], tuple((each, logprobs[each]) for each in (3, 2, 0, 3)))


def test_a_workers_memory_is_looked_at_for_what_scoring_takes(
    tiny_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed: dict[bool, list[int]] = {False: [], True: []}
    for scores_prompts, sizes in needed.items():
        monkeypatch.setattr(
            "baton.inference.page_memory.memory_shortage", lambda _, size, to=sizes: to.append(size)
        )
        load_engine(
            tiny_dir("llama-gqa-untied"),
            dtype="float32",
            device="cpu",
            kv_cache_memory=2**20,
            scores_prompts=scores_prompts,
        )
    assert max(needed[True]) - max(needed[False]) == SCORING_BYTES >= 2 * LOGITS_BYTES
    assert (PrefillSettings().scores_prompts, DecodeSettings().scores_prompts) == (True, False)
