"""Tests that a GPU computes and draws what the CPU does, in float32 without reduced-precision products."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.engine.execution.agreement import TOLERANCES, relative_difference
from baton.engine.execution.cuda_graphs import CudaGraphRecorder
from baton.engine.loading.engine_loading import load_engine
from baton.engine.torch_engine import TorchEngine
from baton.engine_interface import PageSum, PageSumRequest, Row
from baton.inference.remote_writes import flush_for
from baton.rooms.request import Sampling
from tests.engine import tiny_models
from tests.engine.conftest import MakeEngine
from tests.engine.executions import batched_runner, graph_runner
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
        engine.sum_pages([PageSumRequest(each, ([5, 1, 7],), 39)])
    assert sums[0].total == sums[1].total


def replaying(directory: Path, dtype: str = "float32", rows_max: int = 6) -> TorchEngine:
    """Return an engine after its warm-up, with every shape captured and verified."""
    engine = load_engine(
        directory, dtype=dtype, device="cuda", kv_cache_memory=4 * 2**20, cuda_graphs=rows_max
    )
    engine.warm_up()
    assert graph_runner(engine).recorded == frozenset(graph_runner(engine).shapes)
    return engine


@pytest.mark.parametrize("architecture", ["llama-gqa-untied", "qwen3-query-key-norm", "qwen2-biased"])
def test_replayed_steps_give_the_references_tokens_while_rows_come_and_go(
    tiny_dir: Callable[[str], Path], architecture: str
) -> None:
    engine = replaying(tiny_dir(architecture))
    worker = ShuffledWorker(engine)
    prompts = random_prompts((1, 40, 5, 130, 23))
    tenants = [worker.admit(prompt, OUTPUT_TOKENS) for prompt in prompts]
    for joined in range(1, len(tenants) + 1):
        worker.step(tenants[joined - 1 : joined], chunk=200)
        worker.step(tenants[:joined][::-1], chunk=1)
    outputs = worker.run(tenants, chunk=1)
    assert outputs == reference_greedy(tiny_dir(architecture), prompts, OUTPUT_TOKENS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_replayed_steps_logits_are_those_of_the_calls(tiny_dir: Callable[[str], Path], dtype: str) -> None:
    """Five rows are padded to six, in shuffled pages. The same step runs by replay and by separate calls."""
    engine = replaying(tiny_dir("llama-gqa-untied"), dtype)
    worker = ShuffledWorker(engine)
    tenants = [worker.admit(prompt, OUTPUT_TOKENS) for prompt in random_prompts((1, 40, 5, 130, 23))]
    worker.step(tenants, chunk=200)
    rows = []
    for tenant in tenants:
        worker.grow(tenant, tenant.computed + 1)
        rows.append(Row(tenant.sequence, tenant.computed, tenant.computed + 1, (tenant.pages,), sample=True))
        engine.clear_tail(rows[-1])
    with torch.inference_mode():
        replayed = graph_runner(engine).replay(rows)
        called = batched_runner(engine).logits(rows)
    assert replayed is not None
    assert called is not None
    assert relative_difference(replayed.float(), called.float()) < TOLERANCES[dtype]


def test_what_is_captured_is_done_again_with_what_its_tensors_hold_by_then() -> None:
    device = torch.device("cuda", 0)
    number, doubled = torch.zeros(1, device=device), torch.zeros(1, device=device)
    replay = CudaGraphRecorder(device).record(lambda: doubled.copy_(number))
    for expected in (3.0, 5.0):
        number.fill_(expected)
        replay()
        assert doubled.item() == expected


def test_a_capture_that_fails_leaves_the_stream_as_it_was_and_computing_goes_on() -> None:
    """The capture fails since it waits for the GPU, which no capture allows."""
    device = torch.device("cuda", 0)
    number = torch.zeros(1, device=device)
    before = torch.cuda.current_stream(device)
    with pytest.raises(RuntimeError):
        CudaGraphRecorder(device).record(lambda: number.fill_(number.item()))
    assert torch.cuda.current_stream(device) == before
    assert number.add_(1).item() == 1


def test_writes_of_others_are_flushed_or_need_not_be() -> None:
    flush = flush_for(torch.device("cuda", 0))
    if flush is not None:
        flush()


@pytest.fixture
def in_pages(tiny_dir: Callable[[str], Path]) -> TorchEngine:
    """Return an engine that attends to pages in place and replays decode steps, after its warm-up."""
    kernels = {9: "flash_attn_interface", 10: "flash_attn.cute"}
    major, _ = torch.cuda.get_device_capability()
    pytest.importorskip(kernels.get(major, "a GPU of another kind"), reason="no FlashAttention for this GPU")
    engine = load_engine(
        tiny_dir("llama-gqa-untied"),
        dtype="bfloat16",
        device="cuda",
        kv_cache_memory=4 * 2**20,
        cuda_graphs=6,
        flash_attention=True,
    )
    engine.warm_up()
    assert engine.kernel is not None
    assert graph_runner(engine).recorded == frozenset(graph_runner(engine).shapes)
    return engine


def test_what_is_looked_at_in_its_pages_gives_what_is_fetched_from_them(in_pages: TorchEngine) -> None:
    """Both paths compute the same rows: whole prompts, chunks of them, single tokens, and replayed tokens."""
    worker = ShuffledWorker(in_pages)
    tenants = [worker.admit(prompt, OUTPUT_TOKENS) for prompt in random_prompts((1, 40, 5, 130, 23))]
    worker.step(tenants[1:4], chunk=30)
    for spans in ((0, 1, 2, 3, 4), (1, 3, 4), (0, 1, 2, 3, 4)):
        rows = []
        for tenant in (tenants[place] for place in spans):
            stop = min(tenant.computed + 40, tenant.sequence.length)
            worker.grow(tenant, stop)
            rows.append(Row(tenant.sequence, tenant.computed, stop, (tenant.pages,), sample=True))
            in_pages.clear_tail(rows[-1])
        with torch.inference_mode():
            logits = [batched_runner(in_pages, each).logits(rows) for each in (None, in_pages.kernel)]
        fetched, looked = logits
        assert fetched is not None
        assert looked is not None
        assert relative_difference(looked.float(), fetched.float()) < TOLERANCES["bfloat16"]
        worker.step([tenants[place] for place in spans], chunk=40)
    assert all(tenant.sequence.output for tenant in tenants)
    assert worker.run(tenants, chunk=40)
