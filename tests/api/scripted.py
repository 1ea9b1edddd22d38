"""A backend that plays a script, for tests of the HTTP API."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from baton.api.backend import Hangup, Limits, client_gone
from baton.rooms.request import FinishReason, Request, Score, Token, TokenBatch
from tests.api import tiny

Step = TokenBatch | BaseException | asyncio.Event
"""Tokens to deliver, something to raise, or something to wait for."""

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
LIMITS = Limits(context_tokens=512, prompt_tokens=400, sequence_tokens=450)


def batch(
    ids: Sequence[int], finish: FinishReason | None = None, top: int | None = None, choice: int = 0
) -> TokenBatch:
    """Return a batch of tokens with invented log-probabilities, with `top` alternatives each."""
    if top is None:
        return TokenBatch(tuple(Token(id_) for id_ in ids), finish, choice)
    others = tuple((10 + place, -2.0 - place) for place in range(top))
    return TokenBatch(tuple(Token(id_, -0.5, others) for id_ in ids), finish, choice)


def saying(text: str, *, finish: FinishReason = STOP, top: int | None = None) -> list[Step]:
    """Return the steps of a text, one token a batch. A STOP is the end-of-sequence token."""
    output = tiny.ids(text)
    if finish is STOP:
        output.append(tiny.END_ID)
    last = len(output) - 1
    return [batch([id_], finish if place == last else None, top) for place, id_ in enumerate(output)]


def in_turn(*scripts: Sequence[Step]) -> list[Step]:
    """Return the steps of several choices, one step of each in turn."""
    told = [
        [
            TokenBatch(each.tokens, each.finish, place, each.scores) if isinstance(each, TokenBatch) else each
            for each in script
        ]
        for place, script in enumerate(scripts)
    ]
    return [step for steps in zip_longest(*told) for step in steps if step is not None]


def scores_of(request: Request) -> tuple[Score, ...]:
    """Return scores of the prompt: token t has log-probability -(t % 7) / 8 - 1/8, and every third token is
    the likeliest at its position."""
    if request.prompt_logprobs is None:
        return ()
    told = []
    for place, token in enumerate(request.prompt[1:]):
        own = -(token % 7) / 8 - 0.125
        first = (token, own) if place % 3 == 0 else (token + 1, own / 2)
        top = (first, *((each, -9.0) for each in range(3, 9)))[: request.prompt_logprobs]
        told.append(Score(own, 1 if place % 3 == 0 else 2, top))
    return tuple(told)


@dataclass
class Stream:
    request: Request
    script: Sequence[Step]
    cached_tokens: int = 0
    hangups: list[Hangup] = field(default_factory=list)
    ended: bool = False
    """Whether the stream was read to its finish, or failed by itself."""
    over: set[int] = field(default_factory=set)
    """Choices that finished."""
    enough: list[int] = field(default_factory=list)
    """Choices that the reader ended."""
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)
    read: int = 0

    played: int = 0
    """Steps of the script."""

    async def next(self) -> TokenBatch:
        while True:
            await asyncio.sleep(0)
            step = self.script[self.played]
            self.played += 1
            match step:
                case asyncio.Event():
                    await step.wait()
                case TokenBatch() if step.choice in self.enough:
                    pass
                case TokenBatch():
                    self.cached_tokens = 3
                    self.read += 1
                    if self.read == 1:
                        scores = step.scores or scores_of(self.request)
                        step = TokenBatch(step.tokens, step.finish, step.choice, scores)
                    if step.finish is not None:
                        self.over.add(step.choice)
                        self.ended = len(self.over.union(self.enough)) == self.request.choices
                    return step
                case _:
                    self.ended = True
                    raise step

    def end_choice(self, choice: int) -> None:
        self.enough.append(choice)

    async def hang_up(self, why: Hangup) -> None:
        self.hangups.append(why)
        self.hung_up.set()


Script = Callable[[Request], Sequence[Step] | BaseException]


@dataclass
class ScriptedBackend:
    """A backend that plays a script for each request: the steps of its answer, or an error of `generate`."""

    script: Script = field(default=lambda _: saying("Hello world"))
    known_limits: Limits = LIMITS
    streams: list[Stream] = field(default_factory=list)
    asked: list[Request] = field(default_factory=list)
    waits: tuple[int, ...] | None = None
    """The prompt that gets no room, however long it waits."""
    given_up: list[Hangup] = field(default_factory=list)
    """Reasons for which waiting requests were cancelled."""

    def limits(self) -> Limits:
        return self.known_limits

    async def generate(self, request: Request, why: Callable[[], Hangup] = client_gone) -> Stream:
        self.asked.append(request)
        if request.prompt == self.waits:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.given_up.append(why())
                raise
        script = self.script(request)
        if isinstance(script, BaseException):
            raise script
        stream = Stream(request, script)
        self.streams.append(stream)
        return stream

    @property
    def left_open(self) -> list[Stream]:
        return [stream for stream in self.streams if not stream.ended and not stream.hangups]
