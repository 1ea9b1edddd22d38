"""Tests of scored texts, as lm-eval scores them: equal to the reference library's.

`docs/api.md` has the commands that run lm-eval itself.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from baton.api.text.tokenizer import Tokenizer, load_tokenizer
from tests.oracle import reference_scores

CLOSE = 1e-4
PAIRS = (
    ("The capital of France is", " Paris"),
    ("The capital of France is", " a cheese"),
    ("Answer with care. " * 30 + "Bees make", " honey"),
    ("Water freezes at a temperature of", " zero degrees Celsius"),
)
"""Contexts, of which one takes several chunks, and how they may go on."""


@pytest.fixture(scope="module")
def tokenizer(demo_model_dir: Path) -> Tokenizer:
    return load_tokenizer(demo_model_dir)


def loglikelihoods(choices: list[Any], contexts: list[int]) -> Iterator[tuple[float, bool]]:
    """Read an answer as `lm_eval.models.openai_completions` does. Returns the summed log-probability of the
    tokens between the context and the drawn one, and whether each of them was the likeliest."""
    for choice, context in zip(sorted(choices, key=lambda each: each.index), contexts, strict=True):
        own = choice.logprobs.token_logprobs[context:-1]
        likeliest = [max(top.values()) for top in choice.logprobs.top_logprobs[context:-1]]
        yield sum(own), all(each == best for each, best in zip(own, likeliest, strict=True))


@pytest.mark.parametrize("by", ["ids", "text"])
def test_a_multiple_choice_scores_as_by_the_reference(
    client: openai.OpenAI, model: str, demo_model_dir: Path, tokenizer: Tokenizer, by: str
) -> None:
    whole = [tokenizer.encode(context + rest, add_special_tokens=False) for context, rest in PAIRS]
    contexts = [len(tokenizer.encode(context, add_special_tokens=False)) for context, _ in PAIRS]
    prompts: Any = whole if by == "ids" else [context + rest for context, rest in PAIRS]
    reply = client.completions.create(
        model=model, prompt=prompts, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True
    )
    told = list(loglikelihoods(reply.choices, contexts))
    for (likelihood, greedy), ids, context in zip(told, whole, contexts, strict=True):
        reference = reference_scores(demo_model_dir, ids)[context - 1 :]
        own = [float(row[token]) for row, token in zip(reference, ids[context:], strict=True)]
        assert likelihood == pytest.approx(sum(own), abs=CLOSE * len(own))
        assert greedy == all(
            int(row.argmax()) == token for row, token in zip(reference, ids[context:], strict=True)
        )
    assert [greedy for _, greedy in told][:2] == [True, False]
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is None or not reply.usage.prompt_tokens_details.cached_tokens


def test_prompt_logprobs_of_a_chat_are_the_references_whatever_is_cached(
    client: openai.OpenAI, model: str, demo_model_dir: Path
) -> None:
    told = []
    for _ in range(2):
        asked: dict[str, Any] = {"prompt_logprobs": 2, "return_token_ids": True}
        reply = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "What do bees make? " * 8}],
            max_tokens=1,
            temperature=0,
            extra_body=asked,
        )
        more = reply.model_extra or {}
        told.append(more["prompt_logprobs"])
        ids = more["prompt_token_ids"]
    assert told[0][0] is None
    reference = reference_scores(demo_model_dir, ids)
    for shown in told:
        for entries, token, row in zip(shown[1:], ids[1:], reference, strict=True):
            own = entries[str(token)]
            assert own["logprob"] == pytest.approx(float(row[token]), abs=CLOSE)
            assert own["rank"] == int((row >= row[token]).sum())
            assert {int(each) for each in entries} == {token, *row.topk(2).indices.tolist()}
