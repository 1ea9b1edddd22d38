"""Tests that greedy output in float32 is the reference library's, however the work is cut into steps."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from transformers import AutoTokenizer

from baton.engine.loading.engine_loading import load_engine
from baton.engine_interface import DrawFailed, Row
from baton.rooms.request import Sampling
from tests.engine import tiny_models
from tests.engine.conftest import MakeEngine
from tests.inference.engine_worker import ShuffledWorker, hand_over
from tests.oracle import reference_greedy

LENGTHS = (1, 2, 7, 15, 16, 17, 33, 64, 100)
OUTPUT_TOKENS = 24


def random_prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    numbers = random.Random(11)
    return [[numbers.randrange(tiny_models.VOCABULARY) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("chunk", [1, 7, 64], ids="chunk{}".format)
@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_packed_chunked_prefill_and_paged_decode_equal_generate(
    tiny_dir: Callable[[str], Path], tiny_engine: MakeEngine, architecture: str, chunk: int
) -> None:
    """All prompts share every step; those whose prompt is done decode while the others still prefill."""
    worker = ShuffledWorker(tiny_engine(architecture), seed=chunk)
    tenants = [worker.admit(prompt, OUTPUT_TOKENS) for prompt in random_prompts()]
    outputs = worker.run(tenants, chunk)
    assert outputs == reference_greedy(tiny_dir(architecture), random_prompts(), OUTPUT_TOKENS)


N_SHAPE = {"vocab_size": tiny_models.VOCABULARY, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256}
PLACED = {
    "learned, two places on": transformers.OPTConfig(
        **tiny_models.SHAPE, ffn_dim=80, word_embed_proj_dim=48, init_std=0.3
    ),
    "learned, by a mask": transformers.BioGptConfig(**tiny_models.SHAPE),
    "learned, one head of keys": transformers.GPTBigCodeConfig(**N_SHAPE, initializer_range=0.3),
    "rotated in pairs": transformers.GPTJConfig(**N_SHAPE, rotary_dim=8, initializer_range=0.3),
    "rotated in part": transformers.GPTNeoXConfig(**tiny_models.SHAPE),
    "rotated in part, beside the product": transformers.PhiConfig(
        **{**tiny_models.SHAPE, "num_attention_heads": 4}
    ),
    "rotated in part, of a table": transformers.GlmConfig(**tiny_models.SHAPE),
    "rotated in most layers": transformers.SmolLM3Config(
        **{**tiny_models.SHAPE, "num_hidden_layers": 4, "pad_token_id": 0}
    ),
    "rotated, with a bias": transformers.Starcoder2Config(**tiny_models.SHAPE, sliding_window=None),
}


@pytest.mark.parametrize("scheme", PLACED)
def test_every_way_in_which_a_definition_places_tokens_equals_generate(tmp_path: Path, scheme: str) -> None:
    """Several sequences in a step, in chunks: what counts from the beginning of the step differs."""
    directory = tiny_models.save(PLACED[scheme], tmp_path / "placed")
    engine = load_engine(directory, dtype="float32", device="cpu", kv_cache_memory=2**22, threads=1)
    worker = ShuffledWorker(engine, seed=5)
    prompts = random_prompts((1, 7, 16, 33))
    outputs = worker.run([worker.admit(prompt, 12) for prompt in prompts], chunk=7)
    assert outputs == reference_greedy(directory, prompts, 12)


@pytest.mark.parametrize("page_tokens", [1, 5, 64], ids="page{}".format)
@pytest.mark.parametrize("architecture", ["llama-gqa-untied", "deepseek-v3-latents"])
def test_page_sizes_do_not_matter(
    tiny_dir: Callable[[str], Path], tiny_engine: MakeEngine, architecture: str, page_tokens: int
) -> None:
    worker = ShuffledWorker(tiny_engine(architecture, page_tokens))
    tenants = [worker.admit(prompt, OUTPUT_TOKENS) for prompt in random_prompts()]
    outputs = worker.run(tenants, chunk=20)
    assert outputs == reference_greedy(tiny_dir(architecture), random_prompts(), OUTPUT_TOKENS)


@pytest.mark.parametrize("architecture", ["llama-gqa-untied", "gemma-one-kv-head", "deepseek-v3-latents"])
def test_copied_pages_continue_in_another_engine(
    tiny_dir: Callable[[str], Path], tiny_engine: MakeEngine, architecture: str
) -> None:
    """Prefill here, copy the bytes, decode there: one request after the other, then all in a batch."""
    prompts = random_prompts()
    expected = reference_greedy(tiny_dir(architecture), prompts, OUTPUT_TOKENS)
    prefill = ShuffledWorker(tiny_engine(architecture), seed=1)
    decode = ShuffledWorker(tiny_engine(architecture, which=1), seed=2)
    assert prefill.engine is not decode.engine

    arrived = []
    for prompt in prompts:
        tenant = prefill.admit(prompt, OUTPUT_TOKENS)
        while not tenant.sequence.output:
            prefill.step([tenant], chunk=10)
        arrived.append(hand_over(tenant, prefill, decode))
        prefill.release(tenant)
    assert decode.run(arrived, chunk=1) == expected


def test_pages_that_were_released_and_spoilt_serve_the_next_tenant(
    tiny_dir: Callable[[str], Path], tiny_engine: MakeEngine
) -> None:
    worker = ShuffledWorker(tiny_engine("llama-gqa-untied"))
    expected = reference_greedy(tiny_dir("llama-gqa-untied"), random_prompts(), OUTPUT_TOKENS)
    for prompt, want in zip(random_prompts(), expected, strict=True):
        tenant = worker.admit(prompt, OUTPUT_TOKENS)
        assert worker.run([tenant], chunk=64) == [want]
        worker.release(tenant)


def test_a_sequence_that_was_cut_off_is_taken_up_with_its_output_as_prefix(
    tiny_dir: Callable[[str], Path], tiny_engine: MakeEngine
) -> None:
    """A retry on another pair: prompt and output so far are computed anew, and the stream goes on."""
    worker = ShuffledWorker(tiny_engine("llama-gqa-untied"))
    (prompt,) = random_prompts((40,))
    (expected,) = reference_greedy(tiny_dir("llama-gqa-untied"), [prompt], OUTPUT_TOKENS)
    tenant = worker.admit(prompt, OUTPUT_TOKENS)
    tenant.sequence.output.extend(expected[:9])
    assert worker.run([tenant], chunk=30) == [expected]


def test_the_demo_model_answers_and_equals_the_reference(demo_model_dir: Path) -> None:
    engine = load_engine(demo_model_dir, dtype="float32", device="cpu", kv_cache_memory=2**27, threads=1)
    tokenizer = AutoTokenizer.from_pretrained(demo_model_dir)
    texts = ("The capital of France is", "1, 2, 3, 5, 8,", "def add(a, b):", "今日は", "🎉🎈")
    prompts = [list(tokenizer(text)["input_ids"]) for text in texts]
    worker = ShuffledWorker(engine)
    outputs = worker.run([worker.admit(prompt, 10) for prompt in prompts], chunk=5)
    assert tokenizer.decode(outputs[0]).lstrip().startswith("Paris")
    assert outputs == reference_greedy(demo_model_dir, prompts, 10)


@pytest.mark.parametrize("architecture", ["llama-gqa-untied", "deepseek-v3-latents"])
def test_bfloat16_is_near_float32(tiny_dir: Callable[[str], Path], architecture: str) -> None:
    """The narrow format's first-token log-probabilities are those of float32, but for rounding."""
    likely = []
    for dtype in ("float32", "bfloat16"):
        engine = load_engine(
            tiny_dir(architecture), dtype=dtype, device="cpu", kv_cache_memory=2**20, threads=1
        )
        assert engine.cache.group.dtype == dtype
        likely.append(first_logprobs(ShuffledWorker(engine), random_prompts((30,))[0]))
    difference = max(abs(likely[0][token] - likely[1][token]) for token in set(likely[0]) & set(likely[1]))
    assert 0 < difference < 0.5


def first_logprobs(worker: ShuffledWorker, prompt: list[int]) -> dict[int, float]:
    tenant = worker.admit(prompt, 1, Sampling(temperature=0.0, top_logprobs=20))
    worker.grow(tenant, len(prompt))
    (taken,) = worker.engine.step([Row(tenant.sequence, 0, len(prompt), (tenant.pages,), sample=True)])
    assert not isinstance(taken, DrawFailed)
    (token,) = taken
    return dict(token.top)
