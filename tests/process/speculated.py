"""Trials of draft tokens: answers are the same with and without them, also when workers are killed.

`python -m tests.process.speculated --prompts 200` asks a real stack for an answer to each of so many prompts
without drafts, with them, and with them while prefill and decode workers are killed in turn. Every second one
is drawn at temperature 1, some with penalties, logprobs, stop ids, a grammar or several choices. One JSON
object; exit status 1 if an answer differs, or if no draft was taken.

With `BATON_TESTS_DRAFTS=model` another tiny model drafts, in place of the text. The model is a tiny one of
random weights in float32. It draws of a few tokens only, so that its answers
repeat themselves, and drafts are taken and missed, greedy or not.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final

from tests.http import web
from tests.process.disturbed import ANSWER_S, AT_ONCE, Answered, Disturbance, Disturbed, command
from tests.process.load import any_prompts
from tests.process.stack import Stack, running_stack
from tests.process.structured import tiny_model

TOKENS: Final = 160
SHORTEST: Final = 40
FEW: Final = tuple(range(1_000, 1_006))
"""Ids of the tokens that answers may have."""
DRAFTS: Final = "baton_decode_draft_tokens_total"
WORDS: Final = {"type": "array", "items": {"enum": ["sea", "sand"]}, "minItems": 30, "maxItems": 30}
KINDS: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 0, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 1, "frequency_penalty": 0.3, "top_p": 0.9},
    {"temperature": 0, "min_tokens": 40, "stop_token_ids": [FEW[0]]},
    {"temperature": 1, "n": 2},
    {"temperature": 0, "logit_bias": {str(FEW[1]): 2}},
    {"temperature": 1, "presence_penalty": 0.2, "logprobs": 1},
    {"temperature": 1, "structured_outputs": {"json": WORDS}, "allowed_token_ids": None},
)


@dataclass
class FoundDrafts(Disturbance):
    prompts: int = 0
    failed: list[str] = field(default_factory=list)
    other: list[int] = field(default_factory=list)
    """Numbers of answers that were others with drafts."""
    taken: int = 0
    missed: int = 0
    """Drafts, before anything was killed."""
    rest: str = ""
    """Gauges that did not return to their idle values."""
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        wrong = self.failed or self.other or self.differ or self.rest
        return not wrong and self.taken > 0 and self.missed > 0


@contextmanager
def drafting_pairs(model: Path, speculate: str = "ngram") -> Iterator[Stack]:
    """Two workers on each side. Their caches hold only a few requests, so that rooms are retracted. Those of
    the draft model hold fewer."""
    with running_stack(
        str(model),
        prefill=[{"chunk_tokens": "64"}] * 2,
        decode=[{"speculate": speculate, "draft_memory": "2MiB"}] * 2,
        dtype="float32",
        kv_cache_memory="12MiB",
    ) as stack:
        yield stack


class AskingDrafts:
    """Sender of one request for each prompt, always the same."""

    def __init__(self, stack: Stack, count: int) -> None:
        self._url = f"{stack.url}/v1/completions"
        self._model = web().get(f"{stack.url}/v1/models").json()["data"][0]["id"]
        self._prompts = any_prompts([SHORTEST + 7 * number % 200 for number in range(count)], 2_000)

    def plainly(self, number: int, request_id: str) -> Answered:
        return self._ask(number, request_id, speculate=False)

    def with_drafts(self, number: int, request_id: str) -> Answered:
        return self._ask(number, request_id, speculate=True)

    def _ask(self, number: int, request_id: str, *, speculate: bool) -> Answered:
        body = {
            "model": self._model,
            "prompt": self._prompts[number],
            "max_tokens": TOKENS,
            "seed": number,
            "allowed_token_ids": FEW,
            "ignore_eos": True,
            "return_token_ids": True,
            "speculate": speculate,
            **KINDS[number % len(KINDS)],
        }
        reply = web().post(self._url, json=body, headers={"X-Request-Id": request_id}, timeout=ANSWER_S)
        if reply.status_code != 200:
            return Answered(reply.status_code, (), reply.text, "")
        choices = sorted(reply.json()["choices"], key=lambda choice: choice["index"])
        ids = tuple(token for choice in choices for token in choice["token_ids"])
        texts, ends = ([choice[name] for choice in choices] for name in ("text", "finish_reason"))
        told = (choice["logprobs"]["token_logprobs"] for choice in choices if choice["logprobs"])
        return Answered(200, ids, json.dumps(texts), " ".join(ends), tuple(chain.from_iterable(told)))


def run(stack: Stack, count: int, kills: int, limit_s: float) -> FoundDrafts:
    """Raises AssertionError where no worker's end is missed by an answer within `limit_s`."""
    started, found = time.monotonic(), FoundDrafts(prompts=count)
    start = stack.idle_gauges()
    asking = AskingDrafts(stack, count)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        plain = list(threads.map(lambda each: asking.plainly(each, f"plain-{each}"), range(count)))
        drafted = list(threads.map(lambda each: asking.with_drafts(each, f"calm-{each}"), range(count)))
    found.failed = [f"{each.status} {each.text}" for each in (*plain, *drafted) if each.status != 200]
    pairs = enumerate(zip(plain, drafted, strict=True))
    found.other = [number for number, (one, other) in pairs if not one.is_that(other)]
    found.taken, found.missed = (drafts_of(stack, outcome) for outcome in ("taken", "missed"))
    Disturbed(stack, asking.with_drafts, plain, found).run(kills, limit_s)
    try:
        stack.wait_idle(start)
    except AssertionError as error:
        found.rest = str(error).partition("\n----")[0]
    found.seconds = round(time.monotonic() - started, 1)
    return found


def drafts_of(stack: Stack, outcome: str, *sources: str) -> int:
    """Return the draft tokens of all decode workers, by source. Without `sources`: of any source."""
    return round(
        sum(
            value
            for name, service in stack.services.items()
            if name.startswith("decode")
            for (sample, labels), value in service.metrics().items()
            if sample == DRAFTS and ("outcome", outcome) in labels
            if not sources or any(("source", source) in labels for source in sources)
        )
    )


def main() -> int:
    """`BATON_TESTS_DRAFTS=model`: with a smaller model that drafts."""

    def stack_on(folder: Path, demo: Path) -> AbstractContextManager[Stack]:
        if os.environ.get("BATON_TESTS_DRAFTS") == "model":
            drafts = tiny_model(folder / "drafts", demo, layers=1)
            return drafting_pairs(tiny_model(folder / "tiny", demo), f"model:{drafts}")
        return drafting_pairs(tiny_model(folder, demo))

    return command("speculated", __doc__, "prompts", 200, stack_on, run)


if __name__ == "__main__":
    sys.exit(main())
