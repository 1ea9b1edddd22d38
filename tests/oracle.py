"""Reference answers of the model library: greedy continuations by `generate`, one prompt at a time, or by one
pass over an answer that is already known."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig

from baton.models.model_facts import read_model
from tests.engine.tiny_models import maker_of


def reference_greedy(
    model_dir: Path, prompts: Sequence[Sequence[int]], max_tokens: int, dtype: str = "float32"
) -> list[list[int]]:
    """Return each prompt's greedy continuation: `max_tokens` ids, or fewer if it ends with an end-of-sequence
    id. Computed once in a process."""
    return [list(_continued(model_dir, tuple(prompt), max_tokens, dtype)) for prompt in prompts]


def reference_behind(
    model_dir: Path,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    max_tokens: int,
) -> list[list[int]]:
    """Return the reference's continuation in float32 as far as it agrees with each output, and one token
    more. It equals the output exactly where the output is the whole continuation. It takes one pass in all,
    instead of one for each token."""
    return [
        list(_followed(model_dir, tuple(prompt), tuple(output), max_tokens))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def reference_scores(model_dir: Path, prompt: Sequence[int]) -> torch.Tensor:
    """[tokens - 1, vocabulary]: the log-probabilities of every token in place of each but the prompt's first,
    in float32."""
    with torch.inference_mode():
        logits = _model(model_dir, "float32")(input_ids=torch.tensor([prompt])).logits[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1)


@cache
def _continued(model_dir: Path, prompt: tuple[int, ...], max_tokens: int, dtype: str) -> tuple[int, ...]:
    model = _model(model_dir, dtype)
    ends = _ends(model_dir)
    settings = GenerationConfig(
        max_new_tokens=max_tokens, do_sample=False, eos_token_id=list(ends) or None, pad_token_id=0
    )
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        answer = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings
        )
    return tuple(answer[0, len(prompt) :].tolist())


@cache
def _followed(
    model_dir: Path, prompt: tuple[int, ...], output: tuple[int, ...], max_tokens: int
) -> tuple[int, ...]:
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *output]])
        logits = _model(model_dir, "float32")(input_ids=ids, logits_to_keep=len(output) + 1).logits[0]
    answer: list[int] = []
    likeliest: list[int] = logits.argmax(dim=-1).tolist()
    for token, given in list(zip(likeliest, (*output, None), strict=True))[:max_tokens]:
        answer.append(token)
        if token in _ends(model_dir) or token != given:
            break
    return tuple(answer)


@cache
def _ends(model_dir: Path) -> tuple[int, ...]:
    return tuple(read_model(model_dir).eos_token_ids)


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position at which two continuations of one prompt differ."""

    place: int
    got: int
    want: int
    gap: float
    """The reference's logit of `want` minus that of `got`, in the precision of both."""
    exact: float
    """The same gap as the reference computes it in float32."""
    noise: float
    """Largest difference of the reference's logits here from those in float32."""

    @property
    def tie(self) -> bool:
        """The two are closer than the reference itself is wrong of both, or what came is the likelier one in
        fp32: the reference's own order of them is chance."""
        return self.exact <= 2 * self.noise

    def __str__(self) -> str:
        return (
            f"at {self.place}: {self.got}, expected {self.want}; logits {self.gap:+.4f} apart, in fp32 "
            f"{self.exact:+.4f}, where rounding moves them by up to {self.noise:.4f}: "
            f"{'a tie' if self.tie else 'no tie'}"
        )


def first_divergence(
    model_dir: Path, prompt: Sequence[int], got: Sequence[int], want: Sequence[int], dtype: str
) -> Divergence | None:
    """Return the first difference, or None if both are the same. Neither may be a beginning of the other."""
    pairs = enumerate(zip(got, want, strict=False))
    place = next((index for index, (ours, theirs) in pairs if ours != theirs), None)
    if place is None:
        assert list(got) == list(want), "one of them ends early, though the tokens are the same"
        return None
    ids = torch.tensor([[*prompt, *want[:place]]])
    with torch.inference_mode():
        logits, exact = (
            _model(model_dir, each)(input_ids=ids, logits_to_keep=1).logits[0, -1].float()
            for each in (dtype, "float32")
        )
    ours, theirs = got[place], want[place]
    return Divergence(
        place,
        ours,
        theirs,
        gap=float(logits[theirs] - logits[ours]),
        exact=float(exact[theirs] - exact[ours]),
        noise=float((logits - exact).abs().max()),
    )


@lru_cache(maxsize=2)
def _model(model_dir: Path, dtype: str) -> Any:
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    return (
        maker_of(config)
        .from_pretrained(
            model_dir, dtype=getattr(torch, dtype), attn_implementation="eager", local_files_only=True
        )
        .eval()
    )
