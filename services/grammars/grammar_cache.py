"""Cache of compiled grammars, by their source text.

Grammars are compiled in a thread, one after the other. The cost of each is bounded (`grammar_compiler`), and
no other work waits for it.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from llguidance import LLTokenizer

from baton.grammars.grammar_compiler import compile_grammar
from baton.grammars.grammar_state import GrammarState
from baton.rooms.request import Grammar

CACHED_MAX: Final = 64
"""Most compiled grammars in the cache. A small schema takes some hundred KB, the largest allowed ones tens of
MB."""


class GrammarCache:
    """Cache of one model's compiled grammars, which keeps the most recently used ones.

    Its thread ends with the process.
    """

    def __init__(self, read: Callable[[], LLTokenizer], cached_max: int = CACHED_MAX) -> None:
        """Build an empty cache. `read`: reads the model's vocabulary, for the first grammar or in `warm_up`.

        `cached_max`: most grammars in the cache.
        """
        self._read = read
        self._cached_max = cached_max
        self._vocabulary: LLTokenizer | None = None
        self._roots: OrderedDict[Grammar, GrammarState] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def warm_up(self) -> None:
        """Read the model's vocabulary before serving, since that stops all other threads for half a second.
        Blocks.

        If it cannot be read, the future of each later grammar raises the error.
        """
        self._thread.submit(self._vocabulary_read).exception()

    def folds(self, grammar: Grammar, output: Sequence[int], count: int) -> Future[list[GrammarState]]:
        """Return a future with `count` states of the grammar that have read `output`, one for each choice.

        `count`: at least 1. The future raises GrammarRefused, GrammarLost if the output does not follow the
        grammar, and StartupError if the model's tokenizer cannot be read.
        """
        return self._thread.submit(self._folds, grammar, output, count)

    def check(self, grammar: Grammar) -> Future[None]:
        """Start compiling the grammar only to see whether it can be compiled.

        The future raises GrammarRefused if not, and StartupError if the model's tokenizer cannot be read.
        """
        return self._thread.submit(self._check, grammar)

    def _folds(self, grammar: Grammar, output: Sequence[int], count: int) -> list[GrammarState]:
        fold = self._root(grammar).anew()
        fold.follow(output)
        return [fold, *(fold.copy() for _ in range(count - 1))]

    def _check(self, grammar: Grammar) -> None:
        self._root(grammar)

    def _root(self, grammar: Grammar) -> GrammarState:
        root = self._roots.get(grammar)
        if root is None:
            root = self._roots[grammar] = compile_grammar(grammar, self._vocabulary_read())
            if len(self._roots) > self._cached_max:
                self._roots.popitem(last=False)
        self._roots.move_to_end(grammar)
        return root

    def _vocabulary_read(self) -> LLTokenizer:
        if self._vocabulary is None:
            self._vocabulary = self._read()
        return self._vocabulary
