"""Compare a stack whose workers compute on vLLM with vLLM's own `LLM`, for a model of your own.

    .venv/vllm/bin/python -m tests.vllm.real_model MODEL

MODEL is what `--model` takes. Random prompts (30 of up to 1,500 tokens) are answered greedily in float32,
1, 4 and 16 at a time. Four are drawn at temperature 1 while decode is killed in mid-stream. Prints one JSON
object. The exit status is 1 if an answer differs. It takes minutes, and twice the memory of the model.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import httpx

from baton.models.engine_features import missing_in_vllm
from baton.models.model_files import prepare, resolve
from baton.runtime.model_options import LoadFormat
from tests.process.stack import SPLIT, running_stack
from tests.vllm.completions import CALL_S, TOKENS, Restart, answer, stream
from tests.vllm.oracle import vllm_greedy

IDS: Final = range(1_000, 10_000)
"""Token ids that prompts are drawn from. Models have special ids before them, or behind."""
WIDTHS: Final = (1, 4, 16)
STREAMED_TOKENS: Final = 60

Answers = list[list[int]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.real_model", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--longest", type=int, default=1_500, help="most tokens of a prompt")
    args = parser.parse_args()
    directory = prepare(resolve(args.model, LoadFormat.AUTO, missing_in_vllm), lambda line: None)
    numbers = random.Random(11)
    prompts = [numbers.choices(IDS, k=numbers.randint(5, args.longest)) for _ in range(args.prompts)]
    with tempfile.TemporaryDirectory() as folder:
        wanted = vllm_greedy(directory, prompts, TOKENS, Path(folder))
    told: dict[str, Any] = {
        "model": directory.name,
        "prompts": args.prompts,
        "longest": max(map(len, prompts)),
    }
    told["tokens"] = sum(map(len, prompts))
    with running_stack(
        str(directory),
        by_commands=True,
        engine="vllm",
        dtype="float32",
        page_tokens="32",
        kv_cache_memory="1GiB",
        decode=(SPLIT,),
    ) as stack:
        start = stack.idle_gauges()
        with httpx.Client(base_url=stack.url, timeout=CALL_S) as client:
            for width in WIDTHS:
                found = _together(lambda prompt: answer(client, prompt), prompts, width)
                told[f"equal_{width}_at_a_time"] = _equal(found, wanted)
            drawn: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": STREAMED_TOKENS}
            short = sorted(prompts, key=len)[:4]
            undisturbed = _together(lambda prompt: stream(client, prompt, **drawn), short, 4)
            kill = Restart(stack, "decode-0")
            found = _together(lambda prompt: stream(client, prompt, kill, **drawn), short, 4)
            told["equal_behind_a_killed_decode"] = _equal(found, undisturbed)
            told["was_killed"] = kill.was_made
            stack.wait_ready()
        stack.wait_idle(start)
    told["ok"] = all(told[name] == args.prompts for name in told if name.endswith("_at_a_time")) and (
        told["equal_behind_a_killed_decode"] == len(short) and kill.was_made
    )
    sys.stdout.write(json.dumps(told) + "\n")
    return 0 if told["ok"] else 1


def _together(
    ask: Callable[[Sequence[int]], list[int]], prompts: Sequence[Sequence[int]], width: int
) -> Answers:
    with ThreadPoolExecutor(width) as threads:
        return list(threads.map(ask, prompts))


def _equal(found: Answers, wanted: Answers) -> int:
    """Return the number of equal answers."""
    return sum(mine == theirs for mine, theirs in zip(found, wanted, strict=True))


if __name__ == "__main__":
    sys.exit(main())
