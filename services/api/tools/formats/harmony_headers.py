"""Heads (headers) of gpt-oss' messages, between `<|start|>` or `<|channel|>` and `<|message|>`.

A head begins with a role, a channel or a recipient. If anything else follows the first mark, that mark is
plain text.

No I/O, clock or threads.
"""

import re
from functools import reduce
from typing import Final

from baton.api.tools.parsing.mark_search import cut_off_at
from baton.api.tools.parsing.output_markup import PrefixMatch

HEAD_END: Final = "<|message|>"
INNER_MARKS: Final = ("<|channel|>", "<|constrain|>")
HEAD_CHARS_MAX: Final = 512
"""Most characters of a message's head. A longer text is no head."""
NAMES: Final = (
    *("analysis", "commentary", "final"),
    *("assistant", "user", "system", "developer", "tool"),
    *("to=", "functions."),
)
FORMATS: Final = ("json", "code", "text")
NAME: Final = re.compile(
    r"analysis|commentary|final|assistant|user|system|developer|tool|(?:to=|functions\.).*", re.DOTALL
)
OTHER_CHANNEL: Final = re.compile(r"\w{1,64}\s+to=.*", re.DOTALL)
OTHER_CHANNEL_BEGUN: Final = re.compile(r"\s*|\s*[\w.=]*|\w{1,64}\s+(?:|t|to|to=.*)", re.DOTALL)


def head_begins(text: str, last: bool) -> PrefixMatch:
    """Return whether the text after `<|start|>` or `<|channel|>` begins as a message header of gpt-oss does.

    `last`: whether the answer ends with the text, so that the header may be cut off. Returns PARTIAL if more
    text has to decide.
    """
    head, end, _ = text[:HEAD_CHARS_MAX].partition(HEAD_END)
    if not end and len(text) >= HEAD_CHARS_MAX:
        return PrefixMatch.NO
    if not end:
        head = head[: cut_off_at(head, (HEAD_END, *INNER_MARKS))]
    words = reduce(lambda left, mark: left.replace(mark, " "), INNER_MARKS, head)
    if "<" in words or "\n" in words or not _is_named(head, words.split(), whole=bool(end)):
        return PrefixMatch.NO
    if end:
        return PrefixMatch.YES
    if not last:
        return PrefixMatch.PARTIAL
    return PrefixMatch.YES if _is_cut_off(words.split()) else PrefixMatch.NO


def _is_named(head: str, words: list[str], *, whole: bool) -> bool:
    """Return whether a message's head begins with a known name, or has a recipient.

    `whole`: whether the head is complete. An incomplete head may still get a recipient.
    """
    if words and NAME.fullmatch(words[0]):
        return True
    return (OTHER_CHANNEL if whole else OTHER_CHANNEL_BEGUN).fullmatch(head) is not None


def _is_cut_off(words: list[str]) -> bool:
    """Return whether a message header that the answer's end cuts off has only words that headers may have.
    The last word may be incomplete."""
    *whole, word = words or [""]
    could = any(each.startswith(word) for each in (*NAMES, *FORMATS)) or NAME.fullmatch(word) is not None
    return could and all(NAME.fullmatch(each) or each in FORMATS for each in whole)
