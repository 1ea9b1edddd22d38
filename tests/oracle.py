"""What would the reference library answer? Greedy continuations by its own `generate`, one at a time."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from services.runtime.model_facts import read_model


def reference_greedy(
    model_dir: Path, prompts: Sequence[Sequence[int]], max_tokens: int, dtype: str = "float32"
) -> list[list[int]]:
    """Each prompt's greedy continuation: `max_tokens` ids, or fewer, ending with an end-of-sequence id."""
    model = _model(model_dir, dtype)
    ends = list(read_model(model_dir).eos_token_ids)
    settings = GenerationConfig(
        max_new_tokens=max_tokens, do_sample=False, eos_token_id=ends or None, pad_token_id=0
    )
    outputs: list[list[int]] = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            answer = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings
            )
        outputs.append(answer[0, len(prompt) :].tolist())
    return outputs


@lru_cache(maxsize=2)
def _model(model_dir: Path, dtype: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=getattr(torch, dtype), attn_implementation="eager", local_files_only=True
    ).eval()
