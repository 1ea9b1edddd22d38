"""What does a recorded trace ask of a server, and when? Two formats are read, told apart by their first line.

Mooncake's   JSON, an object a line: `timestamp` in ms, `input_length`, `output_length`, `hash_ids` of the
             prompt's blocks of 512 tokens, in order. Two prompts begin alike as far as their ids are equal.
Azure's      CSV: TIMESTAMP, ContextTokens, GeneratedTokens
"""

import csv
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, Field, ValidationError

from baton.cli.bench.workload import FIRST_ID
from baton.runtime.errors import SettingsError

BLOCK_TOKENS: Final = 512

Count = Annotated[int, Field(ge=0, le=10_000_000)]


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One line of a trace."""

    at_s: float
    """Since the first."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """What its prompt consists of, block by block; none are known where the trace does not tell."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace as it is asked."""

    requests: tuple[TracedRequest, ...]
    block_tokens: float
    shortened: int = 0
    """Requests that were longer than `tokens_max`."""

    def prompt(self, place: int, vocabulary: int, seed: int) -> list[int]:
        """Token ids of one of the requests: equal blocks in the same place have equal ones."""
        asked = self.requests[place]
        ids: list[int] = []
        for index, block in enumerate(asked.blocks):
            size = round((index + 1) * self.block_tokens) - round(index * self.block_tokens)
            ids += _tokens(f"{seed} block {block}", size, vocabulary)
        short = asked.prompt_tokens - len(ids)
        if short > 0:
            ids += _tokens(f"{seed} request {place}", short, vocabulary)
        return ids[: asked.prompt_tokens]


def read_trace(path: Path, requests_max: int | None = None) -> tuple[TracedRequest, ...]:
    """In the order of their times. Raises SettingsError, which names the line."""
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            first = lines.readline()
            lines.seek(0)
            each = _mooncake(lines) if first.startswith("{") else _azure(lines)
            requests = tuple(islice(each, requests_max))
    except (OSError, ValueError) as error:
        raise SettingsError(f"trace {path}: {error}") from None
    if not requests:
        raise SettingsError(f"trace {path}: it has no requests")
    begin = min(request.at_s for request in requests)
    ordered = sorted(requests, key=lambda request: request.at_s)
    return tuple(replace(request, at_s=request.at_s - begin) for request in ordered)


def replayed(
    trace: Sequence[TracedRequest], time_scale: float, length_scale: float, tokens_max: int | None = None
) -> Replay:
    """With all times and lengths multiplied, no length below 1. A request of more than `tokens_max` tokens
    loses the end of its answer, down to half of that, and the end of its prompt."""
    requests, shortened = [], 0
    for request in trace:
        prompt = max(1, round(request.prompt_tokens * length_scale))
        output = max(1, round(request.output_tokens * length_scale))
        if tokens_max is not None and prompt + output > tokens_max:
            output = min(output, tokens_max // 2)
            prompt = min(prompt, tokens_max - output)
            shortened += 1
        requests.append(TracedRequest(request.at_s * time_scale, prompt, output, request.blocks))
    return Replay(tuple(requests), BLOCK_TOKENS * length_scale, shortened)


class _MooncakeLine(BaseModel):
    timestamp: Annotated[float, Field(ge=0)]
    input_length: Count
    output_length: Count
    hash_ids: tuple[int, ...] = ()


class _AzureLine(BaseModel):
    TIMESTAMP: datetime
    ContextTokens: Count
    GeneratedTokens: Count


def _mooncake(lines: Iterable[str]) -> Iterator[TracedRequest]:
    """Raises ValueError."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            with _of_line(number):
                told = _MooncakeLine.model_validate_json(line)
            yield TracedRequest(told.timestamp / 1000, told.input_length, told.output_length, told.hash_ids)


def _azure(lines: Iterable[str]) -> Iterator[TracedRequest]:
    """Raises ValueError."""
    table = csv.DictReader(lines)
    if not set(_AzureLine.model_fields) <= set(table.fieldnames or ()):
        raise ValueError(f"line 1: neither JSON nor a table with {', '.join(_AzureLine.model_fields)}")
    for row in table:
        with _of_line(table.line_num):
            told = _AzureLine.model_validate(row)
        at = told.TIMESTAMP if told.TIMESTAMP.tzinfo else told.TIMESTAMP.replace(tzinfo=UTC)
        yield TracedRequest(at.timestamp(), told.ContextTokens, told.GeneratedTokens)


@contextmanager
def _of_line(number: int) -> Iterator[None]:
    """What is wrong is told of this line."""
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"line {number}: {where}{': ' if where else ''}{first['msg']}") from None


def _tokens(of: str, count: int, vocabulary: int) -> list[int]:
    return random.Random(of).choices(range(FIRST_ID, vocabulary), k=count)  # noqa: S311
