"""Check of a client's grammar in a separate process, since compiling a bad grammar may crash its process.

llguidance bounds most of what a grammar costs (`grammar_compiler`), but not all: conjunctions multiply, and
long chains of rules overflow its stack, which ends a process. So the checking process ends instead of the one
that serves: by its own alarm, or by a signal. A grammar that passes is compiled by workers in the same way,
on a larger stack.

A grammar that compiles quickly may be costly to follow. So the check also generates the beginnings of two
answers. A grammar that exceeds its bounds within them is refused. Otherwise a worker would have to break off
an answer.
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
"""Most CPU time for checking one grammar, in seconds."""
STARVED: Final = 10
"""Factor by which the wall-clock time of a check may exceed its CPU time, since the machine is shared."""
STACK_BYTES: Final = 2**20
"""Stack size of the thread that compiles a grammar in the check, in bytes.

It is smaller than a worker's, which has 8 MiB, or 2 MiB if there is no limit. So a grammar that passes fits
there.
"""
MEMORY_BYTES: Final = 2**29
"""Most bytes by which the address space of the checking process may grow after it is ready for the first
grammar."""
TOO_LONG: Final = "it takes too long to compile"
TOO_COMPLEX: Final = "it is too complex to compile"
TOO_COSTLY: Final = "it is too costly to follow"
ENDLESS: Final = "no finite answer fits it"

TRIED_TOKENS: Final = 32
"""Number of tokens in each of the two answers that the check begins."""

ALARMS: Final = (signal.SIGPROF, signal.SIGALRM)
"""Signals that end the checking process when its CPU time or wall-clock time is over."""

CheckGrammar = Callable[[Grammar, bool], Grammar | str]
"""Function that checks a grammar and returns it for workers, or the reason why it is refused. Blocks.

Takes a grammar, and whether its text may be in GBNF instead of Lark.
"""


class SerializableTokenizer(Protocol):
    """The method of `tokenizers.Tokenizer` that the check needs."""

    def to_str(self) -> str: ...


def check_grammar(grammar: Grammar, any_bnf: bool, vocabulary: LLTokenizer) -> Grammar | str:
    """Check a grammar in this process, and return it for workers, or the reason why it is refused.

    `any_bnf`: whether its text may be in GBNF instead of Lark.
    """
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
    """Return whether some finite answer fits the JSON schema in the text `schema`.

    True for a text that is no JSON, which compilation refuses.
    """
    try:
        return has_finite_value(json.loads(schema))
    except (ValueError, RecursionError):
        return True


def _try(fold: GrammarState, ends: Sequence[int]) -> None:
    """Begin two answers that follow the grammar: one of the lowest allowed token ids, one of the highest.

    Raises GrammarLost if the grammar is too costly to follow. `ends`: ids of the tokens that end a text.
    """
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
    """Convert a grammar's text from GBNF or Lark to Lark. Raises GrammarRefused if it cannot be converted."""
    try:
        made = any_to_lark(text)
    except RecursionError as error:
        raise GrammarRefused("it is nested too deeply") from error
    except Exception as error:  # any error of the library's converter
        raise GrammarRefused(first_line(str(error))[:WHY_CHARS_MAX]) from error
    if len(made.encode()) > GRAMMAR_BYTES_MAX:
        raise GrammarRefused(f"it is larger than {GRAMMAR_BYTES_MAX} bytes in Lark's form")
    return Grammar(GrammarKind.LARK, made)


class GrammarChecker:
    """Checker of clients' grammars, in one separate process of its own.

    Used from several threads, which take turns. The process starts with the first grammar, and again after a
    grammar that ended it. It ends with its parent.
    """

    def __init__(
        self, tokenizer: SerializableTokenizer, tokens: int, ends: Sequence[int], limit_s: float = CHECK_S
    ) -> None:
        """Serialize the tokenizer for the checking process, without starting that process yet.

        `tokenizer`, `tokens`, `ends`: arguments of `vocabulary_of`. `limit_s`: CPU time for one grammar, in
        seconds.
        """
        setup = {"tokens": tokens, "ends": [*ends], "limit_s": limit_s, "tokenizer": tokenizer.to_str()}
        self._setup = _line(setup)  # at start, since it stops all other threads
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def check(self, grammar: Grammar, any_bnf: bool) -> Grammar | str:
        """Check a grammar in the separate process, and return it for workers, or the reason why it is
        refused.

        `any_bnf`: whether its text may be in GBNF instead of Lark.
        """
        with self._lock:
            process = self._alive()
            if (answer := _exchange(process, _line([grammar.kind.value, grammar.text, any_bnf]))) is None:
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
            # In a session of its own, so that Ctrl-C lets it finish.
            self._process = subprocess.Popen(  # noqa: S603
                module_command("baton.grammars.grammar_check"),
                env=child_environ(os.environ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # no part of a grammar is logged
                start_new_session=True,
            )
            _exchange(self._process, self._setup)
        return self._process


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _exchange(process: "subprocess.Popen[bytes]", line: bytes) -> Any:
    """Send a line to the checking process, and return its answer, or None if the process ended."""
    if process.stdin is None or process.stdout is None:
        raise AssertionError("a process without pipes")
    try:
        process.stdin.write(line)
        process.stdin.flush()
        answer = process.stdout.readline()
    except BrokenPipeError:
        return None
    return json.loads(answer) if answer else None


def main() -> None:
    """Check the grammars on standard input, one a line, until it is closed. Runs in the checking process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    setup = json.loads(sys.stdin.readline())
    try:
        found: LLTokenizer | str = vocabulary_of(
            Tokenizer.from_str(setup["tokenizer"]), setup["tokens"], setup["ends"]
        )
    except StartupError as error:
        found = str(error)
    _bound_memory()
    _write(True)
    for line in sys.stdin:
        kind, text, any_bnf = json.loads(line)
        _alarm(setup["limit_s"])
        answer = (
            found if isinstance(found, str) else _in_thread(Grammar(GrammarKind(kind), text), any_bnf, found)
        )
        _alarm(0.0)
        _write([None, answer] if isinstance(answer, str) else [answer.kind.value, answer.text])


def _alarm(after_s: float) -> None:
    """Have this process end after `after_s` seconds of CPU time. 0 cancels that.

    It also ends after a multiple of that time on the wall clock.
    """
    signal.setitimer(signal.ITIMER_PROF, after_s)
    signal.setitimer(signal.ITIMER_REAL, STARVED * after_s)


def _bound_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:  # noqa: PTH123
        file.write("1000")  # if memory is short all the same, this process ends first


def _in_thread(grammar: Grammar, any_bnf: bool, vocabulary: LLTokenizer) -> Grammar | str:
    """Check a grammar in a thread whose stack is smaller than a worker's, so that a grammar that passes fits
    there."""
    found: list[Grammar | str] = []
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=lambda: found.append(check_grammar(grammar, any_bnf, vocabulary)))
    thread.start()
    thread.join()
    return found[0] if found else TOO_COMPLEX


def _write(answer: Any) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
