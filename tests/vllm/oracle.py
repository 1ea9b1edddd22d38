"""Greedy reference answers of vLLM's own `LLM`, one prompt at a time, in a process of its own.

As a program it reads {"model", "prompts", "tokens", "page_tokens", "dtype"} from standard input, and writes
the answers' ids to the file that is its argument. It computes on what this build of vLLM is for.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from baton.vllm.environment import VARIABLES

ORACLE_S = 400.0
IN_ONE_PROCESS: Final = {**VARIABLES, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
"""Environment in which `LLM` computes in the process that makes it."""


def vllm_greedy(
    model_dir: Path,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    folder: Path,
    page_tokens: int = 32,
    dtype: str = "float32",
) -> list[list[int]]:
    """Return the first `tokens` ids that vLLM answers to each of `prompts`, ends ignored."""
    answers = folder / "answers.json"
    asked = {
        "model": str(model_dir),
        "prompts": [list(each) for each in prompts],
        "tokens": tokens,
        "page_tokens": page_tokens,
        "dtype": dtype,
    }
    subprocess.run(
        [sys.executable, "-m", "tests.vllm.oracle", str(answers)],
        input=json.dumps(asked),
        text=True,
        env=os.environ | IN_ONE_PROCESS,
        timeout=ORACLE_S,
        check=True,
    )
    answered: list[list[int]] = json.loads(answers.read_text())
    return answered


def make_llm(model: str, longest: int, **fields: Any) -> Any:
    """Return vLLM's own `LLM` for sequences of at most `longest` tokens, configured as the engine's worker.

    `fields`: further arguments of it. On a GPU it records graphs, as it does by default.
    """
    from vllm import LLM
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    given = {
        "attention_backend": "CPU_MLA" if on_cpu and fields["dtype"] == "float32" else None,
        "max_model_len": longest + 1,
        "max_num_batched_tokens": max(2048, longest + 1),
        "max_num_seqs": 128,
        "kv_cache_memory_bytes": 256 << 20,
        "enforce_eager": on_cpu,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
    }
    return LLM(model=model, **given | fields)


def _answer(asked: dict[str, Any]) -> list[list[int]]:
    from vllm import SamplingParams

    longest = max(map(len, asked["prompts"])) + asked["tokens"]
    model = make_llm(asked["model"], longest, dtype=asked["dtype"], block_size=asked["page_tokens"])
    sampling = SamplingParams(temperature=0.0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False)
    return [
        list(model.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0].outputs[0].token_ids)
        for prompt in asked["prompts"]
    ]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(_answer(json.load(sys.stdin))))
