"""Trials of constrained answers: each fits its schema at temperature 1, and is the same when workers are
killed.

`python -m tests.process.structured --schemas 1000` asks for an answer to each of so many random schemas on a
real stack, and again while prefill and decode workers are killed in turn. One JSON object; exit status 1 if
an answer does not validate, if one is another the second time, or if too many are cut off by `max_tokens`.

The model is a tiny one of random weights with the demo model's vocabulary: what it draws is any of what is
allowed, and no model could be less inclined to keep a form by itself.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from jsonschema import Draft202012Validator, ValidationError
from transformers import LlamaConfig

from tests.engine.tiny_models import save
from tests.grammars.test_schemas import random_schema
from tests.http import web
from tests.models.eight_heads import with_tokenizer
from tests.process.disturbed import ANSWER_S, AT_ONCE, Answered, Disturbance, Disturbed, command
from tests.process.load import any_prompts
from tests.process.stack import Stack, running_stack

TOKENS: Final = 900
SHORTEST, LONGEST = 500, 900
"""Shortest and longest prompt, in tokens, so that a prefill worker is usually computing."""
CUT_OFF_MAX: Final = 0.01
"""Share of answers that `max_tokens` may end: they prove nothing."""


@dataclass
class Found(Disturbance):
    schemas: int = 0
    valid: int = 0
    cut_off: int = 0
    """Answers cut off by `max_tokens`."""
    refused: int = 0
    invalid: list[str] = field(default_factory=list)
    """Answers that do not fit their schema, and failures."""
    rest: str = ""
    """Gauges that did not return to their idle values."""
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        counted = self.valid + self.cut_off + self.refused
        return (
            not (self.invalid or self.differ or self.rest)
            and counted == self.schemas > 0
            and self.cut_off <= CUT_OFF_MAX * self.schemas
        )


def tiny_model(directory: Path, demo: Path, layers: int = 2) -> Path:
    """Return a tiny model with the demo model's vocabulary and end tokens."""
    config = json.loads((demo / "config.json").read_text(encoding="utf-8"))
    shape = LlamaConfig(
        vocab_size=config["vocab_size"],
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=LONGEST + TOKENS + 1,
        initializer_range=0.2,
        tie_word_embeddings=True,
        bos_token_id=config["bos_token_id"],
        eos_token_id=config["eos_token_id"],
        pad_token_id=None,
    )
    return with_tokenizer(save(shape, directory), demo)


@contextmanager
def pairs(model: Path) -> Iterator[Stack]:
    """Two workers on each side. Their caches hold the prompts of a few requests, so that a repeated prompt is
    not cached any more."""
    with running_stack(
        str(model),
        prefill=[{"chunk_tokens": "64"}] * 2,
        decode=[{}, {}],
        dtype="float32",
        kv_cache_memory="12MiB",
    ) as stack:
        yield stack


class Asking:
    """Sender of one request for each schema, always the same."""

    def __init__(self, stack: Stack, schemas: Sequence[dict[str, Any]]) -> None:
        self._stack = stack
        self._model = web().get(f"{stack.url}/v1/models").json()["data"][0]["id"]
        self._schemas = schemas
        spread = LONGEST - SHORTEST
        lengths = [SHORTEST + 37 * number % spread for number in range(len(schemas))]
        self._prompts = any_prompts(lengths, 1_000)

    def ask(self, number: int, request_id: str) -> Answered:
        body = {
            "model": self._model,
            "prompt": self._prompts[number],
            "max_tokens": TOKENS,
            "temperature": 1,
            "seed": number,
            "structured_outputs": {"json": self._schemas[number]},
            "return_token_ids": True,
        }
        url, headers = f"{self._stack.url}/v1/completions", {"X-Request-Id": request_id}
        reply = web().post(url, json=body, headers=headers, timeout=ANSWER_S)
        if reply.status_code != 200:
            return Answered(reply.status_code, (), reply.text, "")
        (choice,) = reply.json()["choices"]
        return Answered(200, tuple(choice["token_ids"]), choice["text"], choice["finish_reason"])


def problem(schema: dict[str, Any], answer: Answered) -> str:
    """Return why the answer does not fit the schema, or an empty text."""
    try:
        checker = Draft202012Validator.FORMAT_CHECKER
        Draft202012Validator(schema, format_checker=checker).validate(json.loads(answer.text))
    except (ValidationError, ValueError) as error:
        return f"{str(error).splitlines()[0]}: {answer.text!r}"
    return ""


def undisturbed(asking: Asking, schemas: Sequence[dict[str, Any]], found: Found) -> list[Answered]:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = list(threads.map(lambda each: asking.ask(each, f"calm-{each}"), range(len(schemas))))
    found.schemas = len(schemas)
    for number, (schema, answer) in enumerate(zip(schemas, answers, strict=True)):
        if answer.status == 400:
            found.refused += 1
        elif answer.status != 200:
            found.invalid.append(f"{number}: {answer.status} {answer.text}")
        elif answer.finish == "length":
            found.cut_off += 1
        elif why := problem(schema, answer):
            found.invalid.append(f"{number}: {why}")
        else:
            found.valid += 1
    return answers


def run(stack: Stack, count: int, kills: int, limit_s: float) -> Found:
    """Raises AssertionError where no worker's end is missed by an answer within `limit_s`."""
    started, found = time.monotonic(), Found()
    schemas = [random_schema(seed) for seed in range(count)]
    start = stack.idle_gauges()
    asking = Asking(stack, schemas)
    answers = undisturbed(asking, schemas, found)
    Disturbed(stack, asking.ask, answers, found).run(kills, limit_s)
    try:
        stack.wait_idle(start)
    except AssertionError as error:
        found.rest = str(error).partition("\n----")[0]
    found.seconds = round(time.monotonic() - started, 1)
    return found


def main() -> int:
    def stack_on(folder: Path, demo: Path) -> AbstractContextManager[Stack]:
        return pairs(tiny_model(folder, demo))

    return command("structured", __doc__, "schemas", 1_000, stack_on, run)


if __name__ == "__main__":
    sys.exit(main())
