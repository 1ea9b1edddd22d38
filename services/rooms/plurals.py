"""Counts with their nouns, for texts."""


def counted(number: int, thing: str) -> str:
    """Return `1 page`, `2 pages`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
