"""How is a number of things told in words?"""


def counted(number: int, thing: str) -> str:
    """`1 page`, `2 pages`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
