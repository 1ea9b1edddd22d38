"""Buffer of text that was not parsed yet, which bounds how much of it is searched at once.

Pure.
"""

from typing import Final

PIECE_CHARS: Final = 4096
"""Characters that are added to the head at once. The head is not much longer than that."""


class UnreadText:
    """Text that was not parsed yet, as a head and the pieces behind it.

    A text with many marks is searched once for each of them. As the head is short, the time that this takes
    grows with the length of the text, and not with its square.
    """

    def __init__(self) -> None:
        self.head = ""
        """Text that may be parsed now."""
        self._pieces: list[str] = []
        """Pieces behind the head, the next one last."""

    @property
    def is_short(self) -> bool:
        """Whether the head is all of the text."""
        return not self._pieces

    def append(self, text: str) -> None:
        """Add text at the end."""
        if self._pieces or len(self.head) + len(text) > PIECE_CHARS:
            self._pieces[:0] = _pieces(text)
        else:
            self.head += text

    def prepend(self, text: str) -> None:
        """Put text back at the beginning."""
        text += self.head
        self.head = text[:PIECE_CHARS]
        self._pieces += _pieces(text[PIECE_CHARS:])

    def take(self, count: int) -> str:
        """Remove `count` characters from the head and return them."""
        taken, self.head = self.head[:count], self.head[count:]
        return taken

    def lengthen(self) -> bool:
        """Move the next piece to the head. Return False if there is none."""
        if self.is_short:
            return False
        self.head += self._pieces.pop()
        return True


def _pieces(text: str) -> list[str]:
    """Return the text in pieces, the last one first."""
    return [text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS)][::-1]
