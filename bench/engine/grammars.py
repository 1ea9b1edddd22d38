"""Longest pause of an event loop while grammars are compiled.

The bootstrap compiles grammars in a process of its own, a worker in a thread. Neither may block other
requests. The loop wakes each millisecond and notes the longest gap.
"""

import asyncio
import json
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from baton.rooms.request import Grammar, GrammarKind
from baton.runtime.model_options import LoadFormat
from bench.report import Runs

if TYPE_CHECKING:
    from baton.grammars.grammar_cache import GrammarCache
    from baton.grammars.grammar_check import GrammarChecker

TICK_S: Final = 0.001
REST_S: Final = 0.1
AT_ONCE: Final = 4
"""Grammars of each kind that are compiled at once."""


def grammars(
    runs: Runs = 5,
    model: Annotated[str, typer.Option(help="A model directory, a GGUF file, or the word demo.")] = "demo",
) -> None:
    """An event loop's longest gap while grammars are compiled, beside its longest at rest."""
    from baton.models.model_files import prepare, resolve

    directory = prepare(resolve(model, LoadFormat.AUTO), lambda _: None)
    from baton.grammars.grammar_cache import GrammarCache
    from baton.grammars.grammar_check import GrammarChecker
    from baton.grammars.vocabulary import read_vocabulary
    from baton.models.model_facts import read_model
    from baton.models.tokenizer_files import reference_tokenizer

    facts = read_model(directory)
    shelf = GrammarCache(lambda: read_vocabulary(directory, facts))
    shelf.warm_up()  # as a worker does before it is ready
    backend = reference_tokenizer(directory).backend_tokenizer
    judge = GrammarChecker(backend, facts.vocab_size, facts.eos_token_ids)
    try:
        body = asyncio.run(_measured(runs, shelf, judge))
    finally:
        judge.close()
    print(json.dumps({"benchmark": "grammars", "runs": runs} | body))


def _form(name: str, number: int) -> Grammar:
    """Return a large grammar that nothing has compiled before."""
    own = f"{name}{number}"
    match name:
        case "object":
            words = {"enum": [f"{own}-{word}" for word in range(20)]}
            names = [f"{own}_{place}" for place in range(150)]
            schema: dict[str, Any] = {"type": "object", "properties": dict.fromkeys(names, words)}
            text = json.dumps(schema | {"required": names, "additionalProperties": False})
        case "words":
            text = json.dumps({"enum": [f"{own}-{word}" for word in range(5_000)]})
        case _:
            text = "|".join(f"{own}x{word}[0-9]{{1,{word % 30 + 2}}}" for word in range(1_500))
            return Grammar(GrammarKind.REGEX, text)
    return Grammar(GrammarKind.JSON_SCHEMA, text)


FORMS: Final = ("object", "words", "regex")


async def _measured(runs: int, shelf: "GrammarCache", judge: "GrammarChecker") -> dict[str, object]:
    from baton.grammars.grammar_compiler import GrammarRefused

    gaps: dict[str, list[float]] = {"at rest": [], "worker": [], "bootstrap": []}
    spent: dict[str, list[float]] = {"worker": [], "bootstrap": []}
    pool = ThreadPoolExecutor(AT_ONCE)

    async def in_worker(grammar: Grammar) -> None:
        await asyncio.wrap_future(shelf.check(grammar))

    async def in_bootstrap(grammar: Grammar) -> None:
        told = await asyncio.get_running_loop().run_in_executor(pool, judge.check, grammar, False)
        if isinstance(told, str):
            raise GrammarRefused(told)

    asks: dict[str, Callable[[Grammar], Awaitable[None]]] = {
        "worker": in_worker,
        "bootstrap": in_bootstrap,
    }
    first = {name: (await _watched(ask(Grammar(GrammarKind.REGEX, "a"))))[0] for name, ask in asks.items()}
    number = 0
    for _ in range(runs):
        for form in FORMS:
            asked = [_form(form, number + each) for each in range(2 * AT_ONCE)]
            number += len(asked)
            gaps["at rest"].append((await _watched(asyncio.sleep(REST_S)))[0])
            for name, ask in asks.items():
                several, asked = asked[:AT_ONCE], asked[AT_ONCE:]
                gap, took = await _watched(asyncio.gather(*map(ask, several)))
                gaps[name].append(gap)
                spent[name].append(took / AT_ONCE)
    return {
        "grammars": number,
        "longest_gap_ms": {name: _ms(max(each)) for name, each in gaps.items()},
        "median_gap_ms": {name: _ms(statistics.median(each)) for name, each in gaps.items()},
        "first_gap_ms": {name: _ms(gap) for name, gap in first.items()},
        "each_takes_ms": {name: _ms(statistics.median(each)) for name, each in spent.items()},
    }


async def _watched(work: Awaitable[object]) -> tuple[float, float]:
    """Return the loop's longest gap until the work is done, and the work's duration, in seconds."""
    started = perf_counter()
    async with _watching() as gaps:
        await work
    return max(gaps), perf_counter() - started


@asynccontextmanager
async def _watching() -> AsyncIterator[list[float]]:
    gaps: list[float] = [0.0]
    before = perf_counter()

    async def watch() -> None:
        nonlocal before
        while True:
            await asyncio.sleep(TICK_S)
            now = perf_counter()
            gaps.append(now - before - TICK_S)
            before = now

    watching = asyncio.create_task(watch())
    try:
        yield gaps
        gaps.append(perf_counter() - before)
    finally:
        watching.cancel()


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
