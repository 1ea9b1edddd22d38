"""Part of the kit that measures vLLM's engine behind Baton beside vLLM's own `LLM`, in turns.

A decode step of 1, 8 and 32 sequences, with the scheduling and the draw of each, and a hand-over's stages.
Weights are any numbers in the shape of an 8B model.
"""

from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from tests.gpu.findings import Finding
from tests.gpu.kit import Kit
from tests.gpu.models import VLLM_SMALL, unweighted
from tests.gpu.speed import STEP_KV, hand_over, named, shape_of
from tests.gpu.vllm_engine import page_tokens
from tests.vllm.oracle import IN_ONE_PROCESS

TURNS: Final = ("vllm", "baton", "baton", "vllm")
"""Which of the two is measured, in this order, each in a process of its own."""
MOST_S, HAND_OVER_S = 90.0, 150.0
"""Longest time of a turn, and of a stack's start and its requests, seconds. All compile on a GPU."""


def run(kit: Kit) -> None:
    shape = shape_of(kit, VLLM_SMALL)
    model = unweighted(shape, kit.folder / "unweighted")
    note = kit.findings.note
    note(f"a decode step beside vLLM's own, {named(shape)}", partial(_steps, kit, model), 20)
    flags = f"--engine vllm --page-tokens {page_tokens(kit)}"
    note(f"a hand-over, {named(shape)}", partial(hand_over, kit, model, flags, HAND_OVER_S), 40)


def _steps(kit: Kit, model: Path, found: Finding) -> None:
    asked = {
        "model": str(model),
        "device": kit.device,
        "dtype": "bfloat16" if kit.on_gpu else "float32",
        "page_tokens": page_tokens(kit),
        "kv_cache_memory": STEP_KV if kit.on_gpu else 16 * 2**20,
        "context": 512 if kit.on_gpu else 40,
        "rows": [1, 8, 32] if kit.on_gpu else [1, 8],
        "runs": 50 if kit.on_gpu else 10,
    }
    times: dict[str, list[dict[str, float]]] = {each: [] for each in TURNS}
    for each in TURNS if kit.on_gpu else TURNS[:2]:
        question = {**asked, "by": each}
        times[each].append(kit.answer("tests.vllm.decode_steps", question, MOST_S, IN_ONE_PROCESS))
    medians = {
        f"{each}_ms": {rows: median(turn[rows] for turn in turns) for rows in turns[0]}
        for each, turns in times.items()
    }
    own, mine = medians["vllm_ms"], medians["baton_ms"]
    found.figures = {
        **medians,
        "ratios": {rows: round(mine[rows] / own[rows], 3) for rows in own},
        "turns": times,
        "context": asked["context"],
    }
    found.detail = "; ".join(
        f"{rows} sequences: {mine[rows]:.3f} ms, {ratio} times vLLM's {own[rows]:.3f}"
        for rows, ratio in found.figures["ratios"].items()
    )
