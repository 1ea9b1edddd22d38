"""Part of the kit that compares the engine's output on this device with the reference library's on a CPU.

In float32 every token; in bfloat16 with the rule of `tests/process/test_bf16.py`: where two outputs first
part, the two tokens are tied. On random models of every anatomy that the CPU's tests use; on a CPU, where
the kit itself is tried, there are fewer.
"""

from functools import partial
from pathlib import Path
from typing import Final

from baton.engine.loading.engine_loading import load_engine
from tests.engine import tiny_models
from tests.engine.test_equals_reference import random_prompts
from tests.gpu.findings import Finding
from tests.gpu.kit import Kit
from tests.gpu.models import anatomies, has_experts
from tests.inference.engine_worker import ShuffledWorker
from tests.oracle import first_divergence, reference_greedy

ROWS: Final = 4
"""Prompts that are computed together."""
LENGTHS: Final = (1, 7, 16, 33, 100, 130, 2, 64)
OUTPUT_TOKENS: Final = 16
KV_BYTES: Final = 4 * 2**20
CHUNK: Final = 20
MODELS_ON_CPU: Final = 3
TAKES_S: Final = 15.0


def run(kit: Kit) -> None:
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
    """Raises AssertionError for a token that differs from the reference's."""
    prompts = random_prompts(LENGTHS)
    expected = reference_greedy(directory, prompts, OUTPUT_TOKENS, dtype)
    engine = load_engine(directory, dtype=dtype, device=kit.device, kv_cache_memory=KV_BYTES)
    engine.warm_up()
    outputs: list[list[int]] = []
    for first in range(0, len(prompts), ROWS):
        worker, some = ShuffledWorker(engine), prompts[first : first + ROWS]
        outputs += worker.run([worker.admit(prompt, OUTPUT_TOKENS) for prompt in some], CHUNK)
    ties, wrong = 0, []
    for prompt, got, want in zip(prompts, outputs, expected, strict=True):
        parted = first_divergence(directory, prompt, got, want, dtype)
        ties += parted is not None and parted.tie
        if parted is not None and (dtype == "float32" or not parted.tie):
            wrong.append(f"prompt of {len(prompt)}, {parted}")
    found.detail = f"{len(prompts)} outputs" + (f", {ties} tied" if ties else "")
    assert not wrong, f"{len(wrong)} of {len(prompts)} outputs, the first {wrong[0]}"
