"""Can an answer be held to this grammar? Compiled, within bounds, or refused in words for whoever wrote it.

What is unknown or not implemented is refused by name, never passed over. A grammar costs a bounded time to
compile, and a bounded time at each token; where that is not enough the answer ends as `GrammarLost`.
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
    max_items_in_row=8_000,  # an object of as many optional names as a fourth of it
    max_lexer_states=50_000,  # of 1 to 2 KB each
    max_grammar_size=200_000,
    verbose_errors=False,  # a grammar is its client's own, and logs have nothing of it
)
SOURCES: Final[Mapping[GrammarKind, Callable[[str], str]]] = {
    GrammarKind.JSON_SCHEMA: LLMatcher.grammar_from_json_schema,
    GrammarKind.REGEX: LLMatcher.grammar_from_regex,
    GrammarKind.LARK: LLMatcher.grammar_from_lark,
}
REGEX_FAULT: Final = re.compile(r"^error: (.+)$", re.MULTILINE)
"""The line that says it, of several that show the place."""

NOTHING_FOLLOWS: Final = ("NoExtension", "NoExtensionBias")
"""The library's words for that no text can follow."""


class GrammarRefused(Exception):
    """No answer can be held to it; the text says why, to whoever wrote it."""


def compile_grammar(grammar: Grammar, vocabulary: LLTokenizer) -> GrammarState:
    """A fold of `grammar` that has taken nothing. Blocks, mostly for less than 20 ms, while other threads go
    on. Raises GrammarRefused."""
    try:
        source = SOURCES[grammar.kind](grammar.text)
    except ValueError as error:
        raise GrammarRefused(_told(str(error))) from error
    matcher = LLMatcher(vocabulary, source, log_level=0, limits=LIMITS)
    mask = matcher.compute_bitmask()  # the first costs most, and finds what is too complex
    why = _told(matcher.get_error()) if matcher.is_error() else ""
    if why in NOTHING_FOLLOWS or mask.count(0) == len(mask):
        raise GrammarRefused("it allows no answer at all")
    if why:
        raise GrammarRefused(why)
    return GrammarState(matcher)


def _told(why: str) -> str:
    fault = REGEX_FAULT.search(why)
    told = fault[1] if fault else first_line(why)
    return told[:WHY_CHARS_MAX]
