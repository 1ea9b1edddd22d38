"""Resources that a request needs of its workers, in KV positions."""

from dataclasses import dataclass
from typing import Final

from baton.fleet.prefix_affinity import Block
from baton.fleet.worker_record import Worker
from baton.rooms.choice_pages import positions_of
from baton.rooms.phases import Side
from baton.rooms.worker_facts import WorkerFacts

GROWN_TOKENS: Final = 24
"""KV positions that each sequence on a worker is left to grow into, before a retracted room comes back to it.
"""


@dataclass(frozen=True, slots=True)
class Need:
    """Resources that a request takes of its workers, and constraints on the choice of them."""

    prompt_tokens: int
    """KV positions that prefill computes."""
    tokens: int
    """Most KV positions of one choice on decode."""
    blocks: tuple[Block, ...] = ()
    """Hashes of the prompt's blocks. Empty if the choice does not depend on them."""
    choices: int = 1
    """Number of sequences that decode draws after the prompt."""
    margin: int = 0
    """KV positions that have to be free on decode, besides those that the room begins with. Given for a
    retracted request, so that it is not retracted again at once."""
    may_be_local: bool = False
    """Whether a decode worker that computes prompts may get the request alone. It does if no prefill worker
    is there, or none but its own process."""
    scores: int = 0
    """Number of prompt tokens that prefill scores besides computing them."""

    def positions_on(self, worker: WorkerFacts) -> int:
        """Return the most KV positions that the request may take of a worker."""
        return (
            self.prompt_tokens
            if worker.side is Side.PREFILL
            else self.positions_on_decode(worker.page_tokens)
        )

    def positions_on_decode(self, page_tokens: int) -> int:
        """Return the most KV positions that the request takes on decode, in pages of `page_tokens`."""
        if self.choices == 1:
            return self.tokens
        return positions_of(self.prompt_tokens, self.tokens, self.choices, page_tokens)

    def initial_on(self, worker: WorkerFacts) -> int:
        """Return the KV positions that the request begins with on a worker."""
        return (
            self.prompt_tokens if worker.side is Side.PREFILL else self.initial_on_decode(worker.page_tokens)
        )

    def initial_on_decode(self, page_tokens: int) -> int:
        """Return the KV positions that the request begins with on decode, in pages of `page_tokens`.

        These are the pages of the known tokens and one more, which are granted at once. A page for each
        choice to grow into is added."""
        granted = -(-min(self.prompt_tokens + page_tokens, self.tokens) // page_tokens)
        return min((granted + self.choices) * page_tokens, self.positions_on_decode(page_tokens))

    def required_free(self, worker: Worker) -> int:
        """Return the KV positions that have to be free on a worker before the request begins. What is left
        for a retracted one to grow into is left for all others on the worker, too."""
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
