"""Compiler of grammars within bounds of time and memory.

A grammar with an unknown or unimplemented feature is refused by the feature's name, which is never ignored. A
grammar takes a bounded time to compile, and a bounded time at each token. If the latter is not enough, the
answer ends with GrammarLost.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from baton.grammars.grammar_state import GrammarState, first_line
from baton.rooms.request import Grammar, GrammarKind

WHY_CHARS_MAX: Final = 300
LIMITS: Final = LLParserLimits(
    initial_lexer_fuel=1_000_000,  # 20 ms
    step_lexer_fuel=100_000,  # 7 ms
    step_max_items=50_000,  # 3 ms
    max_items_in_row=8_000,  # an object of 2,000 optional properties
    max_lexer_states=50_000,  # of 1 to 2 KB each
    max_grammar_size=200_000,
    verbose_errors=False,  # logs hold nothing of a client's grammar
)
SOURCES: Final[Mapping[GrammarKind, Callable[[str], str]]] = {
    GrammarKind.JSON_SCHEMA: LLMatcher.grammar_from_json_schema,
    GrammarKind.REGEX: LLMatcher.grammar_from_regex,
    GrammarKind.LARK: LLMatcher.grammar_from_lark,
}
REGEX_FAULT: Final = re.compile(r"^error: (.+)$", re.MULTILINE)
"""Pattern of the line that names a regex's fault, among lines of an error message that show its position."""

NOTHING_FOLLOWS: Final = ("NoExtension", "NoExtensionBias")
"""Error codes of llguidance with which it reports that no text fits the grammar from here on."""


class GrammarRefused(Exception):
    """A grammar that cannot be used. The message gives its author the reason."""


def compile_grammar(grammar: Grammar, vocabulary: LLTokenizer) -> GrammarState:
    """Compile `grammar`, and return its state before the first token. Raises GrammarRefused.

    Blocks, mostly for less than 20 ms. Other threads run meanwhile.
    """
    try:
        source = SOURCES[grammar.kind](grammar.text)
    except ValueError as error:
        raise GrammarRefused(_reason(str(error))) from error
    matcher = LLMatcher(vocabulary, source, log_level=0, limits=LIMITS)
    mask = matcher.compute_bitmask()  # the first mask takes longest, and shows a grammar that is too complex
    why = _reason(matcher.get_error()) if matcher.is_error() else ""
    if why in NOTHING_FOLLOWS or mask.count(0) == len(mask):
        raise GrammarRefused("it allows no answer at all")
    if why:
        raise GrammarRefused(why)
    return GrammarState(matcher)


def _reason(why: str) -> str:
    fault = REGEX_FAULT.search(why)
    reason = fault[1] if fault else first_line(why)
    return reason[:WHY_CHARS_MAX]
