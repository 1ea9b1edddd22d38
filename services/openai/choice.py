"""What does one choice of an answer say, as its tokens come in?

Everything here depends on the tokens alone, not on how they were batched.
"""

from collections.abc import Sequence
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
    tokens: Sequence[Token] = ()
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
        "_may_stop",
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
        self._may_stop = bool(body.stop)
        self._chars = 0

    @property
    def stopped(self) -> bool:
        """A stop string ended it, not the backend."""
        return self._stops.matched is not None

    def take(self, batch: TokenBatch) -> Delta:
        """Add the next batch. Tokens behind a completed stop string are dropped."""
        tokens, finish = batch
        said = len(tokens) - (finish is FinishReason.STOP and not self._include_stop)
        texts: list[str] = []
        offsets: list[int] = []
        for count, token in enumerate(tokens, 1):
            offsets.append(self._chars)
            self.output_tokens += 1
            if count > said:
                break
            texts.append(self._passed(self._detokenizer.push(token.id)))
            if self.stopped:
                return Delta("".join(texts), tokens[:count], offsets, FinishReason.STOP)
        if finish is not None:
            texts += self._passed(self._detokenizer.flush()), self._stops.flush()
            if self.stopped:
                finish = FinishReason.STOP
        return Delta("".join(texts), tokens, offsets, finish)

    def _passed(self, text: str) -> str:
        """What may be said of it now."""
        self._chars += len(text)
        if not self._may_stop:
            return text
        return self._stops.push(text, armed=self.output_tokens > self._min_tokens)
