"""What does a worker ask of an engine, and what goes over between them?

A worker owns the pages and the sequences; an engine owns the memory, the weights and the draw. One engine
serves both sides: a row of many tokens is prefill, a row of one is decode, and a step may hold both.

Workers know nothing else of an engine, and no tensor library is loaded for it: the one of torch is
`services/engine/torch_engine.py`, those of the simulation, the tests and the benchmarks are others.
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
"""Tokens of a proposal."""


class DrawFailed(Exception):
    """For one sequence no token can be drawn; the others of its step have theirs."""


class LogitsNotFinite(DrawFailed):
    """The largest of its logits is NaN or infinite."""

    def __init__(self) -> None:
        super().__init__("the model computed logits that are not numbers")


class GrammarUnsatisfied(DrawFailed):
    """Its output cannot be held to its grammar, or not any further."""

    def __init__(self, why: str = "seen by the rank that draws") -> None:
        super().__init__(f"the answer cannot be held to its grammar any further: {why}")


DrawResult = Token | LogitsNotFinite | GrammarUnsatisfied
"""At one position of a sequence."""

RowResult = tuple[Token, ...] | LogitsNotFinite | GrammarUnsatisfied
"""Of one row: the tokens that come next, none where it asks for none; or why there is not even one."""


def take(drafts: abc.Sequence[int], drawn: abc.Iterable[DrawResult]) -> RowResult:
    """What comes of `drafts`, given the draws at the first one's position and behind each of them: a draft is
    taken exactly when it is the draw at its position (`drawn-is-drawn`), and the first draw that is not its
    draft comes in its place. Asks for no draw beyond. Behind a token, what could not be drawn is left to the
    next step, which says why."""
    taken: list[Token] = []
    for place, each in enumerate(drawn):
        if not isinstance(each, Token):
            return each if place == 0 else tuple(taken)
        taken.append(each)
        if place == len(drafts) or each.id != drafts[place]:
            break
    return tuple(taken)


class EngineLost(Exception):
    """It will not compute anything any more: the worker has to end, and another process to take its place."""


class RankGroupBroken(Exception):
    """A rank of this worker died, was late or could not compute: the step has no result on any rank. The text
    names the rank that says so."""


@dataclass(slots=True, eq=False)
class PageSum:
    """The sum of what a sequence's pages hold (`baton.pages.kv_checksum`), from some position on."""

    stop: int
    """How far it has got; at first, where it starts."""
    here: dict[GroupHead, int] = field(default_factory=dict)
    """Of the layers that this rank holds, by KV head."""
    everywhere: dict[GroupHead, int] | None = None
    """Of all layers and KV heads of the worker, by KV head: known with the step that draws a token."""

    def add(self, summed: abc.Mapping[GroupHead, int], stop: int) -> None:
        """Carry it on to `stop` by what the pages up to there `summed` up to."""
        for head, value in summed.items():
            self.here[head] = (self.here.get(head, 0) + value) & WORD
        self.stop = stop

    @property
    def total(self) -> int:
        """Of what this rank holds."""
        return sum(self.here.values()) & WORD

    def of(self, heads: abc.Iterable[GroupHead]) -> int:
        """Of the worker's pages, for some KV heads. Only after a step that drew a token."""
        if self.everywhere is None:
            raise ValueError("a sum of pages is asked for before all ranks have told theirs")
        return sum(self.everywhere.get(head, 0) for head in heads) & WORD


@dataclass(slots=True, eq=False)
class PromptScores:
    """How likely a sequence's prompt is, token by token, from its second one on."""

    told: list[Score] = field(default_factory=list)
    """Of the tokens at positions 1, 2, …, as far as they are computed: the same on all ranks."""


@dataclass(slots=True, eq=False)
class Proposal:
    """What may come next in a sequence, as its engine knows it after a step that drew for it: drafts for the
    next one. The same on all ranks (`drafts-agreed`)."""

    tokens: abc.Sequence[int] = ()
    """At most PROPOSED_MAX, behind all that the step drew: what is forced, else what the draft model says."""
    forced: int = 0
    """How many of them, from the first one on, the grammar leaves no other token than (`forced-is-drawn`)."""
    wanted: int = 0
    """Set by the caller before a step: how many the draft model is to make behind it."""
    over: bool = False
    """The sequence has ended, or the draft model cannot read it: it makes nothing any more."""
    spent_us: int = 0
    """For how long the draft model held the step up, for all of its sequences."""
    draft_us: int = 0
    """Of that, for one token; 0 where it made none."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's tokens as this worker knows them."""

    request: Request
    output: list[int]
    """Drawn so far, by an earlier room of the request too; the worker appends. Decode starts with the token
    that its room's prefill side drew."""
    engine_state: object = field(default=None, init=False, repr=False)
    """State that the engine keeps from one step to the next."""
    sampler_state: object = field(default=None, init=False, repr=False)
    """State that the sampler keeps from one step to the next."""
    fold: GrammarState | None = field(default=None, init=False, repr=False)
    """Of a request with a grammar, on the rank that draws: set once it is compiled, before the first draw."""
    page_sum: PageSum | None = field(default=None, init=False, repr=False)
    """Where the caller set one: every step carries it on to the end of its row."""
    scores: PromptScores | None = field(default=None, init=False, repr=False)
    """Likewise, of a request whose prompt is scored."""
    proposal: Proposal | None = field(default=None, init=False, repr=False)
    """Where the caller set one, on all ranks: every step that draws makes it anew."""

    @property
    def length(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.request.prompt) + len(self.output)

    def tokens(self, start: int, stop: int) -> abc.Sequence[int]:
        """The ids at positions [start, stop), which must be known."""
        prompt = self.request.prompt
        if start >= len(prompt):
            return self.output[start - len(prompt) : stop - len(prompt)]
        if stop <= len(prompt):
            return prompt[start:stop]
        return (*prompt[start:], *self.output[: stop - len(prompt)])


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step: its tokens at [start, stop) are fed, those before are in its pages."""

    sequence: Sequence
    start: int
    stop: int
    tables: abc.Sequence[abc.Sequence[int]]
    """The sequence's page tables by group, covering at least `end` tokens."""
    sample: bool
    """Draw the token at position `stop`."""
    drafts: abc.Sequence[int] = ()
    """Only of a row that samples: what may be drawn at positions `stop`, `stop` + 1, …. They are fed too, and
    what follows each that is drawn is drawn as well (`take`)."""

    @property
    def end(self) -> int:
        """Where the positions that are fed end. The keys and values of drafts that are not taken stay where
        they were written, behind what is known: the next row writes over them before they are read
        (`not-taken-never-read`)."""
        return self.stop + len(self.drafts)

    @property
    def fed(self) -> abc.Sequence[int]:
        """The ids at positions [start, end)."""
        known = self.sequence.tokens(self.start, self.stop)
        return (*known, *self.drafts) if self.drafts else known

    @property
    def pages(self) -> abc.Sequence[int]:
        """The page table, for an engine that keeps one group."""
        (pages,) = self.tables
        return pages

    @property
    def scored(self) -> range:
        """Positions whose logits score the prompt's token behind them (`scored-is-computed`)."""
        scores = self.sequence.scores
        if scores is None:
            return range(0)
        return range(max(self.start, len(scores.told)), min(self.stop, len(self.sequence.request.prompt) - 1))

    @property
    def wanted(self) -> abc.Sequence[int]:
        """Positions whose logits are asked for, ascending: the last known one where a token is drawn, and
        those of the drafts."""
        drawn = range(self.stop - 1, self.end) if self.sample else ()
        return drawn if self.sequence.scores is None else (*self.scored, *drawn)


@dataclass(frozen=True, slots=True)
class PageSumRequest:
    """A sum to be carried on to position `stop` of a sequence with these pages."""

    sum: PageSum
    tables: abc.Sequence[abc.Sequence[int]]
    """By group."""
    stop: int


def check(row: Row, page_tokens: int, pages: int, context_length: int) -> None:
    """Raise ValueError, naming request and numbers, if `row` cannot be computed as it stands."""
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
    if scores is not None and len(scores.told) < min(row.start, prompt - 1):
        raise ValueError(f"{name}: scores behind position {row.start}, and {len(scores.told)} before it")
    needed = -(-row.end // page_tokens)
    if len(row.pages) < needed:
        raise ValueError(f"{name}: {row.end} tokens need {needed} pages, the table has {len(row.pages)}")
    for page in row.pages[:needed]:
        if not 0 <= page < pages:
            raise ValueError(f"{name}: page {page} of a cache of {pages} pages")


class Steps(Protocol):
    """What is asked of an engine on a thread of its own, one call at a time."""

    def bind_thread(self) -> None:
        """Called first by each thread that makes steps, or that transfers the engine's memory."""

    def step(self, rows: abc.Sequence[Row]) -> abc.Sequence[RowResult]:
        """Compute each row's positions, draw its next token where the row asks, and those behind it as far as
        they are its drafts; carry its page sum and its prompt's scores on where it has some, up to what is
        known. No two rows share a page that one of them writes.

        Returns one entry a row, the same on all ranks: no token where `sample` is False, LogitsNotFinite
        where what the row was computed from, its weights or its pages, is broken, and GrammarUnsatisfied
        where the row's output cannot be held to its grammar; appends nothing to `output`, and does not know
        where an answer ends: tokens behind its end may come. Makes the sequence's proposal anew, where it has
        one and a token was drawn. With any drafts a row draws what it draws without. The keys and values of
        all rows are in their pages when it returns (`written-before-sent`), and nothing is written there
        after it has returned or raised (`no-free-under-write`). Raises ValueError, before anything is
        computed, for a row that cannot be computed, or for more than `scored_max` positions that are scored;
        EngineLost where its device is lost. What fails on one rank alone breaks its team: RankGroupBroken on
        all of them.
        """

    def sum_pages(self, parts: abc.Sequence[PageSumRequest]) -> None:
        """Carry each sum on over what its pages hold now, on this rank. Raises EngineLost as `step` does."""


class KvMemory(Movable, Protocol):
    """A rank's pages of one group, one behind the other, which peers write to and read from. Exposure moves
    them, while no step runs."""

    @property
    def pages(self) -> int: ...


class Grammars(Protocol):
    """What the answers are held to that this rank draws."""

    def folds(self, grammar: Grammar, output: abc.Sequence[int], count: int) -> Future[list[GrammarState]]:
        """Of so many answers that go on behind `output`, at least one. Its future raises GrammarRefused,
        GrammarLost where the output is none of the grammar's, and StartupError for a model whose tokenizer
        cannot be read."""


class DraftPages(Protocol):
    """Where the draft model keeps keys and values, of what it proposes for. Used from any thread."""

    def census(self) -> abc.Mapping[str, int]:
        """Pages that are `taken` and that are `free`."""

    def release(self, proposal: Proposal) -> None:
        """Its sequence has ended: it has no pages from then on, or from the end of what is computed now."""


class Engine(Steps, Protocol):
    """A model over a paged KV cache.

    Where several ranks share a model, each has an engine, and all are asked for the same steps.
    """

    @property
    def whole(self) -> KvLayout:
        """Of the worker's pages, over all ranks."""

    @property
    def layout(self) -> KvLayout:
        """Of this rank's pages."""

    @property
    def caches(self) -> abc.Sequence[KvMemory]:
        """Of each group, in the layout's order."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence."""

    @property
    def scored_max(self) -> int:
        """Positions that score a prompt's tokens, of one step."""

    @property
    def grammars(self) -> Grammars | None:
        """None on a rank that does not draw."""

    @property
    def draft_pages(self) -> DraftPages | None:
        """None where this rank has no draft model."""


EngineLoader = Callable[[WorkerSettings, int], Engine]
"""How a rank's engine comes up, with so many threads."""

EnginePairLoader = Callable[[WorkerSettings, int], tuple[Engine, Engine]]
"""The same of a process that serves both sides: prefill's and decode's, over one set of weights. One thread
makes the steps of both, one at a time."""
