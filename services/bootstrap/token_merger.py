"""Merge of the tokens that both workers of a room send: in one order, and each position once.

Tokens are merged by their position in a choice's output. If prefill alone can report the first token with its
log-probabilities, messages of decode are stored until it has.
"""

from collections.abc import Sequence
from typing import NamedTuple

from baton.api.backend import TokenBatch
from baton.rooms.plurals import counted
from baton.rooms.request import FinishReason, Request, Score, Token
from baton.wire.conversions import Malformed


class TokensLost(Exception):
    """Error: decode left out tokens of a choice, or sent more after the last one."""


class TokenMessage(NamedTuple):
    """Tokens of one choice that came in one message from a worker."""

    choice: int
    first: int
    """Position of the message's first token in the output of its choice."""
    tokens: tuple[Token, ...]
    finish: FinishReason | None
    """Finish reason of the choice, if the message has its last token. None otherwise."""


class TokenMerger:
    """Merger of the tokens that the two workers of a room send. It passes each position on once, and stores
    tokens that have to wait."""

    def __init__(self, request: Request, decode: str, *, awaits_prefill: bool) -> None:
        """Make a merger without tokens. `decode`: name of the decode worker. `awaits_prefill`: whether to
        store messages of decode until `release`."""
        self._request = request
        self._decode = decode
        self.given = len(request.output)
        """Number of output tokens of each choice that earlier rooms of the request have passed on."""
        self.going = set(range(request.choices))
        """Indices of the choices that are not complete yet."""
        self._next = [self.given] * request.choices
        """Position of the next token to pass on in the output of each choice, by choice index."""
        self._scores: list[Score] = []
        """Log-probabilities of prompt tokens that prefill has reported and that were not passed on yet."""
        self._stored: list[TokenMessage] | None = [] if awaits_prefill else None
        """Messages of decode that wait for prefill's first token. None if they need not wait."""

    def store(self, message: TokenMessage) -> bool:
        """Store a message of decode, if prefill's first token has to come before it. Return False if it need
        not wait.

        Raises Malformed if there are more messages than the request has tokens.
        """
        if self._stored is None:
            return False
        if len(self._stored) >= self._request.choices * self._request.max_tokens:
            raise Malformed("more messages than tokens may come")
        self._stored.append(message)
        return True

    def release(self) -> list[TokenMessage]:
        """Return the stored messages of decode, and store no more."""
        stored, self._stored = self._stored or [], None
        return stored

    def complete_in_store(self) -> set[int]:
        """Return the indices of the choices whose last token is in a stored message."""
        return {message.choice for message in self._stored or () if message.finish is not None}

    def add_scores(self, first: int, scores: Sequence[Score]) -> None:
        """Add log-probabilities of prompt tokens, from token index `first` on. Raises Malformed if they leave
        a gap, or are too many or too late."""
        left = 0 if self._stored is None else self._request.scores - len(self._scores)
        if first != 1 + len(self._scores) or len(scores) > left:
            raise Malformed(f"scores from token {first} on, {left} were to come")
        self._scores += scores

    def check_scores(self) -> None:
        """Check that all log-probabilities of the prompt came before the first token. Raises Malformed."""
        if len(self._scores) != self._request.scores:
            wanted = self._request.scores
            raise Malformed(f"{len(self._scores)} scores before the first token, of {wanted}")

    def take(self, message: TokenMessage) -> TokenBatch | None:
        """Return those tokens of a message that were not passed on yet, or None if there are none.

        Raises TokensLost, and Malformed for a choice that the request does not have.
        """
        choice, first, tokens, finish = message
        if choice not in self.going:
            if choice >= self._request.choices:
                raise Malformed(f"tokens of choice {choice} of {self._request.choices}")
            return None
        at = self._next[choice]
        if first > at:
            raise TokensLost(f"tokens {at} to {first} are missing")
        fresh = tokens[at - first :]
        if not fresh:
            return None
        left = self._request.max_tokens - at - len(fresh)
        if left < 0 or (left == 0 and finish is None):
            raise TokensLost(f"decode worker {self._decode} drew on behind the last token")
        self._next[choice] = at + len(fresh)
        if finish is not None:
            self.going.discard(choice)
        scores, self._scores = tuple(self._scores), []  # `scored-once`
        return TokenBatch(fresh, finish, choice, scores)

    def progress(self) -> str:
        """Return how many tokens were passed on, as text for the timeline."""
        before = f", {self.given} of them by earlier rooms" if self.given else ""
        if self._request.choices == 1:
            return f"{counted(self._next[0], 'token')} passed on{before}"
        before = f", behind {counted(self.given, 'token')} by earlier rooms" if self.given else ""
        drawn = sum(self._next) - self.given * self._request.choices
        return f"{counted(drawn, 'token')} of {self._request.choices} choices passed on{before}"
