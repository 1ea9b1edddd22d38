"""What does one choice of an answer say, as its tokens come in?

Everything here depends on the tokens alone, not on how they were batched.
"""

from dataclasses import dataclass, field

from services.openai.backend import TokenBatch
from services.openai.detokenizer import Detokenizer
from services.openai.schemas import GenerationRequest
from services.openai.stop_strings import StopStrings
from services.openai.tokenizer import Tokenizer
from services.rooms.request import FinishReason, Request, Token


@dataclass(slots=True)
class Delta:
    """What one batch added to a choice."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    """All that count, those of a stop string or an end-of-sequence token included."""
    offsets: list[int] = field(default_factory=list)
    """For each token: how many characters of output came before it."""
    finish: FinishReason | None = None


class Choice:
    """One request's answer. Feed it batches until a delta has a `finish`."""

    __slots__ = (
        "_chars",
        "_detokenizer",
        "_include_stop",
        "_min_tokens",
        "_stops",
        "finish",
        "index",
        "output_tokens",
        "request",
    )

    def __init__(self, index: int, request: Request, body: GenerationRequest, tokenizer: Tokenizer) -> None:
        self.index = index
        self.request = request
        self.output_tokens = 0
        self.finish: FinishReason | None = None
        """Once its last delta was passed on."""
        self._min_tokens = request.min_tokens
        self._include_stop = body.include_stop_str_in_output
        self._detokenizer = Detokenizer(
            tokenizer.codec,
            request.prompt,
            skip_special_tokens=body.skip_special_tokens,
            alone=tokenizer.alone,
        )
        self._stops = StopStrings(body.stop, include=self._include_stop)
        self._chars = 0

    @property
    def stopped(self) -> bool:
        """A stop string ended it, not the backend."""
        return self._stops.matched is not None

    def take(self, batch: TokenBatch) -> Delta:
        """Add the next batch. Tokens behind a completed stop string are dropped."""
        delta = Delta()
        last = len(batch.tokens) - 1
        for place, token in enumerate(batch.tokens):
            ends = batch.finish is FinishReason.STOP and place == last
            self.output_tokens += 1
            delta.tokens.append(token)
            delta.offsets.append(self._chars)
            if not ends or self._include_stop:
                self._write(delta, self._detokenizer.push(token.id))
            if self.stopped:
                return delta
        if batch.finish is not None:
            self._write(delta, self._detokenizer.flush())
            delta.text += self._stops.flush()
            delta.finish = FinishReason.STOP if self.stopped else batch.finish
        return delta

    def _write(self, delta: Delta, text: str) -> None:
        self._chars += len(text)
        delta.text += self._stops.push(text, armed=self.output_tokens > self._min_tokens)
        if self.stopped:
            delta.finish = FinishReason.STOP
