"""Part of the kit that compares the engine's output on this device with the reference library's on a CPU.

In float32 every token; in bfloat16 with the rule of `tests/process/test_bf16.py`: where two outputs first
part, the two tokens are tied. By calls, by replays of recorded steps and by a kernel that looks at pages
where they lie, on random models of every anatomy that the CPU's tests use. On a CPU, where the kit itself is
tried, replaying is calling and the kernel is its twin, and there are fewer models.
"""

import gc
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Final

from baton.engine.execution.cuda_graphs import GraphRunner
from baton.engine.loading.engine_loading import load_engine
from baton.engine.torch_engine import TorchEngine
from baton.inference.runner import Runner
from tests.engine import tiny_models
from tests.engine.execution.paged_twin import twin
from tests.engine.executions import batched_runner, is_ours, replaying
from tests.engine.test_equals_reference import random_prompts
from tests.gpu.findings import Finding
from tests.gpu.kit import Kit
from tests.gpu.models import anatomies, has_experts
from tests.inference.engine_worker import ShuffledWorker
from tests.oracle import first_divergence, reference_greedy
from tests.support.calling import Calling

ROWS: Final = 4
"""Rows of the largest recorded step. As many prompts are computed together."""
LENGTHS: Final = (1, 7, 16, 33, 100, 130, 2, 64)
OUTPUT_TOKENS: Final = 16
KV_BYTES: Final = 4 * 2**20
CHUNK: Final = 20
MODELS_ON_CPU: Final = 3
TAKES_S: Final = 15.0


def run(kit: Kit) -> None:
    gc.collect()
    gc.freeze()  # before each capture torch looks through all that is not
    models = list(anatomies())
    for name, config in models if kit.on_gpu else models[:MODELS_ON_CPU]:
        directory = tiny_models.save(config, kit.folder / name.replace(" ", "-").replace(",", ""))
        for dtype in ("float32",) if has_experts(config) else ("float32", "bfloat16"):
            kit.findings.note(
                f"{name}, {dtype}: {'each token' if dtype == 'float32' else 'each token but ties'}",
                partial(_compare, kit, directory, dtype),
                TAKES_S,
            )


def _compare(kit: Kit, directory: Path, dtype: str, found: Finding) -> None:
    """Compare all execution paths of this engine. Raises AssertionError for a token that differs from the
    reference's."""
    prompts = random_prompts(LENGTHS)
    expected = reference_greedy(directory, prompts, OUTPUT_TOKENS, dtype)
    engine = _load(kit, directory, dtype)
    kernel = engine.kernel
    ways: dict[str, Runner] = {"calls": batched_runner(engine)}
    if isinstance(engine.runner, GraphRunner):
        graphs = engine.runner
        shapes = f"{len(graphs.recorded)} of {len(graphs.shapes)} shapes"
        assert graphs.recorded == frozenset(graphs.shapes), f"{shapes} are replayed: see the log"
        ways["replays"] = graphs
    if kernel is not None:
        ways["kernel"] = batched_runner(engine, kernel)
    ties, wrong = 0, defaultdict[str, list[str]](list)
    for way, engine.runner in ways.items():
        outputs: list[list[int]] = []
        for first in range(0, len(prompts), ROWS):
            worker, some = ShuffledWorker(engine), prompts[first : first + ROWS]
            outputs += worker.run([worker.admit(prompt, OUTPUT_TOKENS) for prompt in some], CHUNK)
        for prompt, got, want in zip(prompts, outputs, expected, strict=True):
            parted = first_divergence(directory, prompt, got, want, dtype)
            ties += parted is not None and parted.tie
            if parted is not None and (dtype == "float32" or not parted.tie):
                wrong[way].append(f"prompt of {len(prompt)}, {parted}")
    found.detail = f"by {', '.join(ways)}: {len(prompts)} outputs each" + (f", {ties} tied" if ties else "")
    assert not wrong, "; ".join(
        f"by {way} {len(each)} of {len(prompts)} outputs, the first {each[0]}" for way, each in wrong.items()
    )


def _load(kit: Kit, directory: Path, dtype: str) -> TorchEngine:
    """Load an engine and warm it up. It has replays and a kernel where the device, or its stand-in, supports
    them."""
    if kit.on_gpu:
        engine = load_engine(
            directory,
            dtype=dtype,
            device=kit.device,
            kv_cache_memory=KV_BYTES,
            cuda_graphs=ROWS,
            flash_attention=dtype == "bfloat16",
        )
        engine.warm_up()
        return engine
    plain = load_engine(directory, dtype=dtype, device="cpu", kv_cache_memory=KV_BYTES)
    if not is_ours(plain):
        return plain
    engine, _ = replaying(plain, Calling(), ROWS, twin)
    engine.warm_up()
    return engine
