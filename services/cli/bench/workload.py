"""What is asked of the server, and when? The same for the same seed, whichever server it is."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from baton.cli.bench.lengths import Lengths

FIRST_ID: Final = 100
"""Ids below it are special tokens in many vocabularies."""
IN_FLIGHT_MAX: Final = 1024
"""Requests at a time where they come by a schedule, unless something else is said."""

WORDS: Final = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "for",
    "it",
    "was",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "at",
    "be",
    "this",
    "from",
    "have",
    "or",
    "by",
    "one",
    "had",
    "not",
    "but",
    "what",
    "all",
    "were",
    "when",
    "we",
    "there",
    "can",
    "an",
    "your",
    "which",
    "their",
    "said",
    "if",
    "do",
    "will",
    "each",
    "about",
    "how",
    "up",
    "out",
)
"""One token each, with the space before it, in the vocabularies of most models."""


class ArrivalProcess(StrEnum):
    POISSON = "poisson"
    FIXED = "fixed"


class ApiEndpoint(StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is ApiEndpoint.CHAT else "/v1/completions"


class PromptForm(StrEnum):
    """How prompts are written."""

    IDS = "ids"
    """As token ids, of exactly the length asked for."""
    TEXT = "text"
    """As words, as many as make the length asked for by the server's own count of one of them."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one kind."""

    prompt_tokens: Lengths
    output_tokens: Lengths
    shared_prefix: float = 0.0
    """Share of each prompt that it has in common with others, 0 to 1."""
    prefixes: int = 1
    """How many different common prefixes there are, drawn evenly."""
    vocabulary: int = 32_000
    """Token ids are below this."""
    seed: int = 0
    endpoint: ApiEndpoint = ApiEndpoint.COMPLETIONS

    def described(self) -> dict[str, Any]:
        return {
            "endpoint": self.endpoint.path,
            "prompt_tokens": str(self.prompt_tokens),
            "output_tokens": str(self.output_tokens),
            "shared_prefix": self.shared_prefix,
            "prefixes": self.prefixes,
            "vocabulary": self.vocabulary,
            "seed": self.seed,
        }


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    body: bytes
    at_s: float = 0.0
    """Since the start, where requests come by a schedule."""


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes requests for one server."""

    model: str
    endpoint: ApiEndpoint
    prompts: PromptForm
    overhead: int = 0
    """Tokens that the server counts beyond a text's words: a template, a mark of the beginning."""
    ignore_eos: bool = True
    ids_refused: str = ""
    """What the server said to token ids, if it was asked for them and does not take them."""

    def described(self) -> dict[str, Any]:
        refused = {"token_ids_refused": self.ids_refused} if self.ids_refused else {}
        return {"model": self.model, "prompts": self.prompts.value, **refused}

    def body(self, pieces: Sequence[int], max_tokens: int, priority: int | None = None) -> bytes:
        """`pieces`: one number per token of the prompt. `priority`: lower is earlier; None: not said."""
        told: dict[str, Any] = {"model": self.model}
        if self.prompts is PromptForm.IDS:
            told["prompt"] = list(pieces)
        else:
            words = pieces[: max(1, len(pieces) - self.overhead)]
            text = " ".join(WORDS[piece % len(WORDS)] for piece in words)
            if self.endpoint is ApiEndpoint.CHAT:
                told["messages"] = [{"role": "user", "content": text}]
            else:
                told["prompt"] = text
        told |= {
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            told["ignore_eos"] = True
        if priority is not None:
            told["priority"] = priority
        return json.dumps(told, separators=(",", ":")).encode()


def make_asks(workload: Workload, writer: Writer, count: int, turn: int) -> list[Ask]:
    """`count` requests. Beyond their common prefixes, those of one `turn` have no prompt of another's, nor
    the beginning of one of other lengths: a cache would know it."""
    longest, lengths = workload.prompt_tokens.longest, f"{workload.prompt_tokens}/{workload.output_tokens}"
    common = [
        _tokens(_chance(workload.seed, f"{lengths}, prefix", index), longest, workload)
        for index in range(workload.prefixes)
    ]
    rng = _chance(workload.seed, f"{lengths}, turn", turn)
    asks = []
    for _ in range(count):
        length = workload.prompt_tokens.draw(rng)
        shared = round(length * workload.shared_prefix)
        pieces = rng.choice(common)[:shared] + _tokens(rng, length - shared, workload)
        asks.append(Ask(writer.body(pieces, workload.output_tokens.draw(rng))))
    return asks


def schedule(asks: Sequence[Ask], rate: float, arrivals: ArrivalProcess, seed: int, turn: int) -> list[Ask]:
    """The same requests, `rate` a second: evenly, or at random as independent callers come."""
    rng = _chance(seed, "arrivals", turn)
    at_s, timed = 0.0, []
    for ask in asks:
        timed.append(Ask(ask.body, at_s))
        at_s += 1 / rate if arrivals is ArrivalProcess.FIXED else rng.expovariate(rate)
    return timed


def _chance(seed: int, what: str, index: int) -> random.Random:
    return random.Random(f"{seed} {what} {index}")  # noqa: S311


def _tokens(rng: random.Random, count: int, workload: Workload) -> list[int]:
    return [rng.randrange(FIRST_ID, workload.vocabulary) for _ in range(count)]
