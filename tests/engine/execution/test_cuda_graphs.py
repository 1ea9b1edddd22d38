"""Tests that replayed steps are the same as steps computed call by call.

On a CPU, where replaying is calling again (`Calling`); the GPU's own recorder is in `test_cuda.py`.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.decode.settings import DecodeSettings
from baton.engine.execution import cuda_graphs
from baton.engine.execution.batched_runner import BatchedRunner
from baton.engine.execution.cuda_graphs import BatchShape, GraphRunner, Replay, sizes
from baton.engine.execution.flash_kernels import flash_attention
from baton.engine.execution.fused_decoder import FusedDecoder, RmsNorm
from baton.engine.execution.model_structure import find_structure
from baton.engine.execution.paged_attention import PagedAttention
from baton.engine.execution.paged_rows import PagedKernel
from baton.engine.execution.step_plan import AttentionMetadata, plan_of_singles
from baton.engine.kv_cache import PagedKvCache
from baton.engine.loading.engine_loading import load_engine, make_runner
from baton.engine.torch_engine import TorchEngine
from baton.engine_interface import Row
from baton.pages.layout import full_group
from tests.engine import tiny_models
from tests.engine.executions import replaying
from tests.engine.test_equals_reference import OUTPUT_TOKENS, random_prompts
from tests.inference.engine_worker import GREEDY, ShuffledWorker, Tenant
from tests.oracle import reference_greedy
from tests.support.calling import Calling

Directory = Callable[[str], Path]
ROWS_MAX = 6
LENGTHS = (1, 40, 5, 130, 23)


class Counting(Calling):
    """Recorder that counts replays. It fails after `most` recordings, as a capture does."""

    def __init__(self, most: int = 1000) -> None:
        self.replays = 0
        self.recorded = 0
        self._most = most

    def record(self, work: Callable[[], object]) -> Replay:
        if self.recorded == self._most:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.recorded += 1
        again = super().record(work)

        def replay() -> None:
            self.replays += 1
            again()

        return replay


class Forgetful(Counting):
    """Recorder whose third recording does nothing when it is replayed."""

    def record(self, work: Callable[[], object]) -> Replay:
        replay = super().record(work)
        return replay if self.recorded != 3 else lambda: None


def held_on_to(packed: torch.Tensor, rows: int, cache: PagedKvCache, kernel: None) -> AttentionMetadata:
    """Return the plan of the first call, as a graph would if the calls depended on contents."""
    return _plans.setdefault((rows, len(packed)), plan_of_singles(packed.clone(), rows, cache))


_plans: dict[tuple[int, int], AttentionMetadata] = {}


def engine_on(
    directory: Path, recorder: Counting, rows_max: int = ROWS_MAX, memory: int = 2**22, dtype: str = "float32"
) -> tuple[TorchEngine, GraphRunner]:
    """Return an engine after its warm-up, with its runner."""
    plain = load_engine(directory, dtype=dtype, device="cpu", page_tokens=8, kv_cache_memory=memory)
    engine, steps = replaying(plain, recorder, rows_max)
    engine.warm_up()
    recorder.replays = 0
    return engine, steps


def decode(worker: ShuffledWorker, tenants: list[Tenant]) -> None:
    """Draw the next token of each sequence, in one step."""
    worker.step(tenants, chunk=1)


@pytest.mark.parametrize("architecture", ["llama-gqa-untied", "qwen3-query-key-norm", "qwen2-biased"])
def test_tokens_are_the_references_while_rows_of_all_lengths_come_and_go(
    tiny_dir: Directory, architecture: str
) -> None:
    recorder = Counting()
    engine, _ = engine_on(tiny_dir(architecture), recorder)
    worker = ShuffledWorker(engine)
    prompts = random_prompts(LENGTHS)
    tenants = [worker.admit(prompt, OUTPUT_TOKENS) for prompt in prompts]
    for joined in range(1, len(tenants) + 1):
        worker.step(tenants[joined - 1 : joined], chunk=200)
        decode(worker, tenants[:joined])
        decode(worker, tenants[:joined][::-1])
    while not all(tenant.done for tenant in tenants):
        decode(worker, tenants)
    outputs = [tenant.sequence.output for tenant in tenants]
    assert outputs == reference_greedy(tiny_dir(architecture), prompts, OUTPUT_TOKENS)
    assert recorder.replays >= 2 * len(tenants)


def test_in_bfloat16_what_is_replayed_is_what_is_computed(tiny_dir: Directory) -> None:
    directory = tiny_dir("llama-gqa-untied")
    outputs = []
    for most, replayed in ((1000, True), (0, False)):
        recorder = Counting(most)
        engine, _ = engine_on(directory, recorder, dtype="bfloat16")
        worker = ShuffledWorker(engine)
        (prompt,) = random_prompts((30,))
        outputs.append(worker.run([worker.admit(prompt, OUTPUT_TOKENS)], chunk=30))
        assert (recorder.replays > 0) is replayed
    assert outputs[0] == outputs[1]


def test_the_shapes_are_bounded_in_rows_pages_and_tokens(
    tiny_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (sizes(1, 6), sizes(8, 64), sizes(8, 5)) == ([1, 2, 4, 6], [8, 16, 32, 64], [5])
    monkeypatch.setattr(cuda_graphs, "TOKENS_MAX", 6 * 16 * 8)
    recorder = Counting()
    _, steps = engine_on(tiny_dir("llama-gqa-untied"), recorder)
    assert set(steps.shapes) == {
        *(BatchShape(rows, pages) for rows in (1, 2, 4, 6) for pages in (8, 16)),
        *(BatchShape(rows, 32) for rows in (1, 2)),
        BatchShape(1, 64),
    }
    sizes_of = [rows * pages for rows, pages in steps.shapes]
    assert sizes_of == sorted(sizes_of)
    assert recorder.recorded == len(steps.shapes)


def test_a_step_writes_where_its_rows_do_and_nowhere_else_however_it_is_padded(tiny_dir: Directory) -> None:
    """Five rows are padded to six. The sixth writes what the fifth does."""
    recorder = Counting()
    engine, _ = engine_on(tiny_dir("llama-gqa-untied"), recorder)
    worker = ShuffledWorker(engine)
    tenants = [worker.admit(prompt, OUTPUT_TOKENS) for prompt in random_prompts(LENGTHS)]
    worker.step(tenants, chunk=200)
    decode(worker, tenants)
    written = set()
    for tenant in tenants:
        worker.grow(tenant, tenant.computed + 1)
        written.add((tenant.pages[tenant.computed // 8], tenant.computed % 8))
    rows = [
        Row(each.sequence, each.computed, each.computed + 1, (each.pages,), sample=True) for each in tenants
    ]
    for row in rows:
        engine.clear_tail(row)
    before = engine.cache.tensor.clone()
    recorder.replays = 0
    engine.step(rows)
    assert recorder.replays == 1
    same = (engine.cache.tensor == before) | (engine.cache.tensor.isnan() & before.isnan())
    changed = (~same).permute(0, 4, 1, 2, 3, 5).flatten(2).any(dim=2).nonzero().tolist()
    assert {(page, place) for page, place in changed} == written


def test_answers_are_those_of_the_rows_that_sample_in_their_order(tiny_dir: Directory) -> None:
    recorder = Counting()
    engine, _ = engine_on(tiny_dir("llama-gqa-untied"), recorder)
    worker = ShuffledWorker(engine)
    tenants = [worker.admit(prompt, OUTPUT_TOKENS) for prompt in random_prompts((9, 30, 3))]
    worker.step(tenants, chunk=200)
    rows = []
    for tenant in tenants:
        worker.grow(tenant, tenant.computed + 1)
        rows.append(
            Row(
                tenant.sequence,
                tenant.computed,
                tenant.computed + 1,
                (tenant.pages,),
                tenant is not tenants[1],
            )
        )
    together = engine.step(rows)
    assert recorder.replays == 1
    assert together[1] == ()
    assert [together[0], together[2]] == [engine.step([row])[0] for row in (rows[0], rows[2])]


def test_steps_beyond_what_is_recorded_are_computed_call_by_call(tiny_dir: Directory) -> None:
    directory = tiny_dir("llama-gqa-untied")
    recorder = Counting()
    engine, _ = engine_on(directory, recorder, rows_max=2)
    worker = ShuffledWorker(engine)
    prompts = random_prompts((9, 30, 3))
    tenants = [worker.admit(prompt, OUTPUT_TOKENS) for prompt in prompts]
    worker.step(tenants[:2], chunk=200)
    worker.step(tenants, chunk=200)  # two tokens and a prompt
    decode(worker, tenants)  # three rows
    assert recorder.replays == 0
    decode(worker, tenants[:2])
    assert recorder.replays == 1
    outputs = worker.run(tenants, chunk=200)
    assert outputs == reference_greedy(directory, prompts, OUTPUT_TOKENS)


def test_a_longer_row_than_any_shape_has_pages_for_is_computed_call_by_call(
    tiny_dir: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "TOKENS_MAX", 8 * 8)
    directory = tiny_dir("llama-gqa-untied")
    recorder = Counting()
    engine, steps = engine_on(directory, recorder)
    assert steps.shapes == [BatchShape(1, 8)]
    worker = ShuffledWorker(engine)
    prompts = random_prompts((60,))
    tenants = [worker.admit(prompt, OUTPUT_TOKENS) for prompt in prompts]
    outputs = worker.run(tenants, chunk=200)
    assert outputs == reference_greedy(directory, prompts, OUTPUT_TOKENS)
    assert recorder.replays == 8 * 8 - 60


def test_a_capture_that_fails_is_told_once_and_those_before_it_stay(
    tiny_dir: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tiny_dir("llama-gqa-untied")
    recorder = Counting(most=2)
    engine, steps = engine_on(directory, recorder)
    (said,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert said.getMessage() == "decode steps are not replayed from this shape on"
    assert steps.shapes[:2] == [BatchShape(1, 8), BatchShape(1, 16)]
    worker = ShuffledWorker(engine)
    prompts = random_prompts(LENGTHS)
    tenants = [worker.admit(prompt, OUTPUT_TOKENS) for prompt in prompts]
    worker.step(tenants, chunk=200)
    decode(worker, tenants)
    assert recorder.replays == 0
    decode(worker, tenants[:1])
    assert recorder.replays == 1
    assert worker.run(tenants, chunk=200) == reference_greedy(directory, prompts, OUTPUT_TOKENS)


@pytest.mark.parametrize("wrong", [Forgetful, held_on_to], ids=lambda each: each.__name__)
def test_a_replay_that_gives_something_else_ends_all_replaying_and_the_log_says_so(
    tiny_dir: Directory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wrong: Any
) -> None:
    directory = tiny_dir("llama-gqa-untied")
    recorder = Forgetful() if wrong is Forgetful else Counting()
    if wrong is held_on_to:
        _plans.clear()
        monkeypatch.setattr(cuda_graphs, "plan_of_singles", held_on_to)
    engine, _ = engine_on(directory, recorder)
    (said,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert said.getMessage() == "no decode step is replayed: replays are not the same"
    worker = ShuffledWorker(engine)
    prompts = random_prompts((9,))
    outputs = worker.run([worker.admit(prompt, OUTPUT_TOKENS) for prompt in prompts], chunk=200)
    assert outputs == reference_greedy(directory, prompts, OUTPUT_TOKENS)
    assert recorder.replays == 0


def test_a_cache_of_fewer_pages_than_rows_still_records(tiny_dir: Directory) -> None:
    directory = tiny_dir("llama-gqa-untied")
    recorder = Counting()
    engine, steps = engine_on(directory, recorder, memory=3 * 6144)
    assert engine.cache.pages < ROWS_MAX
    assert recorder.recorded == len(steps.shapes) > 0
    worker = ShuffledWorker(engine)
    prompts = random_prompts((9,))
    outputs = worker.run([worker.admit(prompt, 8, GREEDY) for prompt in prompts], chunk=200)
    assert outputs == reference_greedy(directory, prompts, 8)


def looking(self: RmsNorm, rows: torch.Tensor) -> torch.Tensor:
    return rows * 2 if rows.amax() > 1 else rows


@pytest.mark.parametrize("kernel", [None, flash_attention], ids=["fetched", "in-pages"])
@pytest.mark.parametrize("architecture", ["llama-gqa-untied", "qwen3-query-key-norm", "qwen2-biased"])
def test_the_calls_of_a_recorded_step_look_at_no_value_and_stay_on_the_device(
    monkeypatch: pytest.MonkeyPatch, architecture: str, kernel: PagedKernel | None
) -> None:
    """A CUDA graph capture does not allow either. Tensors on torch's device "meta" have no values and stand
    in for a GPU's."""
    nowhere = torch.device("meta")
    shape = tiny_models.SHAPE
    group = full_group(
        dtype="bfloat16",
        page_tokens=8,
        layers=tuple(range(shape["num_hidden_layers"])),
        heads=tuple(range(shape["num_key_value_heads"])),
        head_dim=shape["head_dim"],
    )
    with torch.inference_mode():
        config = tiny_models.ARCHITECTURES[architecture]
        module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(nowhere)
        decoder = FusedDecoder(find_structure(module, shape["head_dim"], ()), shape["head_dim"])
        cache = PagedKvCache(group, 64, nowhere)
        packed = torch.zeros(5 * (3 + 8), dtype=torch.int64, device=nowhere)

        def compute() -> torch.Tensor:
            plan = plan_of_singles(packed, 5, cache, kernel)
            return decoder.logits(plan.tokens, plan.positions, plan.keep, PagedAttention(plan, cache, {}))

        assert compute().shape == (5, tiny_models.VOCABULARY)
        monkeypatch.setattr(RmsNorm, "__call__", looking)
        with pytest.raises(RuntimeError, match="meta"):
            compute()


def test_nothing_is_recorded_on_a_cpu_and_no_more_rows_than_a_worker_runs(tiny_dir: Directory) -> None:
    engine = load_engine(tiny_dir("llama-gqa-untied"), dtype="float32", device="cpu", kv_cache_memory=2**20)
    assert isinstance(make_runner(engine.model, engine.execution, engine.cache, 8), BatchedRunner)
    assert DecodeSettings(cuda_graphs=64, max_running=24).replayed_rows == 24
    assert DecodeSettings(cuda_graphs=0).replayed_rows == 0
