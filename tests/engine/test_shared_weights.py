"""Tests that two engines over one set of weights compute what each would alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.engine.loading.engine_loading import load_engine, load_second_engine
from baton.engine.torch_engine import TorchEngine
from tests.engine.execution.compiled_kernels import Directory, load
from tests.engine.executions import is_compiled
from tests.inference.engine_worker import ShuffledWorker, hand_over
from tests.oracle import reference_greedy

PROMPTS = [tuple(range(3, 3 + length)) for length in (5, 17, 40)]
TOKENS = 9
CHUNK = 11


@pytest.mark.parametrize("compiled", [False, True])
def test_their_pages_are_their_own_and_their_answers_the_references(
    directory: Directory, *, compiled: bool
) -> None:
    """A step of each in turn. What one has computed goes on by the other, as after a hand-over."""
    model = directory("one query a head, biased")
    engine = load(model, dtype=torch.float32, compiled=compiled)
    assert is_compiled(engine) is compiled
    other = load_second_engine(engine, 2**21)
    assert other.model is engine.model
    wanted = reference_greedy(model, PROMPTS, TOKENS)
    decode, prefill = both = ShuffledWorker(engine, 1), ShuffledWorker(other, 2)
    tenants = [[each.admit(prompt, TOKENS) for prompt in PROMPTS] for each in both]
    while not all(tenant.done for held in tenants for tenant in held):
        for each, held in zip(both, tenants, strict=True):
            each.step(held, CHUNK)
    assert [[tenant.sequence.output for tenant in held] for held in tenants] == [wanted, wanted]
    computed = [prefill.admit(prompt, TOKENS) for prompt in PROMPTS]
    while not all(tenant.sequence.output for tenant in computed):
        prefill.step([tenant for tenant in computed if not tenant.sequence.output], CHUNK)
    taken = [hand_over(tenant, prefill, decode) for tenant in computed]
    assert decode.run(taken, CHUNK) == wanted


def test_the_second_ones_memory_is_bounded_by_what_it_is_given(tiny_dir: Callable[[str], Path]) -> None:
    engine = load_engine(tiny_dir("llama-gqa-untied"), device="cpu", kv_cache_memory=2**22, threads=1)
    other: TorchEngine = load_second_engine(engine, 2**21)
    assert 2**20 < other.cache.length <= 2**21
    assert other.layout == engine.layout
