"""Routers of one stack for tests of resumed streams: they share a key, and their workers draw equal tokens.

The tokens depend on the request and the seed alone. How they are batched, and how the choices alternate, is
drawn anew for each request.
"""

import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.api.backend import Limits
from baton.api.served_model import ServedModel
from baton.api.settings import ApiSettings
from baton.api.text.tokenizer import Tokenizer
from baton.api.tools.format_detection import model_formats
from baton.grammars.grammar_compiler import compile_grammar
from baton.grammars.vocabulary import vocabulary_of
from baton.rooms.request import FinishReason, Request, Score, Token, TokenBatch
from tests.api import tiny
from tests.api.scripted import ScriptedBackend, Step, scores_of
from tests.support.manual_clock import ManualClock

KEY: Final = b"a key that two routers share"
SEED: Final = "SEED"
"""Place in a text that the model writes, which depends on the seed."""
BEGUN_MS: Final = 1_700_000_000_000
LIMITS: Final = Limits(8192, 8000, 8192, 8192)
TEMPLATE: Final = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}{{ strftime_now('%H:%M:%S') }}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""Chat template of a model that may reason, and that is told the time."""


def model(fingerprint: str = "") -> ServedModel:
    reference = copy(tiny.byte_level())
    reference.chat_template = TEMPLATE
    tokenizer = Tokenizer(reference)
    formats = model_formats(tokenizer, "")
    return ServedModel(
        tiny.MODEL, tokenizer, (tiny.END_ID,), len(reference), formats=formats, fingerprint=fingerprint
    )


@dataclass
class Writer:
    """Model that writes a text, or random tokens. A grammar holds either."""

    text: str = ""
    """Text to write. SEED in it is replaced by the seed. Empty: random tokens."""
    tokens: int = 30
    """Number of random tokens."""
    known: dict[Any, list[int]] = field(default_factory=dict)

    def draw(self, request: Request, choice: int) -> list[int]:
        """Return the output tokens of one choice, which depend on the prompt and the choice's seed."""
        seed = request.choice(choice).sampling.seed
        key = request.prompt, seed, request.grammar, request.max_tokens
        if key not in self.known:
            self.known[key] = self._draw(request, seed)
        return self.known[key]

    def _draw(self, request: Request, seed: int) -> list[int]:
        own, rng = model(), random.Random(f"{seed} {request.prompt}")
        text = self.text.replace(SEED, str(seed))
        if text:
            wanted = [*tiny.ids(text), tiny.END_ID]
        else:
            wanted = [rng.randrange(3, own.vocabulary) for _ in range(self.tokens)] + [tiny.END_ID]
        if request.grammar is None:
            return wanted[: request.max_tokens]
        codec = own.tokenizer.codec
        fold = compile_grammar(request.grammar, vocabulary_of(codec, own.vocabulary, own.eos_token_ids))
        output: list[int] = []
        while len(output) < request.max_tokens and tiny.END_ID not in output:
            mask = fold.allowed(request, output)
            allowed = [id_ for id_ in range(own.vocabulary) if mask[id_ // 8] >> id_ % 8 & 1]
            at = len(output)
            next_ = wanted[at] if output == wanted[:at] and at < len(wanted) else tiny.END_ID
            output.append(next_ if next_ in allowed else rng.choice(allowed))
        return output


@dataclass
class Pace:
    """How tokens come: drawn anew for each request."""

    seed: int

    def steps(self, request: Request, writer: Writer) -> list[Step]:
        self.seed += 1
        rng, scores = random.Random(self.seed), scores_of(request)
        left = [_tokens(request, writer.draw(request, choice)) for choice in range(request.choices)]
        steps: list[Step] = []
        while any(left):
            choice = rng.choice([place for place, each in enumerate(left) if each])
            count = rng.choice((1, 1, 2, 3, 5))
            tokens, left[choice] = left[choice][:count], left[choice][count:]
            steps.append(_batch(request, choice, tokens, () if steps else scores, ended=not left[choice]))
        return steps


def _tokens(request: Request, ids: Sequence[int]) -> list[Token]:
    top = request.sampling.top_logprobs
    if top is None:
        return [Token(id_) for id_ in ids]
    return [Token(id_, -(id_ % 9) / 8, tuple((10 + each, -2.0 - each) for each in range(top))) for id_ in ids]


def _batch(
    request: Request, choice: int, tokens: Sequence[Token], scores: tuple[Score, ...], *, ended: bool
) -> TokenBatch:
    finish = None
    if ended:
        finish = FinishReason.STOP if tokens[-1].id == tiny.END_ID else FinishReason.LENGTH
    return TokenBatch(tuple(tokens), finish, choice, scores)


@dataclass(frozen=True)
class Event:
    """One event of a stream."""

    raw: str
    id: str
    data: Any
    """JSON object, or the text `[DONE]`."""


@dataclass
class Router:
    """One router, and an HTTP client of it."""

    http: httpx.AsyncClient
    backend: ScriptedBackend

    async def stream(self, path: str, body: dict[str, Any], after: str = "", **headers: str) -> list[Event]:
        """Return the events of a stream. `after`: id of the event behind which it is continued."""
        reply = await self.post(path, body, after, **headers)
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        return events_of(reply.text)

    async def post(self, path: str, body: dict[str, Any], after: str = "", **headers: str) -> httpx.Response:
        if after:
            headers["last-event-id"] = after
        return await self.http.post(path, json=body, headers=headers)


def events_of(text: str) -> list[Event]:
    events = []
    for block in text.split("\n\n"):
        fields = dict(line.partition(": ")[::2] for line in block.splitlines())
        if "data" in fields:
            data = fields["data"]
            value = data if data == "[DONE]" else json.loads(data)
            events.append(Event(block, fields.get("id", ""), value))
    return events


@asynccontextmanager
async def router(
    writer: Writer,
    *,
    pace: int = 0,
    later_s: int = 0,
    limits: Limits = LIMITS,
    key: bytes = KEY,
    served: ServedModel | None = None,
) -> AsyncIterator[Router]:
    """A router whose clock is `later_s` behind the first one's."""
    own = Pace(pace)
    backend = ScriptedBackend(lambda request: own.steps(request, writer), limits)
    settings, clock = ApiSettings(reasoning_key=key), ManualClock(wall_ms=BEGUN_MS + later_s * 1000)
    app = create_app(backend, served or model(), CollectorRegistry(), settings, clock=clock)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield Router(http, backend)
