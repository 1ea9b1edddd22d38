"""Search for stop strings in a text that is still being generated.

Text is held back only while its end may be the beginning of a stop string. The stop string that is completed
first ends the text. If one character completes two of them, the longer one counts. So the result does not
depend on how the text was cut into pieces.
"""

from collections.abc import Sequence


class StopStrings:
    """Finder of stop strings in the text of one choice. No stop string is empty."""

    __slots__ = ("_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        """Set the stop strings. `include`: whether the returned text includes the stop string that was
        found."""
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text. None: no stop string was found so far. After one was found, no
        text may be pushed."""

    def push(self, text: str, *, armed: bool = True) -> str:
        """Append `text`, and return the text that cannot be part of a stop string and may be sent now.
        `armed`: whether a stop string that ends in `text` ends the choice."""
        if not self._stops:
            return text
        held, self._held = len(self._held), self._held + text
        if armed and (found := self._first(held)) is not None:
            start, stop = found
            self.matched = stop
            sent, self._held = self._held[: start + len(stop) if self._include else start], ""
            return sent
        keep = self._claimed_from(len(self._held))
        sent, self._held = self._held[:keep], self._held[keep:]
        return sent

    def flush(self) -> str:
        """Return the text that is still held back, at the end of the output. No text may be pushed
        afterwards."""
        sent, self._held = self._held, ""
        return sent

    def _first(self, old: int) -> tuple[int, str] | None:
        """Return the start and the text of the stop string that ends first in the held-back text, or None.
        Stop strings that end within its first `old` characters were searched for before."""
        found: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = self._held.find(stop, max(0, old - len(stop) + 1))
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = (start + len(stop), start, stop)
        return None if found is None else found[1:]

    def _claimed_from(self, end: int) -> int:
        """Return the index in the held-back text from which it may be the beginning of a stop string. Return
        `end` if no stop string may have begun."""
        claimed = end
        for stop in self._stops:
            at = max(0, end - len(stop) + 1)
            while (at := self._held.find(stop[0], at, claimed)) >= 0:
                if stop.startswith(self._held[at:]):
                    claimed = at
                at += 1
        return claimed
