"""Which grammars are compiled already? Those asked for last are kept, by their source.

They are compiled in a thread, one after the other: what one may cost is bounded (`compiling.py`), and nobody
else waits for it.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from llguidance import LLTokenizer

from baton.grammars.grammar_compiler import compile_grammar
from baton.grammars.grammar_state import GrammarState
from baton.rooms.request import Grammar

KEPT_MAX: Final = 64
"""A small schema takes some hundred KB, the largest that are taken tens of MB."""


class GrammarCache:
    """Its thread ends with the process."""

    def __init__(self, read: Callable[[], LLTokenizer], kept_max: int = KEPT_MAX) -> None:
        """`read`: the model's vocabulary, when the first grammar is asked for or by `warm_up`."""
        self._read = read
        self._kept_max = kept_max
        self._vocabulary: LLTokenizer | None = None
        self._roots: OrderedDict[Grammar, GrammarState] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    def warm_up(self) -> None:
        """Read the vocabulary while nobody is served: for half a second no other thread goes on. Blocks. What
        cannot be read is told to whoever asks for a grammar."""
        self._thread.submit(self._vocabulary_read).exception()

    def folds(self, grammar: Grammar, output: Sequence[int], count: int) -> Future[list[GrammarState]]:
        """Of so many answers that go on behind `output`, at least one. Its future raises GrammarRefused,
        GrammarLost where the output is none of the grammar's, and StartupError for a model whose tokenizer
        cannot be read."""
        return self._thread.submit(self._folds, grammar, output, count)

    def check(self, grammar: Grammar) -> Future[None]:
        """Whether an answer can be held to it: its future raises as above."""
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
            if len(self._roots) > self._kept_max:
                self._roots.popitem(last=False)
        self._roots.move_to_end(grammar)
        return root

    def _vocabulary_read(self) -> LLTokenizer:
        if self._vocabulary is None:
            self._vocabulary = self._read()
        return self._vocabulary
