"""The interface between a worker and an engine: the calls, and the values that they exchange.

A worker owns the pages and the sequences. An engine owns the memory and the weights, and draws tokens. One
engine serves both sides: a row of many tokens is prefill, a row of one token is decode, and a step may hold
both.

Workers know nothing else of an engine, and importing this module loads no tensor library. Engines on torch
share one step (`services/inference/step_engine.py`). The simulation, tests and benchmarks have other engines.
"""

from collections import abc
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, Protocol

from baton.grammars.grammar_state import GrammarState
from baton.pages.kv_checksum import WORD
from baton.pages.layout import GroupHead, KvLayout
from baton.rooms.request import Grammar, Request, Score, Token
from baton.runtime.host_memory import Movable
from baton.runtime.worker_settings import WorkerSettings

PROPOSED_MAX: Final = 16
"""Most tokens of a proposal."""


class DrawFailed(Exception):
    """No token can be drawn for one sequence. The other sequences of its step have theirs."""


class LogitsNotFinite(DrawFailed):
    """The largest logit of a sequence is NaN or infinite."""

    def __init__(self) -> None:
        super().__init__("the model computed logits that are not numbers")


class GrammarUnsatisfied(DrawFailed):
    """The output of a sequence cannot follow its grammar any further."""

    def __init__(self, why: str = "seen by the rank that draws") -> None:
        super().__init__(f"the answer cannot be held to its grammar any further: {why}")


DrawResult = Token | LogitsNotFinite | GrammarUnsatisfied
"""Result of a draw at one position of a sequence."""

RowResult = tuple[Token, ...] | LogitsNotFinite | GrammarUnsatisfied
"""Result of a row: the tokens drawn, none if it draws none, or why not even one could be drawn."""


def take(drafts: abc.Sequence[int], drawn: abc.Iterable[DrawResult]) -> RowResult:
    """Return the result of a row with `drafts`, given the draws at the first draft's position and behind each
    draft.

    A draft is accepted exactly if it is the draw at its position (`drawn-is-drawn`). The first draw that
    differs from its draft replaces it, and no draw behind it is consumed. If a draw behind a token fails, the
    next step reports why.
    """
    taken: list[Token] = []
    for index, each in enumerate(drawn):
        if not isinstance(each, Token):
            return each if index == 0 else tuple(taken)
        taken.append(each)
        if index == len(drafts) or each.id != drafts[index]:
            break
    return tuple(taken)


class EngineLost(Exception):
    """The engine cannot compute any more. The worker has to end, and another process takes its place."""


class RankGroupBroken(Exception):
    """A rank of this worker died, was late or could not compute. The step has no result on any rank.

    The text names the rank that reported it.
    """


@dataclass(slots=True, eq=False)
class PageSum:
    """Checksum of a sequence's pages from some position on (`services/pages/kv_checksum.py`)."""

    stop: int
    """Position up to which pages are summed. At first the position where the sum starts."""
    here: dict[GroupHead, int] = field(default_factory=dict)
    """Sums of the layers on this rank, by KV head."""
    everywhere: dict[GroupHead, int] | None = None
    """Sums over all ranks of the worker, by KV head. Known after a step that draws a token."""

    def add(self, summed: abc.Mapping[GroupHead, int], stop: int) -> None:
        """Extend the sum to position `stop`. `summed`: sums of the positions up to there, by KV head."""
        for head, value in summed.items():
            self.here[head] = (self.here.get(head, 0) + value) & WORD
        self.stop = stop

    @property
    def total(self) -> int:
        """Sum of what this rank has, over all its KV heads."""
        return sum(self.here.values()) & WORD

    def of(self, heads: abc.Iterable[GroupHead]) -> int:
        """Return the worker's sum for some KV heads. Raises ValueError before a step has drawn a token."""
        if self.everywhere is None:
            raise ValueError("a sum of pages is asked for before all ranks have told theirs")
        return sum(self.everywhere.get(head, 0) for head in heads) & WORD


@dataclass(slots=True, eq=False)
class PromptScores:
    """Log-probabilities of a sequence's prompt tokens, from the second token on."""

    values: list[Score] = field(default_factory=list)
    """Scores of the tokens at positions 1, 2, …, as far as they are computed. The same on all ranks."""


@dataclass(slots=True, eq=False)
class Proposal:
    """Drafts for the next step of a sequence, made by the engine after a step that drew a token.

    The same on all ranks (`drafts-agreed`).
    """

    tokens: abc.Sequence[int] = ()
    """At most PROPOSED_MAX token ids behind the last drawn one: forced by the grammar, or else drafted by the
    draft model."""
    forced: int = 0
    """Number of leading tokens that are the only ones the grammar allows (`forced-is-drawn`)."""
    wanted: int = 0
    """Most tokens that the draft model should make. Set by the caller before a step."""
    over: bool = False
    """True if the sequence has ended, or the draft model cannot read it. Nothing is drafted any more."""
    spent_us: int = 0
    """Microseconds by which the draft model delayed the step, for all sequences together."""
    draft_us: int = 0
    """Microseconds of that for one token. 0 if it made none."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's tokens as this worker knows them."""

    request: Request
    output: list[int]
    """Tokens drawn so far, also by an earlier room of the request. The worker appends. Decode starts with the
    token that prefill drew."""
    engine_state: object = field(default=None, init=False, repr=False)
    """State that the engine keeps from one step to the next."""
    sampler_state: object = field(default=None, init=False, repr=False)
    """State that the sampler keeps from one step to the next."""
    fold: GrammarState | None = field(default=None, init=False, repr=False)
    """State of the request's grammar, on the rank that draws. Set once the grammar is compiled, before the
    first draw."""
    page_sum: PageSum | None = field(default=None, init=False, repr=False)
    """Checksum that every step extends to the end of its row, if the caller set one."""
    scores: PromptScores | None = field(default=None, init=False, repr=False)
    """Prompt scores that every step extends, if the caller set some."""
    proposal: Proposal | None = field(default=None, init=False, repr=False)
    """Proposal that every step with a draw renews, if the caller set one. On all ranks."""

    @property
    def length(self) -> int:
        """Number of known tokens, prompt and output."""
        return len(self.request.prompt) + len(self.output)

    def tokens(self, start: int, stop: int) -> abc.Sequence[int]:
        """Return the token ids at positions [start, stop), which must be known."""
        prompt = self.request.prompt
        if start >= len(prompt):
            return self.output[start - len(prompt) : stop - len(prompt)]
        if stop <= len(prompt):
            return prompt[start:stop]
        return (*prompt[start:], *self.output[: stop - len(prompt)])


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step: tokens [start, stop) are computed, earlier ones are in its pages."""

    sequence: Sequence
    start: int
    stop: int
    tables: abc.Sequence[abc.Sequence[int]]
    """Page tables of the sequence by KV group, each covering at least `end` tokens."""
    sample: bool
    """True to draw the token at position `stop`."""
    drafts: abc.Sequence[int] = ()
    """Drafts for positions `stop`, `stop` + 1, …, of a row that samples. They are computed too, and `take`
    says which of them are accepted."""

    @property
    def end(self) -> int:
        """Position where computed tokens end, drafts included.

        Keys and values of rejected drafts stay in the pages behind the known tokens. The next row overwrites
        them before they are read (`not-taken-never-read`).
        """
        return self.stop + len(self.drafts)

    @property
    def fed(self) -> abc.Sequence[int]:
        """Token ids at positions [start, end)."""
        known = self.sequence.tokens(self.start, self.stop)
        return (*known, *self.drafts) if self.drafts else known

    @property
    def pages(self) -> abc.Sequence[int]:
        """Page table of an engine with one KV group."""
        (pages,) = self.tables
        return pages

    @property
    def scored(self) -> range:
        """Positions whose logits score the next prompt token (`scored-is-computed`)."""
        scores = self.sequence.scores
        if scores is None:
            return range(0)
        return range(
            max(self.start, len(scores.values)), min(self.stop, len(self.sequence.request.prompt) - 1)
        )

    @property
    def wanted(self) -> abc.Sequence[int]:
        """Positions whose logits are needed, ascending: scored ones, the last known one if a token is drawn,
        and drafts."""
        drawn = range(self.stop - 1, self.end) if self.sample else ()
        return drawn if self.sequence.scores is None else (*self.scored, *drawn)


@dataclass(frozen=True, slots=True)
class PageSumRequest:
    """Request to extend a page sum to position `stop` of a sequence with these pages."""

    sum: PageSum
    tables: abc.Sequence[abc.Sequence[int]]
    """Page tables by KV group."""
    stop: int


def check(row: Row, page_tokens: int, pages: int, context_length: int) -> None:
    """Raise ValueError, naming the request and the numbers, if `row` cannot be computed."""
    known = row.sequence.length
    name = row.sequence.request.request_id
    if not 0 <= row.start < row.stop <= known:
        raise ValueError(f"{name}: positions [{row.start}, {row.stop}) of a sequence of {known} tokens")
    if row.end > context_length:
        raise ValueError(f"{name}: position {row.end - 1} in a model of {context_length} positions")
    if row.sample and row.stop != known:
        raise ValueError(f"{name}: token {row.stop} is known already and cannot be drawn")
    if row.drafts and not row.sample:
        raise ValueError(f"{name}: {len(row.drafts)} drafts of a row that draws nothing")
    if row.drafts and row.scored:
        raise ValueError(f"{name}: {len(row.drafts)} drafts of a row whose prompt is scored")
    scores, prompt = row.sequence.scores, len(row.sequence.request.prompt)
    if scores is not None and len(scores.values) < min(row.start, prompt - 1):
        raise ValueError(f"{name}: scores behind position {row.start}, and {len(scores.values)} before it")
    needed = -(-row.end // page_tokens)
    if len(row.pages) < needed:
        raise ValueError(f"{name}: {row.end} tokens need {needed} pages, the table has {len(row.pages)}")
    for page in row.pages[:needed]:
        if not 0 <= page < pages:
            raise ValueError(f"{name}: page {page} of a cache of {pages} pages")


class Steps(Protocol):
    """Calls to an engine on a thread of its own, one at a time. `release` comes from another thread."""

    def bind_thread(self) -> None:
        """Prepare the calling thread. Called first by each thread that makes steps or transfers the engine's
        memory."""

    def step(self, rows: abc.Sequence[Row]) -> abc.Sequence[RowResult]:
        """Compute the rows' positions, draw tokens where rows ask for them, and extend page sums and prompt
        scores.

        No two rows share a page that one of them writes. Behind a draw, drafts are checked as far as they are
        accepted. A row draws the same tokens with any drafts or none.
        Returns one entry a row, the same on all ranks: no token if `sample` is False, LogitsNotFinite if the
        row's weights or pages are broken, GrammarUnsatisfied if its output cannot follow its grammar. Appends
        nothing to `output`. Tokens behind the end of an answer may come, since the engine does not know where
        answers end. Renews the sequence's proposal if a token was drawn.

        When it returns, the keys and values of all rows are in their pages (`written-before-sent`). After it
        has returned or raised, nothing is written there (`no-free-under-write`).

        Raises ValueError before anything is computed, for a row that cannot be computed, or if more than
        `scored_max` positions are scored. Raises EngineLost if its device is lost. A failure on one rank
        breaks the rank group: RankGroupBroken on all ranks.
        """

    def sum_pages(self, parts: abc.Sequence[PageSumRequest]) -> None:
        """Extend each sum by the current contents of its pages, on this rank. Raises EngineLost as `step`
        does."""

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence: no later step has a row of it (`each-is-released`).

        Called once for each sequence that a step had a row of, whether that step failed or not, and after its
        last step has ended. It comes from the thread of the turns. A step of other sequences may be running,
        which it neither waits for nor disturbs. What the engine stores for the sequence is free at the latest
        when the next step begins. Its pages are untouched: the worker frees them.
        """


class KvMemory(Movable, Protocol):
    """A rank's pages of one KV group in one piece of memory, which peers write to and read from.

    Exposure moves it while no step runs.
    """

    @property
    def pages(self) -> int: ...


class Grammars(Protocol):
    """Compiler of the grammars of requests, on the rank that draws."""

    def folds(self, grammar: Grammar, output: abc.Sequence[int], count: int) -> Future[list[GrammarState]]:
        """Start compiling, and return a future with `count` grammar states that continue `output`.

        The future raises GrammarRefused, GrammarLost if `output` does not follow the grammar, and
        StartupError if the model's tokenizer cannot be read.
        """


class DraftPages(Protocol):
    """The draft model's pages. Used from any thread. `Engine.release` frees those of a sequence."""

    def census(self) -> abc.Mapping[str, int]:
        """Return the number of pages that are `taken` and that are `free`."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine promises, with its number format and on its device. A worker registers it."""

    name: str
    """Name of the engine, as `--engine` has it."""
    batch_invariant: bool
    """True if a request's tokens depend neither on the other rows of its steps, nor on how its prompt was
    divided into chunks."""
    chunked_prompts: bool = True
    """False if a row of several tokens has to begin at position 0. Then a prompt is one row, without cached
    prefixes, further choices, prompt scores or drafts."""


class Engine(Steps, Protocol):
    """A model over a paged KV cache.

    If several ranks share a model, each has an engine, and all get the same steps.
    """

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def whole(self) -> KvLayout:
        """Layout of the worker's pages over all ranks."""

    @property
    def layout(self) -> KvLayout:
        """Layout of this rank's pages."""

    @property
    def caches(self) -> abc.Sequence[KvMemory]:
        """Memory of each KV group, in the layout's order."""

    @property
    def vocab_size(self) -> int:
        """Upper bound of token ids."""

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence."""

    @property
    def scored_max(self) -> int:
        """Most positions of a step that score prompt tokens."""

    @property
    def grammars(self) -> Grammars | None:
        """None on a rank that does not draw."""

    @property
    def draft_pages(self) -> DraftPages | None:
        """None on a rank without a draft model."""


EngineLoader = Callable[[WorkerSettings, int], Engine]
"""(settings, compute threads) -> the engine of a rank, ready for steps."""

EnginePairLoader = Callable[[WorkerSettings, int], tuple[Engine, Engine]]
"""The same for a process that serves both sides: the engines of prefill and decode over one set of weights.
One thread makes the steps of both, one at a time."""
