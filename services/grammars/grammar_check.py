"""Can an answer be held to what a caller wrote? Asked of a process of its own, which may die of it.

The library bounds most of what a grammar costs (`compiling.py`), and not all: conjunctions multiply, and long
chains of rules overflow its stack, by which a process ends. So the one that judges ends instead of the one
that serves: by its own alarm, or by a signal. What it lets pass is compiled by workers as it was here, on a
larger stack.

What is quickly compiled may be costly to follow. So the beginnings of two answers are drawn here, too: a
grammar that passes its bounds within them is refused, where a worker would have to break an answer off.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from llguidance import LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark
from tokenizers import Tokenizer

from baton.grammars.finite_schemas import has_finite_value
from baton.grammars.grammar_compiler import WHY_CHARS_MAX, GrammarRefused, compile_grammar
from baton.grammars.grammar_state import GrammarLost, GrammarState, first_line
from baton.grammars.vocabulary import vocabulary_of
from baton.rooms.request import GRAMMAR_BYTES_MAX, Grammar, GrammarKind, Request
from baton.runtime.child_process import child_environ, module_command
from baton.runtime.errors import StartupError

CHECK_S: Final = 2.0
"""Of the processor's time, for one grammar."""
STARVED: Final = 10
"""Times that, by the clock, on a machine whose processors others have."""
STACK_BYTES: Final = 2**20
"""Of the thread that compiles; a worker's has 8 MiB, or 2 where there is no limit."""
MEMORY_BYTES: Final = 2**29
"""Of addresses, beyond what it has when it is ready."""
TOO_LONG: Final = "it takes too long to compile"
TOO_COMPLEX: Final = "it is too complex to compile"
TOO_COSTLY: Final = "it is too costly to follow"
ENDLESS: Final = "no finite answer fits it"

TRIED_TOKENS: Final = 32
"""Of each of the two answers that are begun."""

ALARMS: Final = (signal.SIGPROF, signal.SIGALRM)
"""By which a process ends that let them come."""

CheckGrammar = Callable[[Grammar, bool], Grammar | str]
"""Of a grammar, and whether its text may be in GBNF instead: as workers are told it, or why it is refused.
Blocks."""


class SerializableTokenizer(Protocol):
    """What is used of `tokenizers.Tokenizer`."""

    def to_str(self) -> str: ...


def check_grammar(grammar: Grammar, any_bnf: bool, vocabulary: LLTokenizer) -> Grammar | str:
    """As the process judges."""
    try:
        made = _in_lark(grammar.text) if any_bnf else grammar
        if made.kind is GrammarKind.JSON_SCHEMA and not _may_end(made.text):
            return ENDLESS
        _try(compile_grammar(made, vocabulary), vocabulary.eos_tokens)
    except GrammarRefused as error:
        return str(error)
    except GrammarLost as error:
        return f"{TOO_COSTLY}: {error}"
    return made


def _may_end(schema: str) -> bool:
    """Whether an answer to a schema can end. What is no JSON is refused by its compilation."""
    try:
        return has_finite_value(json.loads(schema))
    except (ValueError, RecursionError):
        return True


def _try(fold: GrammarState, ends: Sequence[int]) -> None:
    """Begin an answer of the lowest tokens that are allowed, and one of the highest. Raises GrammarLost."""
    longest = Request("", (), TRIED_TOKENS, eos_token_ids=tuple(ends), ignore_eos=True)
    for chosen in (_lowest, _highest):
        begun, output = fold.copy(), list[int]()
        while len(output) < TRIED_TOKENS and (
            allowed := int.from_bytes(begun.allowed(longest, output), "little")
        ):
            output.append(chosen(allowed))


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _highest(bits: int) -> int:
    return bits.bit_length() - 1


def _in_lark(text: str) -> Grammar:
    """Raises GrammarRefused for a text that is to be GBNF, and is none."""
    try:
        made = any_to_lark(text)
    except RecursionError as error:
        raise GrammarRefused("it is nested too deeply") from error
    except Exception as error:  # whatever the library's converter makes of it
        raise GrammarRefused(first_line(str(error))[:WHY_CHARS_MAX]) from error
    if len(made.encode()) > GRAMMAR_BYTES_MAX:
        raise GrammarRefused(f"it is larger than {GRAMMAR_BYTES_MAX} bytes in Lark's form")
    return Grammar(GrammarKind.LARK, made)


class GrammarChecker:
    """One process, started when the first grammar is asked for and after one that it did not survive. It ends
    with whoever started it. Used from several threads: one is judged at a time."""

    def __init__(
        self, tokenizer: SerializableTokenizer, tokens: int, ends: Sequence[int], limit_s: float = CHECK_S
    ) -> None:
        """`tokenizer`, `tokens`, `ends`: as of `vocabulary_of`. `limit_s`: as of CHECK_S."""
        told = {"tokens": tokens, "ends": [*ends], "limit_s": limit_s, "tokenizer": tokenizer.to_str()}
        self._told = _line(told)  # made while nobody is served: no other thread goes on meanwhile
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def check(self, grammar: Grammar, any_bnf: bool) -> Grammar | str:
        """See `CheckGrammar`."""
        with self._lock:
            process = self._alive()
            if (answer := _said(process, _line([grammar.kind.value, grammar.text, any_bnf]))) is None:
                ended = process.wait()
                self._process = None
                return TOO_LONG if -ended in ALARMS else TOO_COMPLEX
        kind, text = answer
        return text if kind is None else Grammar(GrammarKind(kind), text)

    def close(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()
                self._process.communicate()
                self._process = None

    def _alive(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            # In a session of its own: who interrupts the one that serves lets it finish.
            self._process = subprocess.Popen(  # noqa: S603
                module_command("baton.grammars.grammar_check"),
                env=child_environ(os.environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # nothing of a grammar is logged
                start_new_session=True,
            )
            _said(self._process, self._told)
        return self._process


def _line(told: Any) -> bytes:
    return json.dumps(told).encode() + b"\n"


def _said(process: "subprocess.Popen[bytes]", told: bytes) -> Any:
    """What it answers; None where it ended instead."""
    if process.stdin is None or process.stdout is None:
        raise AssertionError("a process without pipes")
    try:
        process.stdin.write(told)
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        return None
    return json.loads(line) if line else None


def main() -> None:
    """The process: a line each way for a grammar, until nobody is there to ask."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    told = json.loads(sys.stdin.readline())
    try:
        found: LLTokenizer | str = vocabulary_of(
            Tokenizer.from_str(told["tokenizer"]), told["tokens"], told["ends"]
        )
    except StartupError as error:
        found = str(error)
    _bound_memory()
    _say(True)
    for line in sys.stdin:
        kind, text, any_bnf = json.loads(line)
        _alarm(told["limit_s"])
        answer = found if isinstance(found, str) else _apart(Grammar(GrammarKind(kind), text), any_bnf, found)
        _alarm(0.0)
        _say([None, answer] if isinstance(answer, str) else [answer.kind.value, answer.text])


def _alarm(after_s: float) -> None:
    """The end of this process, whatever it does then; 0: not any more."""
    signal.setitimer(signal.ITIMER_PROF, after_s)
    signal.setitimer(signal.ITIMER_REAL, STARVED * after_s)


def _bound_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123
        file.write("1000")  # where memory is short all the same, this process goes first


def _apart(grammar: Grammar, any_bnf: bool, vocabulary: LLTokenizer) -> Grammar | str:
    """In a thread, whose stack is small."""
    found: list[Grammar | str] = []
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: found.append(check_grammar(grammar, any_bnf, vocabulary)))
    thread.start()
    thread.join()
    return found[0] if found else TOO_COMPLEX


def _say(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
