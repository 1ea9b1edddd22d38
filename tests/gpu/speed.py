"""Part of the kit that measures this device beside its own limits, with a model of eight billion weights.

Any numbers in its shape (`--load-format dummy`). Each figure stands beside the machine's limit, measured in
the same process: a decode step beside reading as many bytes, a prompt beside its products alone and beside
the rate of a large one, a hand-over beside a bare write.
"""

from functools import partial
from pathlib import Path
from typing import Any, Final

from transformers import LlamaConfig

from tests.gpu.findings import CannotRun, Finding
from tests.gpu.kit import Kit
from tests.gpu.models import EIGHT_BILLION, SMALL, unweighted

GIB: Final = 2**30
LAYERS: Final = (32, 16, 8, 4)
BYTES_A_LAYER: Final = 436 * 2**20
"""Bytes of one layer in bfloat16."""
BESIDE_LAYERS: Final = 2 * 1_050_673_152
"""Embeddings and head."""
STEP_KV: Final = 6 * GIB
STACK_KV: Final = 2 * GIB
CONTEXT_BYTES: Final = GIB
"""Memory that CUDA and its libraries take in each process."""
MOST_S: Final = 100.0
CALLS: Final = "--no-compiled"
"""Flag for runs on a CPU, so that no kernel is compiled for the kit alone."""


def run(kit: Kit) -> None:
    note = kit.findings.note
    shape = shape_of(kit)
    runs = ("--runs", "15") if kit.on_gpu else ("--runs", "3")
    model = unweighted(shape, kit.folder / "unweighted")
    cases: dict[str, tuple[str, ...]] = {
        "a decode step, one sequence": ("--phase", "decode", "--batch", "1"),
        "a prompt of 2,048 tokens": ("--phase", "prefill", "--context", "2048"),
        "a decode step, 32 sequences": ("--phase", "decode", "--batch", "32"),
    }
    if not kit.on_gpu:
        cases = {
            "a decode step, two sequences": ("--phase", "decode", "--batch", "2", "--context", "40", CALLS),
            "a prompt of 100 tokens": ("--phase", "prefill", "--context", "100", CALLS),
        }
    for index, (what, flags) in enumerate(cases.items()):
        note(
            f"{what}, {named(shape)}",
            partial(_step, kit, model, (*flags, *runs)),
            25 if kit.on_gpu else 5,
        )
        if index == 1:
            engine = "--engine torch --compiled-steps false"
            note(f"a hand-over, {named(shape)}", partial(hand_over, kit, model, engine, MOST_S), 40)


def shape_of(kit: Kit, small: LlamaConfig = SMALL) -> LlamaConfig:
    """The whole model, or as many of its layers as fit twice, in bytes that are free now. `small`: the model
    on a CPU, or if less is free."""
    if not kit.on_gpu:
        return small
    import torch

    free, _ = torch.cuda.mem_get_info(kit.device)
    for layers in LAYERS:
        weights = layers * BYTES_A_LAYER + BESIDE_LAYERS
        step = 2 * weights + STEP_KV + 2 * CONTEXT_BYTES
        stack = 2 * (weights + STACK_KV + 2 * CONTEXT_BYTES)
        if max(step, stack) <= free:
            config = LlamaConfig.from_dict({**EIGHT_BILLION.to_dict(), "num_hidden_layers": layers})
            assert isinstance(config, LlamaConfig)
            return config
    return small


def named(shape: LlamaConfig) -> str:
    if shape.hidden_size < EIGHT_BILLION.hidden_size:
        return "of a small model"
    layers = shape.num_hidden_layers
    return "of an 8B model" if layers == max(LAYERS) else f"of {layers} layers of an 8B model"


def _step(kit: Kit, model: Path, flags: tuple[str, ...], found: Finding) -> None:
    place = ("--device", kit.device, "--kv-cache-memory", str(STEP_KV if kit.on_gpu else 16 * 2**20))
    numbers = "bfloat16" if kit.on_gpu else "float32"
    told = kit.bench(
        *("step", "--model", str(model), "--load-format", "dummy", "--dtype", numbers, *place, *flags),
        most_s=MOST_S,
    )
    medians = told["median_ms"]
    found.figures = told
    if told["phase"] == "decode":
        rate = told["read_bytes"] / medians["read"] / 1e6
        found.detail = f"{medians['step']} ms, {told['ratio']} times the reading ({rate:.0f} GB/s)"
    else:
        rate = told["large_product_gflop"] / medians["large_product"]
        share = told["gflop"] / medians["step"] / rate
        found.figures["share_of_large_product"] = round(share, 3)
        found.detail = (
            f"{medians['step']} ms, {told['ratio']} times its products, {100 * share:.0f} % of "
            f"{rate:.1f} TFLOP/s"
        )


def hand_over(kit: Kit, model: Path, flags: str, most_s: float, found: Finding) -> None:
    """Measure hand-overs of a stack with these flags and the model, in `most_s` seconds at most."""
    numbers = "bfloat16" if kit.on_gpu else "float32"
    flags += f" --model {model} --load-format dummy --device {kit.device.partition(':')[0]} --dtype {numbers}"
    flags += f" --kv-cache-memory {STACK_KV if kit.on_gpu else 16 * 2**20}"
    prompt, runs = ("2000", "10") if kit.on_gpu else ("100", "3")
    told: dict[str, Any] = kit.bench(
        *("handover", "--runs", runs, "--prompt-tokens", prompt, "--flags", flags, "--json"),
        *("--device", kit.device),
        most_s=most_s,
    )
    found.figures = told
    found.detail = (
        f"{told['handover_ms']} ms of which computing {told['compute_ms']}, "
        f"bytes {told['transfer_ms']}, its own {told['own_ms']}"
    )
    if not told["bytes"]:
        raise CannotRun("no bytes were handed over")
