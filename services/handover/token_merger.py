"""Merge of the tokens that both workers of a room send: in one order, and each position once
(`stream-is-prefix`).

Tokens are merged by their position in a choice's output. If prefill alone can report the first token with its
log-probabilities, messages of decode are stored until it has.
"""

from collections.abc import Sequence

from baton.handover.opener_messages import TokenMessage
from baton.pages.record import ALTERNATIVES_MAX
from baton.rooms.errors import PeerFault
from baton.rooms.plurals import counted
from baton.rooms.request import Request, Score, TokenBatch


class TokensLost(Exception):
    """Error: decode left out tokens of a choice, or sent more after the last one."""


class TokenMerger:
    """Merger of the tokens that the two workers of a room send. It passes each position on once, and stores
    tokens that have to wait."""

    def __init__(self, request: Request, decode: str, *, is_local: bool) -> None:
        """Make a merger without tokens. `decode`: name of the decode worker. `is_local`: whether decode
        computes the prompt. If not, messages of decode may be stored until `release`."""
        self._request = request
        self._max_tokens = request.max_tokens
        self._decode = decode
        self.given = len(request.output)
        """Number of output tokens of each choice that earlier rooms of the request have passed on."""
        self.going = set(range(request.choices))
        """Indices of the choices that are not complete yet."""
        self._next = [self.given] * request.choices
        """Position of the next token to pass on in the output of each choice, by choice index."""
        self._scores: list[Score] = []
        """Log-probabilities of prompt tokens that prefill has reported and that were not passed on yet."""
        self.awaits_prefill = not is_local and _is_first_from_prefill(request)
        """Whether messages of decode are stored until `release`."""
        self._stored: list[TokenMessage] = []
        """Messages of decode that wait for prefill's first token."""

    def store(self, message: TokenMessage) -> None:
        """Store a message of decode, because prefill's first token has to come before it (`awaits_prefill`).

        Raises PeerFault if there are more messages than the request has tokens.
        """
        if len(self._stored) >= self._request.choices * self._request.max_tokens:
            raise PeerFault("more messages than tokens may come")
        self._stored.append(message)

    def release(self) -> list[TokenMessage]:
        """Return the stored messages of decode, and store no more."""
        stored, self._stored, self.awaits_prefill = self._stored, [], False
        return stored

    def complete_in_store(self) -> set[int]:
        """Return the indices of the choices whose last token is in a stored message."""
        return {each.batch.choice for each in self._stored if each.batch.finish is not None}

    def add_scores(self, first: int, scores: Sequence[Score]) -> None:
        """Add log-probabilities of prompt tokens, from token index `first` on. Raises PeerFault if they leave
        a gap, or are too many or too late."""
        left = self._request.scores - len(self._scores) if self.awaits_prefill else 0
        if first != 1 + len(self._scores) or len(scores) > left:
            raise PeerFault(f"scores from token {first} on, {left} were to come")
        self._scores += scores

    def check_scores(self) -> None:
        """Check that all log-probabilities of the prompt came before the first token. Raises PeerFault."""
        if len(self._scores) != self._request.scores:
            wanted = self._request.scores
            raise PeerFault(f"{len(self._scores)} scores before the first token, of {wanted}")

    def take(self, batch: TokenBatch, first: int) -> TokenBatch | None:
        """Return those tokens of a batch that were not passed on yet, or None if there are none. `first`:
        position of its first token.

        Raises TokensLost, and PeerFault for a choice that the request does not have.
        """
        tokens, finish, choice, _ = batch
        if choice not in self.going:
            if choice >= self._request.choices:
                raise PeerFault(f"tokens of choice {choice} of {self._request.choices}")
            return None
        at = self._next[choice]
        if first > at:
            raise TokensLost(f"tokens {at} to {first} are missing")
        end = first + len(tokens)
        if end <= at:
            return None
        if end >= self._max_tokens and (finish is None or end > self._max_tokens):
            raise TokensLost(f"decode worker {self._decode} drew on behind the last token")
        self._next[choice] = end
        if finish is not None:
            self.going.discard(choice)
        if first == at and not self._scores:
            return batch
        scores, self._scores = tuple(self._scores), []  # `scored-once`
        return TokenBatch(tokens[at - first :], finish, choice, scores)

    def progress(self) -> str:
        """Return how many tokens were passed on, as text for the timeline."""
        before = f", {self.given} of them by earlier rooms" if self.given else ""
        if self._request.choices == 1:
            return f"{counted(self._next[0], 'token')} passed on{before}"
        before = f", behind {counted(self.given, 'token')} by earlier rooms" if self.given else ""
        drawn = sum(self._next) - self.given * self._request.choices
        return f"{counted(drawn, 'token')} of {self._request.choices} choices passed on{before}"


def _is_first_from_prefill(request: Request) -> bool:
    """Return whether prefill alone can report the first token of a request.

    That is so if the prompt is scored, or if more log-probabilities are wanted than a metadata record holds
    (`record-fits`).
    """
    sampling = request.sampling
    tops = (sampling.top_logprobs or 0) + len(sampling.logprob_token_ids)
    return request.prompt_logprobs is not None or tops > ALTERNATIVES_MAX
