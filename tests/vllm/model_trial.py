"""Trial of one tiny model on vLLM's engine, against vLLM's own `LLM`. Each runs in a process of its own."""

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any, Final

from baton.models.engine_features import missing_in_vllm
from baton.models.model_files import resolve
from baton.runtime.errors import StartupError, describe_error
from tests.models.comparison import (
    OUTPUT_TOKENS,
    Answer,
    Outcome,
    TrialVerdict,
    apart,
    compare,
    prompts,
    why,
)
from tests.models.recipes import CONTEXT
from tests.vllm.conftest import PAGE_TOKENS, settings
from tests.vllm.model_recipes import save_model
from tests.vllm.oracle import make_llm

LATENT_PAGE_TOKENS: Final = 16
IN_BFLOAT16: Final = frozenset({"qwen3_next"})
"""Types with layers that vLLM computes in bfloat16 alone on CPUs."""
ROTATED_BY_HEAD: Final = frozenset({"lfm2", "lfm2_moe"})
"""Types without latents whose queries have a dimension of heads where they are rotated."""
MEMORY: Final = 64 << 20
REASON_LETTERS: Final = 160


@dataclass(frozen=True, slots=True)
class Reference:
    """What vLLM's own `LLM` answers."""

    alone: list[Answer]
    """Answers to each prompt alone."""
    together: list[Answer]
    definition: str
    """Whose definition of the model vLLM ran."""
    page_tokens: int
    dtype: str


def make_reference(kind: str, directory: Path) -> Reference | Outcome:
    """Save a tiny model of the type `kind` in `directory`, and let vLLM's own `LLM` answer.

    Return an Outcome if the model cannot be made, is refused by its files, or is not run by vLLM.
    """
    try:
        save_model(kind, directory)
    except Exception as error:
        return Outcome(TrialVerdict.UNTRIED, reason(error, directory))
    try:
        resolve(str(directory), missing=missing_in_vllm)
    except StartupError as refusal:
        return Outcome(TrialVerdict.REFUSED, why(str(refusal), directory))
    try:
        reference = _reference(kind, directory)
        if any(isnan(likely) for answer in reference.alone for _, likely in answer):
            return Outcome(TrialVerdict.UNRUNNABLE, "its answers are not numbers")
        return reference  # noqa: TRY300
    except Exception as error:
        return Outcome(TrialVerdict.UNRUNNABLE, reason(error, directory))


def try_engine(
    directory: Path, reference: Reference, disturb: Callable[[Any], None] = lambda _: None
) -> Outcome:
    """Return what comes of the model in `directory` on Baton's engine on vLLM.

    `disturb`: called with the engine before the trial.
    """
    from baton.vllm.engine_startup import start_both

    chosen = settings(
        str(directory),
        dtype=reference.dtype,
        page_tokens=reference.page_tokens,
        kv_cache_memory=MEMORY,
        context_length=CONTEXT,
    )
    try:
        prefill, decode = start_both(chosen, 1)
    except StartupError as refusal:
        return Outcome(TrialVerdict.REFUSED, why(str(refusal), directory))
    disturb(prefill)
    in_chunks = reference.dtype == "float32"
    differences = compare(prefill, decode, prompts(), reference.alone, in_chunks=in_chunks)
    difference = next(differences, "")
    if not difference:
        return Outcome(TrialVerdict.EQUAL, reference.definition)
    if next(apart("", reference.together, reference.alone), ""):
        difference += " (and vLLM's own answers depend on the batch)"
    return Outcome(TrialVerdict.WRONG, difference)


def _reference(kind: str, directory: Path) -> Reference:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import EngineArgs

    from baton.vllm.rotary_embeddings import rotate_by_head

    is_latent = EngineArgs(str(directory), skip_tokenizer_init=True).create_model_config().use_mla
    page_tokens = LATENT_PAGE_TOKENS if is_latent else PAGE_TOKENS
    dtype = "bfloat16" if kind in IN_BFLOAT16 else "float32"
    model = make_llm(
        str(directory), CONTEXT - 1, dtype=dtype, block_size=page_tokens, kv_cache_memory_bytes=MEMORY
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False, logprobs=0
    )

    def answers(asked: list[list[int]]) -> list[Answer]:
        given: list[Any] = [{"prompt_token_ids": each} for each in asked]
        outputs = [each.outputs[0] for each in model.generate(given, sampling, use_tqdm=False)]
        return [
            [(token, top[token].logprob) for token, top in zip(each.token_ids, each.logprobs, strict=True)]
            for each in outputs
        ]

    def alone() -> list[Answer]:
        return [answers([each])[0] for each in prompts()]

    right = alone()
    [module] = model.apply_model(lambda each: type(each).__module__)
    definition = "transformers' definition" if "transformers" in module else "vLLM's definition"
    if is_latent or kind in ROTATED_BY_HEAD:
        by_kernel = right
        model.apply_model(rotate_by_head)
        right = alone()
        if next(apart("", by_kernel, right), ""):
            definition += ", its rotation by torch"
    if dtype != "float32":
        definition += f", in {dtype}"
    return Reference(right, answers(prompts()), definition, page_tokens, dtype)


def reason(error: BaseException, directory: Path) -> str:
    """Return the first sentence of an error, without the model's path."""
    text = str(error)
    inner = re.search(r"Value error, (.*?)(?: \[type=|$)", text, re.DOTALL)
    words = inner[1] if inner else describe_error(error) if text else type(error).__name__
    if not text and error.__traceback__:
        words += f" in {traceback.extract_tb(error.__traceback__)[-1].name}"
    line = words.replace(str(directory), "the model").strip().splitlines()[0]
    sentence = line.split(". ")[0]
    return sentence if len(sentence) <= REASON_LETTERS else f"{sentence[:REASON_LETTERS]} …"
