"""Times of decode steps on vLLM's kernels: those of vLLM's own `LLM`, or those of Baton's engine.

As a program it reads {"by", "model", "device", "dtype", "page_tokens", "kv_cache_memory", "context", "rows",
"runs"} from standard input, and writes an object to the file that is its argument: medians in milliseconds by
number of rows. "by": "vllm" or "baton". Weights are any numbers in the model's shape.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

from baton.engine_interface import Row, Sequence
from baton.rooms.request import Request
from bench.report import seconds_of
from tests.vllm.conftest import settings
from tests.vllm.driving import GREEDY
from tests.vllm.oracle import make_llm

WARM_UP: Final = 3
"""Steps of each number of rows that are not counted."""
MARGIN: Final = 40
"""Further tokens of a sequence, which some draw while vLLM computes the prompts of others."""


def steps_of_vllm(asked: dict[str, Any]) -> dict[int, float]:
    """Scheduling, the step and sampling, as vLLM does them: asynchronously where that is its default."""
    from vllm import SamplingParams

    given = {"dtype": asked["dtype"], "block_size": asked["page_tokens"], "load_format": "dummy"}
    tokens = WARM_UP + asked["runs"] + MARGIN
    llm = make_llm(
        asked["model"], asked["context"] + tokens, kv_cache_memory_bytes=asked["kv_cache_memory"], **given
    )
    engine, times = llm.llm_engine, {}
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for rows in asked["rows"]:
        names = [f"{rows}-{index}" for index in range(rows)]
        for name in names:
            engine.add_request(name, {"prompt_token_ids": _prompt(asked)}, sampling)
        begun: set[str] = set()
        while len(begun) < rows:
            begun |= {each.request_id for each in engine.step() if each.outputs[0].token_ids}
        times[rows] = _median_ms(engine.step, asked["runs"])
        engine.abort_request(names)
        while engine.has_unfinished_requests():
            engine.step()
    return times


def steps_of_baton(asked: dict[str, Any]) -> dict[int, float]:
    """Rows to vLLM's worker, the step and Baton's draw."""
    from baton.vllm.engine_startup import start_rank

    names = ("device", "dtype", "page_tokens", "kv_cache_memory")
    engine = start_rank(
        settings(asked["model"], load_format="dummy", **{name: asked[name] for name in names}), 1
    )
    engine.bind_thread()
    tokens, times = WARM_UP + asked["runs"] + MARGIN, {}
    pages = engine.cache.group.pages_for(asked["context"] + tokens)
    for count in asked["rows"]:
        sequences = [
            Sequence(Request(f"{count}-{index}", tuple(_prompt(asked)), tokens, sampling=GREEDY), [])
            for index in range(count)
        ]
        tables = [range(index * pages, (index + 1) * pages) for index in range(count)]

        def step(sequences: list[Sequence] = sequences, tables: list[range] = tables) -> None:
            pairs = zip(sequences, tables, strict=True)
            rows = [Row(each, each.length - 1, each.length, (table,), sample=True) for each, table in pairs]
            for sequence, taken in zip(sequences, engine.step(rows), strict=True):
                assert isinstance(taken, tuple), taken
                sequence.output.append(taken[0].id)

        for sequence, table in zip(sequences, tables, strict=True):
            [taken] = engine.step([Row(sequence, 0, asked["context"], (table,), sample=True)])
            assert isinstance(taken, tuple), taken
            sequence.output.append(taken[0].id)
        times[count] = _median_ms(step, asked["runs"])
        for sequence in sequences:
            engine.release(sequence)
    return times


def _prompt(asked: dict[str, Any]) -> list[int]:
    return list(range(7, 7 + asked["context"]))


def _median_ms(step: Callable[[], object], runs: int) -> float:
    for _ in range(WARM_UP):
        step()
    return round(1000 * median(seconds_of(step) for _ in range(runs)), 3)


if __name__ == "__main__":
    question = json.load(sys.stdin)
    by = {"vllm": steps_of_vllm, "baton": steps_of_baton}[question["by"]]
    Path(sys.argv[1]).write_text(json.dumps(by(question)))
