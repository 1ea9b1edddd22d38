"""Tests that a kernel which reads pages in place gets the right ones, and is used only if it agrees.

By its twin on a CPU (`paged_twin.py`); the kernels themselves are in `test_cuda.py`.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import attention

from baton.engine.execution import flash_kernels
from baton.engine.execution.attention_span import LayerAttention
from baton.engine.execution.flash_kernels import find_kernel, flash_attention, verified_kernel
from baton.engine.execution.paged_attention import PagedAttention
from baton.engine.execution.paged_rows import PagedKernel, PagedRows
from baton.engine.execution.step_plan import make_plan
from baton.engine.kv_cache import PagedKvCache
from baton.engine.torch_engine import TorchEngine
from baton.engine_interface import Row, Sequence
from baton.pages.layout import full_group
from baton.rooms.request import Request
from tests.engine import tiny_models
from tests.engine.conftest import MakeEngine
from tests.engine.execution.paged_twin import twin
from tests.engine.execution.test_cuda_graphs import Counting
from tests.engine.executions import batched_runner, replaying, with_runner
from tests.engine.test_equals_reference import OUTPUT_TOKENS, random_prompts
from tests.inference.engine_worker import ShuffledWorker
from tests.oracle import reference_greedy

HEADS = 6
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def cache_of(pages: int = 90, page_tokens: int = 16, dtype: str = "bfloat16") -> PagedKvCache:
    return PagedKvCache(full_group(dtype, page_tokens, (0, 1, 2), (0, 1), 16), pages, CPU)


def looking(plain: TorchEngine, kernel: PagedKernel, recorder: Counting | None = None) -> TorchEngine:
    """Return an engine over the same model and pages with the kernel."""
    if recorder is None:
        return with_runner(plain, batched_runner(plain, kernel), kernel)
    return replaying(plain, recorder, 9, kernel)[0]


def told(caplog: pytest.LogCaptureFixture) -> str:
    """Return all log lines with all their fields."""
    return str([vars(each) for each in caplog.records])


@pytest.mark.parametrize("chunk", [1, 7, 64], ids="chunk{}".format)
@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_tokens_are_the_references_while_prompts_and_tokens_share_steps(
    tiny_dir: Callable[[str], Path], tiny_engine: MakeEngine, architecture: str, chunk: int
) -> None:
    kinds: list[tuple[int, int]] = []

    def noting(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: PagedRows,
        attention: LayerAttention,
    ) -> torch.Tensor:
        kinds.append((len(rows.stops), rows.longest))
        return twin(query, keys, values, rows, attention)

    worker = ShuffledWorker(looking(tiny_engine(architecture), noting), seed=chunk)
    outputs = worker.run([worker.admit(prompt, OUTPUT_TOKENS) for prompt in random_prompts()], chunk)
    assert outputs == reference_greedy(tiny_dir(architecture), random_prompts(), OUTPUT_TOKENS)
    # All that decode, and all chunks, are one call each.
    assert max(kinds) == (9, 1)
    assert {longest for _, longest in kinds} >= {1, chunk}


@pytest.mark.parametrize("page_tokens", [1, 5, 64], ids="page{}".format)
def test_page_sizes_do_not_matter(
    tiny_dir: Callable[[str], Path], tiny_engine: MakeEngine, page_tokens: int
) -> None:
    worker = ShuffledWorker(looking(tiny_engine("llama-gqa-untied", page_tokens), twin))
    outputs = worker.run([worker.admit(prompt, OUTPUT_TOKENS) for prompt in random_prompts()], chunk=20)
    assert outputs == reference_greedy(tiny_dir("llama-gqa-untied"), random_prompts(), OUTPUT_TOKENS)


def test_steps_that_are_replayed_look_by_it_too(
    tiny_dir: Callable[[str], Path], tiny_engine: MakeEngine
) -> None:
    recorder = Counting()
    engine = looking(tiny_engine("llama-gqa-untied", 8), twin, recorder)
    engine.warm_up()
    recorder.replays = 0
    worker = ShuffledWorker(engine)
    outputs = worker.run([worker.admit(prompt, OUTPUT_TOKENS) for prompt in random_prompts()], chunk=200)
    assert outputs == reference_greedy(tiny_dir("llama-gqa-untied"), random_prompts(), OUTPUT_TOKENS)
    assert recorder.replays == OUTPUT_TOKENS - 1


def test_the_call_is_one_that_torch_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked on torch's device "meta", which has no values: dtypes and shapes only."""
    nowhere = torch.device("meta")
    cache = PagedKvCache(full_group("bfloat16", 16, (0, 1), (0, 1), 16), 90, nowhere)
    sequences = [Sequence(Request("mine", (0,) * 60, 8), []) for _ in range(4)]
    spans = ((59, 60), (0, 40), (20, 60), (3, 4))
    rows = [Row(each, *span, (range(4),), sample=True) for each, span in zip(sequences, spans, strict=True)]
    plan = make_plan(rows, cache, nowhere, kernel=flash_attention)
    assert [(len(each.stops), each.longest) for each in plan.groups if isinstance(each, PagedRows)] == [
        (2, 1),
        (2, 40),
    ]
    query = torch.empty(82, HEADS, 16, dtype=torch.bfloat16, device=nowhere)
    entries = torch.empty(82, 4, 16, dtype=torch.bfloat16, device=nowhere)
    assert PagedAttention(plan, cache, {}).attend(1, query, entries, LayerAttention(0.25)).shape == (
        82,
        HEADS,
        16,
    )


@pytest.mark.parametrize(("pages", "page_tokens"), [(2000, 16), (90, 16), (40, 256), (3, 8), (1, 1)])
def test_one_that_looks_well_is_used(pages: int, page_tokens: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cache = cache_of(pages, page_tokens)
    assert verified_kernel(twin, HEADS, cache) is twin
    assert not cache.tensor.any()
    assert "keys and values are looked at in their pages" in caplog.text


def misses_the_last(rows: PagedRows) -> PagedRows:
    return replace(rows, stops=(rows.stops - 1).clamp(min=1))


def sees_one_more(rows: PagedRows) -> PagedRows:
    return replace(rows, stops=rows.stops + 1)


def takes_the_next_rows_pages(rows: PagedRows) -> PagedRows:
    return replace(rows, tables=rows.tables.roll(1, 0))


def takes_pages_in_their_order(rows: PagedRows) -> PagedRows:
    return replace(rows, tables=rows.tables.sort(dim=1).values)


@pytest.mark.parametrize(
    "wrong", [misses_the_last, sees_one_more, takes_the_next_rows_pages, takes_pages_in_their_order]
)
def test_one_that_looks_elsewhere_is_not(
    wrong: Callable[[PagedRows], PagedRows],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def looking_elsewhere(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: PagedRows,
        attention: LayerAttention,
    ) -> torch.Tensor:
        return twin(query, keys, values, wrong(rows), attention)

    assert verified_kernel(looking_elsewhere, HEADS, cache_of()) is None
    (said,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert said.getMessage() == "keys and values are fetched from their pages"


@pytest.mark.parametrize("answer", ["nan", "nothing", "raises"])
def test_one_that_gives_no_numbers_is_not(answer: str, caplog: pytest.LogCaptureFixture) -> None:
    def failing(
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: PagedRows,
        attention: LayerAttention,
    ) -> torch.Tensor:
        if answer == "raises":
            raise AssertionError("page size must be 128")
        return torch.full_like(query, float("nan") if answer == "nan" else 0.0)

    assert verified_kernel(failing, HEADS, cache_of()) is None
    assert ("page size must be 128" in told(caplog)) == (answer == "raises")


@pytest.mark.parametrize(
    ("capability", "dtype", "why"),
    [
        ((9, 0), "float32", "kernels that read pages compute in bfloat16, not in float32"),
        ((8, 0), "bfloat16", "GPUs of compute capability 8.0 have no kernel that reads them"),
        ((9, 0), "bfloat16", "ModuleNotFoundError: No module named 'flash_attn_interface'"),
        ((10, 0), "bfloat16", "ModuleNotFoundError: No module named 'flash_attn'"),
    ],
)
def test_where_there_is_none_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int],
    dtype: str,
    why: str,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert find_kernel(GPU, dtype) is None
    assert why in told(caplog)
    assert attention.current_flash_attention_impl() is None


def test_the_kernels_for_this_gpu_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    monkeypatch.setattr(flash_kernels, "activate_flash_attention_impl", taken.append)
    for major in (9, 10):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, major=major: (major, 0))
        assert find_kernel(GPU, "bfloat16") is flash_attention
    assert taken == ["FA3", "FA4"]
