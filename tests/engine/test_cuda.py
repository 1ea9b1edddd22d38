"""Tests that a GPU computes and draws what the CPU does, in float32 without reduced-precision products."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.engine_interface import PageSum, PageSumRequest
from baton.inference.remote_writes import flush_for
from baton.rooms.request import Sampling
from tests.engine import tiny_models
from tests.engine.conftest import MakeEngine
from tests.engine.test_equals_reference import OUTPUT_TOKENS, random_prompts
from tests.inference.engine_worker import ShuffledWorker, hand_over, memory_of
from tests.oracle import reference_greedy

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_greedy_equals_the_reference(
    tiny_dir: Callable[[str], Path], tiny_engine: MakeEngine, architecture: str
) -> None:
    worker = ShuffledWorker(tiny_engine(architecture, device="cuda"))
    tenants = [worker.admit(prompt, OUTPUT_TOKENS) for prompt in random_prompts()]
    outputs = worker.run(tenants, chunk=20)
    assert outputs == reference_greedy(tiny_dir(architecture), random_prompts(), OUTPUT_TOKENS)


def test_cpu_and_gpu_draw_the_same_tokens(tiny_engine: MakeEngine) -> None:
    sampling = Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, frequency_penalty=0.3, seed=5)
    outputs = []
    for device in ("cpu", "cuda"):
        worker = ShuffledWorker(tiny_engine("llama-gqa-untied", device=device))
        outputs.append(
            worker.run([worker.admit(prompt, OUTPUT_TOKENS, sampling) for prompt in random_prompts()], 64)
        )
    assert outputs[0] == outputs[1]


def test_pages_filled_on_the_gpu_continue_on_the_cpu(
    tiny_dir: Callable[[str], Path], tiny_engine: MakeEngine
) -> None:
    prefill, decode = (
        ShuffledWorker(tiny_engine("llama-gqa-untied", device="cuda")),
        ShuffledWorker(tiny_engine("llama-gqa-untied")),
    )
    arrived = []
    for prompt in random_prompts():
        tenant = prefill.admit(prompt, OUTPUT_TOKENS)
        while not tenant.sequence.output:
            prefill.step([tenant], chunk=10)
        arrived.append(hand_over(tenant, prefill, decode))
    expected = reference_greedy(tiny_dir("llama-gqa-untied"), random_prompts(), OUTPUT_TOKENS)
    assert decode.run(arrived, chunk=1) == expected


def test_pages_sum_up_to_the_same_on_the_gpu_and_on_the_cpu(tiny_engine: MakeEngine) -> None:
    engines = [tiny_engine("llama-gqa-untied", device=device) for device in ("cpu", "cuda")]
    memories = [memory_of(engine) for engine in engines]
    memories[0].copy_(torch.randint(0, 256, memories[0].shape, dtype=torch.uint8))
    memories[1].copy_(memories[0])
    sums = [PageSum(3), PageSum(3)]
    for engine, each in zip(engines, sums, strict=True):
        engine.sum_pages([PageSumRequest(each, ([5, 1, 7],), 39, ends=True)])
    assert sums[0].total == sums[1].total


def test_writes_of_others_are_flushed_or_need_not_be() -> None:
    flush = flush_for(torch.device("cuda", 0))
    if flush is not None:
        flush()
