"""Is a model of every type in the table `generate`'s, token for token, however the work is cut up?"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from services.engine.engine import Engine, load_engine
from services.engine.kv_cache import PagedKvCache
from services.engine.sight import Reach
from services.engine.team import alone
from tests.engine import tiny
from tests.engine.matrix.table import ALL, CHUNK, OWN, TYPES
from tests.engine.paged_twin import twin
from tests.engine.test_equals_reference import random_prompts
from tests.engine.worker import Tenant, Worker, hand_over
from tests.oracle import reference_greedy

LENGTHS = (5, 70, 300)
OUTPUT_TOKENS = 8
LONG, SHORT = 512, 40
"""Chunks."""
Loaded = Callable[[str], tuple[Path, Engine]]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    root = tmp_path_factory.mktemp("matrix")

    @cache
    def load(name: str) -> tuple[Path, Engine]:
        directory = tiny.save(TYPES[name].make(), root / name.replace(" ", "-"))
        engine = load_engine(
            directory, dtype="float32", device="cpu", kv_cache_memory=2**24, threads=1, batch_memory=2**21
        )
        return directory, engine

    return load


def beside(engine: Engine, *, by_kernel: bool = False) -> Engine:
    """The same model over other pages, of which nothing is kept for the next step."""
    cache_ = PagedKvCache(engine.layout, engine.cache.pages, engine.model.device)
    return Engine(engine.model, engine.whole, cache_, alone(), 0, None, kernel=twin if by_kernel else None)


def admitted(worker: Worker, prompts: list[list[int]]) -> list[Tenant]:
    return [worker.admit(prompt, OUTPUT_TOKENS) for prompt in prompts]


def told(reach: Reach | None) -> str:
    return ALL if reach is None else f"{'chunk' if reach.in_chunks else 'window'} {reach.tokens}"


@pytest.mark.parametrize("name", TYPES)
def test_each_layer_is_seen_to_look_as_it_is_released(loaded: Loaded, name: str) -> None:
    entry, (_, engine) = TYPES[name], loaded(name)
    sights = [engine.model.sights[layer] for layer in engine.layout.layers]
    assert tuple(told(sight.reach) for sight in sights) == entry.sees
    assert {sight.cap is not None for sight in sights} == {"cap" in entry.on}
    assert {sight.sinks is not None for sight in sights} == {"sinks" in entry.on}
    assert engine.model.taken_apart is (entry.way == OWN)


@pytest.mark.parametrize("name", TYPES)
def test_tokens_are_those_of_generate(loaded: Loaded, name: str) -> None:
    """Alone and together, in long and short chunks, after a hand-over, and behind another's prefix."""
    directory, engine = loaded(name)
    prompts = random_prompts(LENGTHS)
    expected = reference_greedy(directory, prompts, OUTPUT_TOKENS)

    for chunk in (LONG, SHORT):
        worker = Worker(engine, seed=chunk)
        assert worker.run(admitted(worker, prompts), chunk) == expected

    prefill, decode = Worker(engine, seed=1), Worker(beside(engine), seed=2)
    arrived = []
    for prompt in prompts:
        (tenant,) = admitted(prefill, [prompt])
        while not tenant.sequence.output:
            prefill.step([tenant], SHORT)
        arrived.append(hand_over(tenant, prefill, decode))
        assert prefill.run([tenant], 1) == [expected[len(arrived) - 1]]
        (again,) = admitted(prefill, [prompt])
        again.computed = len(prompt) // 2 // 16 * 16
        again.pages = tenant.pages[: again.computed // 16]
        assert prefill.run([again], SHORT) == [expected[len(arrived) - 1]]
    assert decode.run(arrived, 1) == expected


@pytest.mark.parametrize(
    "name", [name for name, each in TYPES.items() if "cap" not in each.on and CHUNK not in each.sees]
)
def test_tokens_are_the_same_where_a_kernel_looks_at_pages_as_they_lie(loaded: Loaded, name: str) -> None:
    """None looks at chunks, or bounds scores."""
    directory, engine = loaded(name)
    prompts = random_prompts(LENGTHS)
    worker = Worker(beside(engine, by_kernel=True))
    assert worker.run(admitted(worker, prompts), SHORT) == reference_greedy(directory, prompts, OUTPUT_TOKENS)
