"""Counts with their nouns, such as `2 pages`, for log lines and error texts."""


def counted(number: int, thing: str) -> str:
    """Return a count with its noun, such as `1 page` or `2 pages`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
