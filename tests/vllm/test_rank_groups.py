"""Tests of workers of several ranks on vLLM's engine, over gRPC and NIXL, against vLLM's own `LLM` alone."""

import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from transformers import LlamaConfig

from tests.engine.tiny_models import save
from tests.http import greedy, web
from tests.models.eight_heads import EIGHT_HEADS, VOCABULARY, with_tokenizer
from tests.process.load import ANSWER_S, Answer, Asked, Load, any_prompts
from tests.process.stack import SPLIT, Stack, running_stack
from tests.vllm.conftest import PAGE_TOKENS
from tests.vllm.families import SHAPE, save_family
from tests.vllm.oracle import vllm_greedy

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]

LENGTHS: Final = (1, 2, 31, 32, 33, 64, 65, 130, 300, 700)
TOKENS: Final = 60
DISTURBED_AT: Final = 10
"""Tokens of each stream that have come when a rank is killed or stopped."""
start_stack: Final = partial(
    running_stack,
    by_commands=True,
    engine="vllm",
    dtype="float32",
    page_tokens=str(PAGE_TOKENS),
    kv_cache_memory="32MiB",
    group_timeout_ms="20000",
)
PATIENT: Final = {"connect_timeout_ms": "60000", **SPLIT}
CHUNKED: Final = {"chunk_tokens": "64"}


@pytest.fixture(scope="module")
def model(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Llama of 4 layers, 8 heads and 2 KV heads of 32 elements, the least of vLLM's attention."""
    config = LlamaConfig(**{**EIGHT_HEADS.to_dict(), "head_dim": 32})
    return with_tokenizer(save(config, tmp_path_factory.mktemp("model")), demo_model_dir)


@pytest.fixture(scope="module")
def known(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Asked:
    """Prompts, and what vLLM's own `LLM` answers in one process."""
    prompts = any_prompts(LENGTHS, VOCABULARY)
    answers = vllm_greedy(model, prompts, TOKENS, tmp_path_factory.mktemp("oracle"))
    assert len({tuple(each) for each in answers}) == len(prompts), "each prompt has an answer of its own"
    return Asked(prompts, answers)


async def test_two_tensor_ranks_hand_over_to_one(model: Path, known: Asked) -> None:
    with start_stack(str(model), prefill=[{"tp": "2", **CHUNKED}], decode=[PATIENT]) as stack:
        await check_answers(stack, known, {("prefill-0", "decode-0")})


@pytest.mark.all_models
@pytest.mark.parametrize(
    ("family", "prefill", "decode_ranks"),
    [
        ("gemma4", {"tp": "2"}, 1),
        ("gemma4_31b", {"pp": "2"}, 1),
        ("falcon_h1", {"tp": "2"}, 2),
        ("falcon_h1", {"pp": "2"}, 1),
    ],
)
async def test_ranks_with_several_kv_groups(
    family: str, prefill: dict[str, str], decode_ranks: int, demo_model_dir: Path, tmp_path: Path
) -> None:
    """One head of Gemma 4's full attention lies on both tensor ranks. States go to as many tensor ranks."""
    model = save_family(family, tmp_path, demo_model_dir)
    prompts = any_prompts(LENGTHS, SHAPE["vocab_size"])
    known = Asked(prompts, vllm_greedy(model, prompts, TOKENS, tmp_path))
    decode = {"tp": str(decode_ranks), **PATIENT}
    with start_stack(str(model), prefill=[{**prefill, **CHUNKED}], decode=[decode]) as stack:
        await check_answers(stack, known, {("prefill-0", "decode-0")})


@pytest.fixture(scope="module")
def groups(model: Path, known: Asked) -> Iterator[Stack]:
    """One rank and two pipeline ranks hand over to two tensor ranks."""
    with start_stack(
        str(model),
        prefill=[CHUNKED, {"pp": "2", **CHUNKED}],
        decode=[{"tp": "2", **PATIENT}],
        bootstrap={"retry_wait_ms": "240000", "room_attempts": "8"},
    ) as stack:
        yield stack


async def test_one_rank_and_two_pipeline_ranks_hand_over_to_two(groups: Stack, known: Asked) -> None:
    await check_answers(groups, known, {("prefill-0", "decode-0"), ("prefill-1", "decode-0")})


@pytest.mark.parametrize(
    ("rank", "number"),
    [
        pytest.param(0, signal.SIGKILL, id="leader-killed"),
        pytest.param(1, signal.SIGSTOP, id="follower-stopped", marks=pytest.mark.all_models),
    ],
)
def test_streams_go_on_when_a_decode_rank_is(
    groups: Stack, known: Asked, rank: int, number: signal.Signals
) -> None:
    start = groups.idle_gauges()
    service = groups.services["decode-0"]
    before = service.ranks()
    answers = [Answer(f"{number.name}-{rank}-{index}") for index in range(4)]
    name = web().get(f"{groups.url}/v1/models").json()["data"][0]["id"]
    bodies = [greedy(name, prompt, TOKENS) | {"stream": True} for prompt in known.prompts[-4:]]
    threads = [
        threading.Thread(target=answer.read, args=(groups.url, body))
        for answer, body in zip(answers, bodies, strict=True)
    ]
    for thread in threads:
        thread.start()
    for answer in answers:
        answer.wait_ids(DISTURBED_AT)
    groups.forget(service.name)
    before[rank].send(number)
    assert any(len(answer.ids) < TOKENS for answer in answers)
    for thread in threads:
        thread.join(ANSWER_S)
    assert [answer.ids for answer in answers] == list(known.answers[-4:]), groups.tails()
    groups.wait_ready(3)
    assert not {each.pid for each in service.ranks()} & {each.pid for each in before}
    groups.wait_idle(start)


async def check_answers(stack: Stack, known: Asked, pairs: set[tuple[str, str]]) -> None:
    """Check that the answers of all `pairs` of workers are vLLM's, and that nothing is held behind them."""
    start = stack.idle_gauges()
    load = Load(stack, known)
    await load.rounds_until(pairs, rounds_min=1)
    assert load.hung_up > 0
    stack.wait_idle(start)
