"""How many KV positions do several choices behind one beginning take, and how long may each of them become?

The pages that the beginning fills are shared, all but the one with its last token, which every choice
computes anew to draw its own first token behind it: from there on each has pages of its own.

Pure arithmetic, of one decode worker's pages.
"""


def pages_taken(beginning: int, longest: int, choices: int, page_tokens: int) -> int:
    """`beginning`: tokens that all `choices` begin with, at least 1. `longest`: most positions of one."""
    pages = -(-longest // page_tokens)
    return pages + (choices - 1) * (pages - _shared(beginning, page_tokens))


def longest_of(beginning: int, choices: int, tokens: int, page_tokens: int) -> int:
    """Most positions of each of `choices` in a cache of `tokens` positions; fewer than `beginning` where it
    does not hold them."""
    pages = tokens // page_tokens + (choices - 1) * _shared(beginning, page_tokens)
    return pages // choices * page_tokens


def _shared(beginning: int, page_tokens: int) -> int:
    return (beginning - 1) // page_tokens
