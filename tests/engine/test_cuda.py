"""Does a GPU compute and draw what the CPU does? Float32, without its reduced-precision products."""

from collections.abc import Callable
from pathlib import Path

import pytest

from services.rooms.request import Sampling
from tests.engine import tiny
from tests.engine.conftest import MakeEngine
from tests.engine.test_equals_reference import OUTPUT_TOKENS, random_prompts
from tests.engine.worker import Worker, hand_over
from tests.oracle import reference_greedy

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_greedy_equals_the_reference(
    tiny_dir: Callable[[str], Path], tiny_engine: MakeEngine, architecture: str
) -> None:
    worker = Worker(tiny_engine(architecture, device="cuda"))
    tenants = [worker.admit(prompt, OUTPUT_TOKENS) for prompt in random_prompts()]
    outputs = worker.run(tenants, chunk=20)
    assert outputs == reference_greedy(tiny_dir(architecture), random_prompts(), OUTPUT_TOKENS)


def test_cpu_and_gpu_draw_the_same_tokens(tiny_engine: MakeEngine) -> None:
    sampling = Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, frequency_penalty=0.3, seed=5)
    outputs = []
    for device in ("cpu", "cuda"):
        worker = Worker(tiny_engine("llama-gqa-untied", device=device))
        outputs.append(
            worker.run([worker.admit(prompt, OUTPUT_TOKENS, sampling) for prompt in random_prompts()], 64)
        )
    assert outputs[0] == outputs[1]


def test_pages_filled_on_the_gpu_continue_on_the_cpu(
    tiny_dir: Callable[[str], Path], tiny_engine: MakeEngine
) -> None:
    prefill, decode = (
        Worker(tiny_engine("llama-gqa-untied", device="cuda")),
        Worker(tiny_engine("llama-gqa-untied")),
    )
    arrived = []
    for prompt in random_prompts():
        tenant = prefill.admit(prompt, OUTPUT_TOKENS)
        while not tenant.sequence.output:
            prefill.step([tenant], chunk=10)
        arrived.append(hand_over(tenant, prefill, decode))
    expected = reference_greedy(tiny_dir("llama-gqa-untied"), random_prompts(), OUTPUT_TOKENS)
    assert decode.run(arrived, chunk=1) == expected
