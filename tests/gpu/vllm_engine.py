"""Part of the kit that compares vLLM's engine behind Baton with vLLM's own `LLM`, on this device.

Both replay graphs on a GPU, and Baton draws behind them. In float32 on a CPU, and by vLLM's batch-invariant
kernels on a GPU, all tokens have to be equal: of prompts alone, together, in chunks, with drafts, and handed
over by NIXL through another process. By other kernels equal answers are counted. Then a stack serves.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.gpu import stack
from tests.gpu.findings import CannotRun, Finding
from tests.gpu.kit import Kit
from tests.gpu.models import VLLM_SMALL, served, with_tokenizer
from tests.process.load import any_prompts
from tests.vllm.families import SHAPE, save_family
from tests.vllm.oracle import IN_ONE_PROCESS

INVARIANT: Final = {"VLLM_BATCH_INVARIANT": "1"}
LLAMA: Final = "llama"
LENGTHS: Final = (1, 5, 64, 65, 150)
TOKENS: Final = stack.OUTPUT_TOKENS
STREAMED_TOKENS: Final = 1500
"""Tokens of the stream whose worker is killed. Steps of so small a model take a millisecond."""
LLM_S, ENGINE_S, STARTS_S = 120.0, 120.0, 150.0
"""Longest times of vLLM's own answers, of the engine's, and until a worker is ready, seconds. On a GPU each
compiles and records graphs."""


@dataclass(frozen=True)
class Case:
    """A model that is compared, and how both compute it."""

    model: str
    dtype: str
    is_invariant: bool
    """Whether tokens are promised not to depend on the batch."""
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        if not self.is_invariant:
            return f"{self.model}, {self.dtype}: equal answers are counted"
        kernels = " by batch-invariant kernels" if self.environ else ""
        return f"{self.model}, {self.dtype}{kernels}: each token is that of vLLM alone"


ON_GPU: Final = (
    Case(LLAMA, "bfloat16", True, INVARIANT),
    Case(LLAMA, "bfloat16", False),
    *(Case(each, "bfloat16", True, INVARIANT) for each in ("deepseek_v3", "qwen3_moe", "gpt_oss")),
)
ON_CPU: Final = (Case(LLAMA, "float32", True),)


def run(kit: Kit) -> None:
    right: dict[str, list[list[int]]] = {}
    """Answers of vLLM alone to the stack's prompts, by the names of cases."""
    for case in ON_GPU if kit.on_gpu else ON_CPU:
        kit.findings.note(case.name, partial(_compare, kit, case, right), 20)
        if case.name in right and case.is_invariant and case.model == LLAMA:
            _serve(kit, case, right[case.name])


def _serve(kit: Kit, case: Case, answers: list[list[int]]) -> None:
    """Check a stack with the right `answers` to its prompts."""
    flags = {"engine": "vllm", "dtype": case.dtype, "page-tokens": page_tokens(kit), "kv-checksum": "pages"}
    model = _model(kit, case.model)
    stack.check_stack(kit, model, flags, lambda _: answers, STARTS_S, STREAMED_TOKENS, case.environ)


def _compare(kit: Kit, case: Case, right: dict[str, list[list[int]]], found: Finding) -> None:
    """Compare the engine's answers with vLLM's own, and add those to the stack's prompts to `right`."""
    prompts = any_prompts(LENGTHS, VLLM_SMALL.vocab_size)
    asked = {
        "model": str(_model(kit, case.model)),
        "device": kit.device,
        "dtype": case.dtype,
        "page_tokens": page_tokens(kit),
        "tokens": TOKENS,
    }
    environ = {**IN_ONE_PROCESS, **case.environ}
    both = {**asked, "prompts": [*prompts, *stack.prompts(kit)]}
    try:
        alone: list[list[int]] = kit.answer("tests.vllm.oracle", both, LLM_S, environ)
    except AssertionError as error:
        raise CannotRun(f"vLLM alone does not either: {error}") from error
    right[case.name] = alone[len(prompts) :]
    given = {**asked, "prompts": prompts}
    told: dict[str, Any] = kit.answer("tests.vllm.engine_answers", given, ENGINE_S, environ)
    judge(found, case, alone[: len(prompts)], told)
    assert told["facts"]["graphs"] or not kit.on_gpu, "vLLM recorded no graph"


def judge(found: Finding, case: Case, alone: list[list[int]], told: Mapping[str, Any]) -> None:
    """Describe what is equal to the answers `alone` of vLLM. Raises AssertionError if more has to be."""
    expected = {name: alone[-len(each) :] for name, each in told["answers"].items()}
    pairs = {name: (each, expected[name]) for name, each in told["answers"].items()}
    pairs["drawn together"] = (told["drawn"]["together"], told["drawn"]["alone"])
    equal = {
        name: sum(mine == theirs for mine, theirs in zip(*each, strict=True)) for name, each in pairs.items()
    }
    facts = told["facts"]
    counts = ", ".join(f"{name} {count} of {len(pairs[name][0])}" for name, count in equal.items())
    found.detail = f"{counts}; {facts['graphs']} graphs, {facts['encoding']} on {facts['device']}"
    if not case.is_invariant:
        found.figures = {"equal": equal, **facts}
        return
    assert all(mine == theirs for mine, theirs in pairs.values()), found.detail


def _model(kit: Kit, name: str) -> Path:
    if (kit.folder / name).exists():
        return kit.folder / name
    if name == LLAMA:
        return served(VLLM_SMALL, kit.folder / name)
    folder = kit.folder / "tokenizer"
    folder.mkdir(exist_ok=True)
    return save_family(name, kit.folder, with_tokenizer(folder, SHAPE["vocab_size"]))


def page_tokens(kit: Kit) -> int:
    """Return tokens per page that vLLM's attention has on this device, latent attention too."""
    return 64 if kit.on_gpu else 32
