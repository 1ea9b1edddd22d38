"""Which of the answers to one prompt are the best?

Those whose tokens were the likeliest to the model on the average, all of them counted that were drawn for the
answer: OpenAI's rule. Longer answers are not worse for it.
"""

from collections.abc import Sequence
from math import inf

from baton.api.generation.rendering import Collected


def best_of(drawn: Sequence[Collected], given: int) -> list[Collected]:
    """The best first; of two that are equally good, the one that was asked for first."""
    return sorted(drawn, key=_likeliness, reverse=True)[:given]


def _likeliness(part: Collected) -> float:
    """The mean log-probability of its tokens."""
    told = [token.logprob for token in part.tokens if token.logprob is not None]
    return sum(told) / len(told) if told else -inf
