"""Buffer of text that was not parsed yet. It bounds how much text is searched at once.

No I/O, clock or threads.
"""

from typing import Final

PIECE_CHARS: Final = 4096
"""Number of characters in one piece of unparsed text. Only `head`, which is about one piece long, is searched
for marks at a time."""


class UnreadText:
    """Text that was not parsed yet: a short head that is searched, and the pieces after it.

    A text with many marks is searched once for each of them. Because only the head is searched, the time
    grows with the length of the text, and not with its square.
    """

    def __init__(self) -> None:
        self.head = ""
        """Beginning of the unparsed text, in which marks are searched. It is about one piece long, and the
        rest waits in `_pieces`."""
        self._pieces: list[str] = []
        """Pieces of text after the head, in reverse order: the next piece is the last element."""

    @property
    def is_short(self) -> bool:
        """Whether all unparsed text is in `head`, and no further pieces wait."""
        return not self._pieces

    def append(self, text: str) -> None:
        """Add text at the end of the unparsed text."""
        if self._pieces or len(self.head) + len(text) > PIECE_CHARS:
            self._pieces[:0] = _pieces(text)
        else:
            self.head += text

    def prepend(self, text: str) -> None:
        """Put `text` back before the unparsed text, so that it is parsed again."""
        text += self.head
        self.head = text[:PIECE_CHARS]
        self._pieces += _pieces(text[PIECE_CHARS:])

    def take(self, count: int) -> str:
        """Remove `count` characters from the head of the unparsed text and return them."""
        taken, self.head = self.head[:count], self.head[count:]
        return taken

    def lengthen(self) -> bool:
        """Move the next piece of text to the head. Return False if there is no other piece."""
        if self.is_short:
            return False
        self.head += self._pieces.pop()
        return True


def _pieces(text: str) -> list[str]:
    """Return the text cut into pieces of PIECE_CHARS characters, in reverse order."""
    return [text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS)][::-1]
