"""What is one piece of what a sender writes into a receiver's memory?"""

from typing import NamedTuple


class PageRun(NamedTuple):
    """`length` bytes from offset `source` of the sender's KV region to `target` of the receiver's."""

    source: int
    target: int
    length: int
