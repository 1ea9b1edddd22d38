"""Output rate of one stack with draft tokens and without, measured in turns."""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

REQUEST_S: Final = 600.0
WITH, WITHOUT = "with", "without"
RANDOM: Final = "random"
RANDOM_IDS: Final = range(1_000, 30_000)
"""Token ids of random prompts, which have no repetitions to draft from."""

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    rounds: int
    concurrency: Sequence[int]
    prompts: Sequence[Path]
    """Files of a JSON object a line, with a `prompt` and its `max_tokens`."""
    random_tokens: int
    """Length of answers to random prompts, drawn at temperature 1. 0: no random prompts."""
    seed: int

    def loads(self) -> dict[str, list[Body]]:
        """Return request bodies by load. Raises ValueError for a malformed file."""
        loads: dict[str, list[Body]] = {}
        for path in self.prompts:
            try:
                asked = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
                loads[path.stem] = [
                    {"prompt": each["prompt"], "max_tokens": each["max_tokens"], "temperature": 0}
                    for each in asked
                ]
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}: it has to hold a prompt and max_tokens a line: {error}") from error
        if self.random_tokens:
            rng = random.Random(self.seed)  # noqa: S311
            loads[RANDOM] = [
                {
                    "prompt": rng.choices(RANDOM_IDS, k=64),
                    "max_tokens": self.random_tokens,
                    "temperature": 1,
                    "seed": number,
                }
                for number in range(max(self.concurrency))
            ]
        return loads


@dataclass(slots=True)
class SpeculationRound:
    """Result of sending all requests of a load once."""

    tokens: int
    seconds: float
    answers: Sequence[Sequence[int]]

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return self.tokens / self.seconds


def measure(url: str, plan: SpeculationPlan) -> dict[str, Any]:
    """Return results by load and concurrency. Raises ValueError and RuntimeError."""
    return asyncio.run(_measured(url, plan, plan.loads()))


async def _measured(url: str, plan: SpeculationPlan, loads: Mapping[str, list[Body]]) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {name: {} for name in loads}
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_S, trust_env=False) as client:
        for name, bodies in loads.items():
            for concurrency in plan.concurrency:
                rounds: dict[str, list[SpeculationRound]] = {WITH: [], WITHOUT: []}
                for number in range(1 + plan.rounds):
                    for how in (WITH, WITHOUT) if number % 2 else (WITHOUT, WITH):
                        told = await _round(client, bodies, concurrency, speculate=how == WITH)
                        if number:  # the first finds nothing cached
                            rounds[how].append(told)
                found[name][str(concurrency)] = summarise(rounds)
    return found


async def _round(
    client: httpx.AsyncClient, bodies: Sequence[Body], concurrency: int, *, speculate: bool
) -> SpeculationRound:
    waiting = iter(enumerate(bodies))
    answers: list[Sequence[int]] = [()] * len(bodies)

    async def ask() -> None:
        for place, body in waiting:
            asked = body | {"speculate": speculate, "ignore_eos": True, "return_token_ids": True}
            reply = await client.post("/v1/completions", json=asked)
            if reply.status_code != httpx.codes.OK:
                raise RuntimeError(f"HTTP {reply.status_code}: {reply.text[:500]}")
            answers[place] = reply.json()["choices"][0]["token_ids"]

    started = time.perf_counter()
    async with asyncio.TaskGroup() as asking:
        for _ in range(concurrency):
            asking.create_task(ask())
    return SpeculationRound(sum(map(len, answers)), time.perf_counter() - started, answers)


def summarise(rounds: Mapping[str, Sequence[SpeculationRound]]) -> dict[str, Any]:
    pairs = list(zip(rounds[WITH], rounds[WITHOUT], strict=True))
    ratios = [drafted.rate / plain.rate for drafted, plain in pairs]
    answers = [
        one == other
        for drafted, plain in pairs
        for one, other in zip(drafted.answers, plain.answers, strict=True)
    ]
    return {
        "output_tokens_per_s": {
            how: round(statistics.median(each.rate for each in told), 2) for how, told in rounds.items()
        },
        "ratio": round(statistics.median(ratios), 3),
        "ratio_least": round(min(ratios), 3),
        "equal": f"{sum(answers)} of {len(answers)}",
    }
