"""Tests that each choice of a prompt draws what a request of its own would, in every execution.

A choice begins with a row of up to a page of tokens behind pages that it shares, beside rows of all kinds.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.engine.execution.execution_kind import ExecutionKind
from baton.engine.loading.engine_loading import load_engine
from baton.engine.torch_engine import TorchEngine
from baton.rooms.request import Sampling
from tests.engine.conftest import MakeEngine
from tests.engine.execution.compiled_kernels import Directory, load, needs_kernel
from tests.engine.execution.test_row_by_row import bloom
from tests.engine.ranks import rank_scenarios
from tests.engine.test_equals_reference import random_prompts

LENGTHS = (1, 15, 16, 17, 48, 100)
"""Ends of pages among them, and more than a window."""
SEEDS = (11, 12, 13)
WINDOWED = "three queries a head"


KINDS = {
    "compiled": ExecutionKind.COMPILED,
    "row by row": ExecutionKind.ROW_BY_ROW,
    "latents": ExecutionKind.LIBRARY,
}


@pytest.fixture(params=["calls", "calls, a window", "latents", "compiled", "row by row"])
def engine(
    request: pytest.FixtureRequest, tiny_engine: MakeEngine, directory: Directory, tmp_path: Path
) -> TorchEngine:
    ways: dict[str, Callable[[], TorchEngine]] = {
        "calls": lambda: tiny_engine("llama-gqa-untied"),
        "latents": lambda: tiny_engine("deepseek-v3-latents"),
        "calls, a window": lambda: load(directory(WINDOWED), dtype=torch.float32, compiled=False),
        "compiled": lambda: load(directory(WINDOWED), dtype=torch.float32),
        "row by row": lambda: load_engine(
            bloom(tmp_path / "bloom"), dtype="float32", device="cpu", kv_cache_memory=2**23, threads=1
        ),
    }
    made = ways[request.param]()
    assert made.execution.kind == KINDS.get(request.param, ExecutionKind.FUSED)
    return made


@needs_kernel
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.9, top_k=50, repetition_penalty=1.3, presence_penalty=0.5),
    ],
    ids=["drawn", "with penalties"],
)
def test_own_draws_each_choice_is_drawn_as_a_request_of_its_own(
    engine: TorchEngine, sampling: Sampling
) -> None:
    prompts = random_prompts(LENGTHS)
    told = rank_scenarios.forked(engine, prompts, sampling, SEEDS, 12)
    assert told == rank_scenarios.one_by_one(engine, prompts, sampling, SEEDS, 12)
    assert all(len({*map(tuple, choices)}) == len(SEEDS) for choices in told)


@needs_kernel
def test_choices_that_take_the_likeliest_are_all_the_same(engine: TorchEngine) -> None:
    prompts = random_prompts(LENGTHS)
    told = rank_scenarios.forked(engine, prompts, Sampling(temperature=0.0), SEEDS, 12)
    assert told == rank_scenarios.one_by_one(engine, prompts, Sampling(temperature=0.0), SEEDS, 12)
    assert all(len({*map(tuple, choices)}) == 1 for choices in told)
