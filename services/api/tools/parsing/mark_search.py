"""Search for marks (such as `<tool_call>`) in a text, also for marks that the end of the text cuts off.

No I/O, clock or threads.
"""

from collections.abc import Sequence


def first_mark(text: str, marks: Sequence[str], *, last: bool) -> tuple[int, str | None]:
    """Return the index of the first mark in a text, and the mark: the longest one if several begin there.

    A mark is a text such as `<tool_call>`. If there is none, returns the index from which on one may be
    beginning, and None.
    `last`: whether the text is all of the answer, so that no mark is cut off.
    """
    open_from = (
        len(text) if last else min((_partial_mark_at(text, mark) for mark in marks), default=len(text))
    )
    found = min(
        ((at, -len(mark), mark) for mark in marks if (at := text.find(mark)) >= 0), default=(open_from, 0, "")
    )
    return (found[0], found[2]) if found[2] and found[0] < open_from else (open_from, None)


def _partial_mark_at(text: str, mark: str) -> int:
    """Return the index at which the end of `text` may begin `mark`, or the length of `text`.

    This is the index of the longest suffix of `text` that is a proper prefix of `mark`.
    """
    at = max(0, len(text) - len(mark) + 1)
    while (at := text.find(mark[0], at)) >= 0:
        if mark.startswith(text[at:]):
            return at
        at += 1
    return len(text)


def cut_off_at(text: str, marks: Sequence[str]) -> int:
    """Return the index of a mark (`<tool_call>`, for example) that the text's end cuts off, or its length."""
    beginnings = (length for mark in marks for length in range(1, len(mark)) if text.endswith(mark[:length]))
    return len(text) - max(beginnings, default=0)
