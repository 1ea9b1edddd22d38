"""The command `conversations`: prompt tokens that the prefix caches spare, with several bootstraps.

Each turn of a conversation goes over a connection of its own, so that any bootstrap may get it. A bootstrap
places it well only if it knows what the workers have cached for the others.
"""

import asyncio
import json
import random
from dataclasses import dataclass
from typing import Annotated, Any, Final

import typer

from bench.report import AsJson
from bench.serving.burst import parse_numbers

ANSWER_TOKENS: Final = 8
DECODE_WORKERS: Final = 1


@dataclass(frozen=True, slots=True)
class ConversationPlan:
    """Conversations of one run."""

    talks: int
    turns: int
    words: int
    """Words that each turn adds."""
    concurrency: int
    seed: int
    timeout_s: float


def conversations(
    bootstraps: Annotated[str, typer.Option(help="Numbers of bootstraps, by commas.")] = "1,3",
    workers: Annotated[int, typer.Option(min=1, max=16, help="Prefill workers.")] = 3,
    talks: Annotated[int, typer.Option(min=1, max=10_000, help="Conversations.")] = 48,
    turns: Annotated[int, typer.Option(min=1, max=100, help="Requests of a conversation.")] = 6,
    words: Annotated[int, typer.Option(min=1, max=10_000, help="Words that each turn adds.")] = 40,
    concurrency: Annotated[int, typer.Option(min=1, max=1024, help="Conversations at once.")] = 8,
    flags: Annotated[str, typer.Option(help="Of `baton serve`, beside these.")] = "",
    seed: Annotated[int, typer.Option(help="The same seed asks the same.")] = 0,
    timeout_s: Annotated[float, typer.Option(min=1, help="Longest a request may take.")] = 120,
    _: AsJson = True,
) -> None:
    """Conversations of several turns, on one stack for each number of bootstraps, one after the other.

    `hits`: share of the prompt tokens that a prefill worker had in its prefix cache. `ratio`: the hits of
    the last stack beside those of the first.
    """
    import uvloop

    from baton.cli.load_client import RequestFailed
    from baton.runtime.errors import StartupError
    from baton.runtime.service_process import report_startup_error
    from bench.serving.stack import running

    plan = ConversationPlan(talks, turns, words, concurrency, seed, timeout_s)
    stacks: dict[str, dict[str, Any]] = {}
    try:
        for number in _different_numbers(bootstraps):
            sizes = f"--bootstraps {number} --prefill {workers} --decode {DECODE_WORKERS}"
            with running("", f"{sizes} {flags}") as url:
                stacks[str(number)] = uvloop.run(_measure(url, plan))
    except StartupError as error:
        raise typer.Exit(report_startup_error(error)) from None
    except RequestFailed as error:
        raise typer.Exit(report_startup_error(StartupError(f"a request of {url} failed: {error}"))) from None
    hits = [each["hits"] for each in stacks.values()]
    body = {"workers": workers, "talks": talks, "turns": turns, "flags": flags, "seed": seed}
    ratio = round(hits[-1] / hits[0], 3) if hits[0] else None
    numbers = list(stacks)
    ratio_of = [f"--bootstraps {number}" for number in (numbers[-1], numbers[0])]
    told = {**body, "bootstraps": stacks, "ratio": ratio, "ratio_of": ratio_of}
    print(json.dumps({"benchmark": "conversations", **told}))


def _different_numbers(text: str) -> tuple[int, ...]:
    """Parse the numbers of bootstraps. Raises typer.BadParameter."""
    try:
        numbers = parse_numbers(text, "--bootstraps")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if len(set(numbers)) != len(numbers):
        raise typer.BadParameter(f"--bootstraps {text}: different numbers with commas, such as 1,3")
    return numbers


async def _measure(url: str, plan: ConversationPlan) -> dict[str, Any]:
    """Hold all conversations, and return the counts of their prompt tokens. Raises RequestFailed."""
    from baton.cli.load_benchmark import WORDS, find_model
    from baton.cli.load_client import connect

    async with connect(url) as client:
        model = await find_model(client)
    rng = random.Random(f"{plan.seed} conversations")  # noqa: S311
    said = [
        [" ".join(rng.choices(WORDS, k=plan.words)) for _ in range(plan.turns)] for _ in range(plan.talks)
    ]
    gate = asyncio.Semaphore(plan.concurrency)

    async def talk(lines: list[str]) -> tuple[int, int]:
        async with gate:
            return await _talk(url, model, lines, plan.timeout_s)

    counts = await asyncio.gather(*map(talk, said))
    prompts, cached = (sum(each[place] for each in counts) for place in range(2))
    return {"prompt_tokens": prompts, "cached_tokens": cached, "hits": round(cached / prompts, 4)}


async def _talk(url: str, model: str, lines: list[str], timeout_s: float) -> tuple[int, int]:
    """Hold one conversation. Return its numbers of prompt tokens, and of those that were cached."""
    from baton.cli.load_benchmark import ApiEndpoint
    from baton.cli.load_client import RequestFailed, connect, post

    messages: list[dict[str, str]] = []
    prompts = cached = 0
    for line in lines:
        messages.append({"role": "user", "content": line})
        asked = {"model": model, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}
        async with connect(url) as client:
            response = await post(client, ApiEndpoint.CHAT.path, json.dumps(asked).encode(), timeout_s)
        if response.status != 200:
            raise RequestFailed(f"HTTP {response.status}: {response.body[:300]!r}")
        answer = json.loads(response.body)
        prompts += answer["usage"]["prompt_tokens"]
        cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    return prompts, cached
