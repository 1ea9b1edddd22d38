"""Resources that a request needs on its prefill and its decode worker, in KV positions."""

from dataclasses import dataclass
from typing import Final

from baton.fleet.worker_record import Worker
from baton.pages.block_hashes import Block
from baton.rooms.choice_pages import positions_of
from baton.rooms.phases import Side
from baton.rooms.worker_facts import WorkerFacts

GROWN_TOKENS: Final = 24
"""Number of KV positions that must stay free for each sequence that runs on a worker, before a retracted
request begins there again."""


@dataclass(frozen=True, slots=True)
class Need:
    """Resources that a request takes on its workers, and conditions for the choice of these workers."""

    prompt_tokens: int
    """Number of KV positions that prefill computes for the request."""
    tokens: int
    """Most KV positions that one choice of the request takes on decode."""
    blocks: tuple[Block, ...] = ()
    """Hashes of the prompt's blocks, by which workers with a cached prefix are found. Empty if cached
    prefixes do not matter."""
    choices: int = 1
    """Number of sequences that decode samples after the same prompt (n of the API)."""
    margin: int = 0
    """Number of KV positions that have to be free on decode, in addition to those with which the room begins.
    Set for a retracted request, so that it is not retracted again at once."""
    may_be_local: bool = False
    """Whether a decode worker may serve the request alone and compute its prompt itself. That happens if no
    prefill worker is ready, or the only one is in the same process."""
    scores: int = 0
    """Number of prompt tokens that prefill scores, in addition to computing them."""

    def positions_on(self, worker: WorkerFacts) -> int:
        """Return the most KV positions that the request may take on this worker: its prompt on prefill, its
        prompt and output on decode."""
        return (
            self.prompt_tokens
            if worker.side is Side.PREFILL
            else self.positions_on_decode(worker.page_tokens)
        )

    def positions_on_decode(self, page_tokens: int) -> int:
        """Return the most KV positions that the request takes on decode, with pages of `page_tokens`
        tokens."""
        if self.choices == 1:
            return self.tokens
        return positions_of(self.prompt_tokens, self.tokens, self.choices, page_tokens)

    def initial_on(self, worker: WorkerFacts) -> int:
        """Return the number of KV positions that the request takes on this worker when it begins there."""
        return (
            self.prompt_tokens if worker.side is Side.PREFILL else self.initial_on_decode(worker.page_tokens)
        )

    def initial_on_decode(self, page_tokens: int) -> int:
        """Return the number of KV positions with which the request begins on decode, with pages of
        `page_tokens` tokens.

        They are the pages of the prompt and one more, which are granted at once. One page for each choice to
        grow into is added.
        """
        granted = -(-min(self.prompt_tokens + page_tokens, self.tokens) // page_tokens)
        return min((granted + self.choices) * page_tokens, self.positions_on_decode(page_tokens))

    def required_free(self, worker: Worker) -> int:
        """Return how many KV positions have to be free on a worker for the request to begin there.

        A retracted request begins only if it and all other sequences on the worker have space to grow.
        """
        facts = worker.facts
        first = self.initial_on(facts)
        if facts.side is Side.PREFILL or not self.margin:
            return first
        own, least = (
            min(first + more, self.positions_on(facts)) for more in (self.margin, GROWN_TOKENS * self.choices)
        )
        return max(own, least + GROWN_TOKENS * worker.usage.growing)

    def describe(self, side: Side) -> str:
        if side is Side.PREFILL:
            return f"{self.prompt_tokens} tokens"
        return f"{self.tokens} tokens" if self.choices == 1 else f"{self.choices} times {self.tokens} tokens"
