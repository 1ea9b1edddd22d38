"""What is one piece of what a sender writes into a receiver's memory?"""

from typing import TypeAlias

PageRun: TypeAlias = tuple[int, int, int]
"""(source, target, length): `length` bytes from offset `source` of the sender's KV region to `target` of the
receiver's. Plain: a window may have thousands, and a tuple with names takes 5 times as long to make."""

Window: TypeAlias = tuple[int, list[PageRun]]
"""(bytes, runs) of one put."""
