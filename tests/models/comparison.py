"""Comparison of an engine's answers with right ones: prompts, ways of computing them, and outcomes.

Answers are compared token for token, with the log probabilities of the drawn tokens. A window that is off by
one token changes the log probabilities first. No engine is imported."""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from baton.inference.step_engine import StepEngine
from baton.models.model_facts import WAY_OUT
from baton.rooms.request import Sampling, Token
from tests.inference.engine_worker import ShuffledWorker, Tenant, hand_over
from tests.models.recipes import VOCABULARY

LENGTHS: Final = (5, 70, 300)
OUTPUT_TOKENS: Final = 8
LONG, SHORT = 512, 40
"""Lengths of prefill chunks, in tokens."""
LOGPROBS: Final = 1e-2
"""Largest difference from the right logprob, which many roundings can add up to."""
VARIED: Final = 12
"""Fewest different logprobs in the answers. With fewer, equal answers would prove little."""
TOLD: Final = Sampling(temperature=0.0, top_logprobs=1)

Answer = list[tuple[int, float]]
"""Tokens, each with its log probability."""


class TrialVerdict(StrEnum):
    EQUAL = "equal"
    REFUSED = "refused"
    WRONG = "wrong"
    """Served, and otherwise than by the library."""
    BROKEN = "broken"
    """The trial ended in an error that is no refusal."""
    UNTRIED = "not tried"
    """No tiny model of the type can be made."""
    UNRUNNABLE = "not runnable"
    """vLLM itself does not run it on a CPU."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of the trial of one model."""

    verdict: TrialVerdict
    words: str
    """The execution path of a served model, the reason of a refusal, or the fault."""
    sights: tuple[str, ...] = ()
    """Special features of its layers' attention, such as windows."""
    ranks: tuple[str, str] = ("", "")
    """Why two tensor-parallel ranks do not serve the model, and why two stages do not. Empty if they do."""

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> "Outcome":
        """Return the outcome that `dataclasses.asdict` and JSON made these fields of."""
        first, second = told["ranks"]
        return cls(TrialVerdict(told["verdict"]), told["words"], tuple(told["sights"]), (first, second))


def prompts() -> list[list[int]]:
    """Return random prompts without special tokens."""
    numbers = random.Random(3)
    return [[numbers.randrange(3, VOCABULARY) for _ in range(length)] for length in LENGTHS]


def why(refusal: str, directory: Path | None = None) -> str:
    """Return a refusal's text without the model's name and path, which are only this trial's."""
    words = re.split(" cannot be served(?: by several ranks)?: ", refusal)[-1].removesuffix(WAY_OUT)
    return words if directory is None else words.replace(f"{directory}/", "").replace(f"{directory}: ", "")


def compare(
    engine: StepEngine,
    beside: StepEngine,
    asked: Sequence[Sequence[int]],
    expected: Sequence[Answer],
    *,
    in_chunks: bool = True,
) -> Iterator[str]:
    """Yield each setting in which the engine's answers differ from `expected`. Prompts run alone and
    together, in long and short chunks, after a hand-over, and behind another's prefix. `beside`: engine of
    the same model over other pages. `in_chunks`: compute prompts in short chunks, too."""
    if len({round(likely, 3) for answer in expected for _, likely in answer}) < VARIED:
        yield "its answers hardly vary: they tell nothing"
    chunks = (LONG, SHORT) if in_chunks and engine.facts.chunked_prompts else (LONG,)
    for chunk in chunks:
        worker = ShuffledWorker(engine, seed=chunk)
        together = _drawn(worker, [_admit(worker, prompt) for prompt in asked], chunk)
        yield from apart(f"together, in chunks of {chunk}", together, expected)
    for chunk in chunks:
        worker = ShuffledWorker(engine, seed=chunk)
        by_itself = [_drawn(worker, [_admit(worker, prompt)], chunk)[0] for prompt in asked]
        yield from apart(f"alone, in chunks of {chunk}", by_itself, expected)

    prefill, decode = ShuffledWorker(engine, seed=1), ShuffledWorker(beside, seed=2)
    arrived: list[Tenant] = []
    for prompt, answer in zip(asked, expected, strict=True):
        tenant = _admit(prefill, prompt)
        while not tenant.sequence.output:
            prefill.step([tenant], chunks[-1])
        arrived.append(hand_over(tenant, prefill, decode))
        if not engine.whole.states:  # a state behind half of the prompt is not stored
            again = _admit(prefill, prompt)
            size = engine.whole.block_tokens
            again.computed = len(prompt) // 2 // size * size
            counts = engine.whole.pages_for(again.computed)
            again.tables = [table[:count] for table, count in zip(tenant.tables, counts, strict=True)]
            yield from apart("behind a prefix that lies there", _drawn(prefill, [again], SHORT), [answer])
    handed = _drawn(decode, arrived, 1)
    yield from apart("after a hand-over", handed, [answer[1:] for answer in expected])


def _admit(worker: ShuffledWorker, prompt: Sequence[int]) -> Tenant:
    return worker.admit(prompt, OUTPUT_TOKENS, TOLD)


def _drawn(worker: ShuffledWorker, tenants: Sequence[Tenant], chunk: int) -> list[Answer]:
    answers: list[Answer] = [[] for _ in tenants]
    while not all(tenant.done for tenant in tenants):
        going = [place for place, tenant in enumerate(tenants) if not tenant.done]
        for place, token in zip(going, worker.step(tenants, chunk), strict=True):
            if isinstance(token, Token) and token.logprob is not None:
                answers[place].append((token.id, token.logprob))
    return answers


def apart(how: str, seen: Sequence[Answer], expected: Sequence[Answer]) -> Iterator[str]:
    for mine, right in zip(seen, expected, strict=True):
        if [token for token, _ in mine] != [token for token, _ in right]:
            yield f"{how}: other tokens"
        gap = max(abs(one - other) for (_, one), (_, other) in zip(mine, right, strict=False))
        if not gap <= LOGPROBS:
            yield f"{how}: log probabilities are off by {gap:.2g}"
