"""The interface between a worker and an engine: the calls, and the values that they exchange.

A worker owns the pages and the sequences. An engine owns the memory and the weights, and samples tokens. One
engine serves both sides. A row of many tokens is prefill, a row of one token is decode. A step may hold both.

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
"""Most draft tokens that an engine proposes for the next step of one sequence."""


class DrawFailed(Exception):
    """No token could be sampled for one sequence. Other sequences of the same step have their tokens."""


class LogitsNotFinite(DrawFailed):
    """No token could be sampled for a sequence, because its largest logit is NaN or infinite."""

    def __init__(self) -> None:
        super().__init__("the model computed logits that are not numbers")


class GrammarUnsatisfied(DrawFailed):
    """No token could be sampled for a sequence, because its grammar allows none any more."""

    def __init__(self, why: str = "seen by the rank that draws") -> None:
        super().__init__(f"the answer cannot be held to its grammar any further: {why}")


DrawResult = Token | LogitsNotFinite | GrammarUnsatisfied
"""Result of sampling at one position of a sequence: a token, or the reason why there is none."""

RowResult = tuple[Token, ...] | LogitsNotFinite | GrammarUnsatisfied
"""Result of one row of a step: its sampled tokens, or the reason why not even the first could be sampled."""


def take(drafts: abc.Sequence[int], drawn: abc.Iterable[DrawResult]) -> RowResult:
    """Return the result of a row, given its `drafts` and the tokens sampled at their positions.

    A draft is accepted exactly if it equals the token sampled at its position (`drawn-is-drawn`). The first
    sampled token that differs from its draft replaces it, and nothing behind it is consumed. If sampling
    fails behind a token, the next step reports why.
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
    """The engine cannot compute any more. Its worker has to end, and another process takes its place."""


class RankGroupBroken(Exception):
    """A rank of this worker died, was late or could not compute. The step has no result on any rank.

    The error's text names the rank that reported the failure.
    """


@dataclass(slots=True, eq=False)
class PageSum:
    """Checksum of a sequence's KV pages from some position on, to check a hand-over."""

    stop: int
    """Token position up to which pages are included. At first the position where the checksum starts."""
    here: dict[GroupHead, int] = field(default_factory=dict)
    """Checksums over the layers on this rank, by (KV group index, KV head id), modulo 2**64."""
    everywhere: dict[GroupHead, int] | None = None
    """Checksums over all ranks, by (KV group index, KV head id). None until a token of the sequence is
    sampled."""

    def add(self, summed: abc.Mapping[GroupHead, int], stop: int) -> None:
        """Extend the checksum to position `stop`. `summed`: checksums of the new positions, by KV head."""
        for head, value in summed.items():
            self.here[head] = (self.here.get(head, 0) + value) & WORD
        self.stop = stop

    @property
    def total(self) -> int:
        """Checksum of the sequence's pages over all KV heads and layers on this rank, modulo 2**64."""
        return sum(self.here.values()) & WORD

    def of(self, heads: abc.Iterable[GroupHead]) -> int:
        """Return the checksum of these heads over all ranks. Raises ValueError before a token was sampled."""
        if self.everywhere is None:
            raise ValueError("a sum of pages is asked for before all ranks have told theirs")
        return sum(self.everywhere.get(head, 0) for head in heads) & WORD


@dataclass(slots=True, eq=False)
class PromptScores:
    """Log-probabilities of a sequence's prompt tokens, from the second token on (`prompt_logprobs`)."""

    values: list[Score] = field(default_factory=list)
    """Log-probabilities of the prompt tokens at positions 1, 2, … computed so far, the same on all ranks."""


@dataclass(slots=True, eq=False)
class Proposal:
    """Draft tokens for the next step of a sequence, which the engine makes after a step that sampled a token.

    They are the same on all ranks (`drafts-agreed`).
    """

    tokens: abc.Sequence[int] = ()
    """At most PROPOSED_MAX draft token ids, which follow the sequence's last sampled token. They are forced
    by the grammar, or else drafted by the draft model."""
    forced: int = 0
    """Number of leading draft tokens that the grammar forces: it allows no other (`forced-is-drawn`)."""
    wanted: int = 0
    """Most tokens that the draft model should draft next. Set by the worker before a step."""
    over: bool = False
    """Whether the draft model drafts no more for this sequence: the sequence has ended, or it has a token
    that the draft model lacks."""
    spent_us: int = 0
    """Microseconds by which the draft model delayed the last step, for all its sequences together."""
    draft_us: int = 0
    """Average time of the draft model for one token drafted in the last step, in microseconds. 0 for none."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request in the engine: its prompt, its output so far, and the engine's state for it."""

    request: Request
    output: list[int]
    """Output token ids so far, including those of earlier rooms of the request. The worker appends to it. On
    decode it starts with the token that prefill sampled."""
    engine_state: object = field(default=None, init=False, repr=False)
    """State of this sequence that the engine keeps from one step to the next."""
    sampler_state: object = field(default=None, init=False, repr=False)
    """State of this sequence that the sampler keeps from one step to the next."""
    fold: GrammarState | None = field(default=None, init=False, repr=False)
    """State of the request's grammar after this sequence's output, on the rank that samples. Set once the
    grammar is compiled, before the first token is sampled. None without a grammar."""
    page_sum: PageSum | None = field(default=None, init=False, repr=False)
    """Checksum of the sequence's pages, or None if none is wanted. Every step extends it over its row."""
    scores: PromptScores | None = field(default=None, init=False, repr=False)
    """Log-probabilities of the prompt so far, extended by each step. None if none are requested."""
    proposal: Proposal | None = field(default=None, init=False, repr=False)
    """Draft tokens for the next step, or None if the worker wants none. Every step that samples a token for
    the sequence renews them, on all ranks."""

    @property
    def length(self) -> int:
        """Number of known tokens of the sequence: prompt and output."""
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
    """One sequence's part of a step: tokens at [start, stop) are computed, earlier ones are in its pages."""

    sequence: Sequence
    start: int
    stop: int
    tables: abc.Sequence[abc.Sequence[int]]
    """Page tables of the sequence: page indices by KV group, which cover at least `end` tokens in each.

    The page of a state holds the state after `start` tokens, which a step replaces by that after `stop`. If
    `start` is 0, the contents of the page do not count: the sequence begins with a blank state."""
    sample: bool
    """Whether the step samples the token at position `stop`."""
    drafts: abc.Sequence[int] = ()
    """Draft token ids for positions `stop`, `stop` + 1, …, of a row that samples a token. The step computes
    them too, and `take` decides which of them are accepted."""

    state_from: abc.Sequence[abc.Sequence[int]] = ()
    """Pages from which the sequence's states are copied before the row is computed, by KV group."""
    state_to: abc.Sequence[abc.Sequence[int]] = ()
    """Pages to which the sequence's states are copied behind the row, by KV group."""

    @property
    def end(self) -> int:
        """Position behind the last computed token, drafts included.

        Keys and values of rejected drafts stay in the pages behind the known tokens. The next row overwrites
        them before they are read (`not-taken-never-read`).
        """
        return self.stop + len(self.drafts)

    @property
    def fed(self) -> abc.Sequence[int]:
        """Token ids that are computed for this row: those at positions [start, stop), then the drafts."""
        known = self.sequence.tokens(self.start, self.stop)
        return (*known, *self.drafts) if self.drafts else known

    @property
    def pages(self) -> abc.Sequence[int]:
        """Page table of the row, for an engine with a single KV group."""
        (pages,) = self.tables
        return pages

    @property
    def scored(self) -> range:
        """Positions whose logits score the next prompt token. Empty if no scores are wanted
        (`scored-is-computed`)."""
        scores = self.sequence.scores
        if scores is None:
            return range(0)
        return range(
            max(self.start, len(scores.values)), min(self.stop, len(self.sequence.request.prompt) - 1)
        )

    @property
    def wanted(self) -> abc.Sequence[int]:
        """Positions of this row whose logits are needed, ascending: scored prompt positions, then, if the row
        samples, the last known token and the drafts."""
        drawn = range(self.stop - 1, self.end) if self.sample else ()
        return drawn if self.sequence.scores is None else (*self.scored, *drawn)


@dataclass(frozen=True, slots=True)
class PageSumRequest:
    """Request to extend one sequence's page checksum to position `stop`."""

    sum: PageSum
    tables: abc.Sequence[abc.Sequence[int]]
    """Page tables of the sequence: page indices by KV group."""
    stop: int
    ends: bool
    """Whether `stop` is the end of what is handed over. Only then states are summed: later tokens change
    them."""


class Steps(Protocol):
    """Calls by which a worker lets its engine compute. They all come from one thread, except `release`."""

    def bind_thread(self) -> None:
        """Prepare the calling thread, for example by selecting the GPU. Each thread that runs steps or
        transfers the engine's memory calls it first."""

    def step(self, rows: abc.Sequence[Row]) -> abc.Sequence[RowResult]:
        """Compute one step: the positions of all rows, and at least one sampled token for each row that
        samples.

        It also extends page checksums and prompt scores. No two rows share a page to which one of them
        writes. Drafts are checked up to the first that is rejected. A row samples the same tokens with any
        drafts or none.
        Returns one result a row, the same on all ranks: no token if `sample` is False, LogitsNotFinite if the
        row's weights or pages are broken, GrammarUnsatisfied if its output cannot follow its grammar. Appends
        nothing to `output`. Tokens behind the end of an answer may come, since the engine does not know where
        answers end. Renews the sequence's proposal if a token was sampled.

        When it returns, the keys and values of all rows are in their pages (`written-before-sent`). After it
        has returned or raised, nothing is written there (`no-free-under-write`).

        Raises ValueError before anything is computed, for a row that cannot be computed, or if more than
        `scored_max` positions are scored. Raises EngineLost if its device is lost. A failure on one rank
        breaks the rank group: RankGroupBroken on all ranks.
        """

    def sum_pages(self, parts: abc.Sequence[PageSumRequest]) -> None:
        """Extend the requested page checksums by the current contents of their pages, on this rank only.
        Raises EngineLost if the device is lost."""

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended: no later step has a row of it (`each-is-released`).

        Called once for each sequence that had a row in some step, after its last step has ended or failed. It
        comes from the thread of the worker's loop. A step of other sequences may be running, which it neither
        waits for nor disturbs. What the engine stores for the sequence is free at the latest when the next
        step begins. Its pages are untouched: the worker frees them.
        """


class KvMemory(Movable, Protocol):
    """One rank's pages of one KV group, in one piece of memory that peers write to and read from.

    The memory may be moved to other addresses while no step runs.
    """

    @property
    def pages(self) -> int: ...


class Grammars(Protocol):
    """Compiler of the requests' grammars, on the rank that samples tokens."""

    def folds(self, grammar: Grammar, output: abc.Sequence[int], count: int) -> Future[list[GrammarState]]:
        """Compile `grammar`, and return a future with `count` separate states of it that have read `output`.

        The future raises GrammarRefused, GrammarLost if `output` does not follow the grammar, and
        StartupError if the model's tokenizer cannot be read.
        """


class DraftPages(Protocol):
    """KV pages of the draft model. Used from any thread. `Engine.release` frees those of a sequence."""

    def census(self) -> abc.Mapping[str, int]:
        """Return the number of the draft model's pages by state, under the keys `taken` and `free`."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine guarantees with its number format and device. A worker registers it at the bootstrap."""

    name: str
    """Name of the engine, as the setting `--engine` spells it."""
    batch_invariant: bool
    """Whether a request's tokens depend neither on the other rows of its steps, nor on how its prompt was
    divided into chunks."""
    chunked_prompts: bool = True
    """Whether a prompt may be split into several rows (chunked prefill). If not, it is one row, without
    cached prefixes, further choices, prompt log-probabilities or drafts."""
    drafts: bool = True
    """Whether rows may have drafts. States cannot be taken back, so a model that has some takes none."""


class Engine(Steps, Protocol):
    """A language model that computes steps over a paged KV cache.

    If several ranks share a model, each has an engine, and all get the same steps.
    """

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def whole(self) -> KvLayout:
        """Layout of the worker's KV pages if the parts of all its ranks are put together."""

    @property
    def layout(self) -> KvLayout:
        """Layout of the KV pages on this rank: its KV groups, layers and heads."""

    @property
    def caches(self) -> abc.Sequence[KvMemory]:
        """KV memory of each KV group on this rank, in the order of the layout's groups."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary: all token ids are below it."""

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence, prompt and output together."""

    @property
    def scored_max(self) -> int:
        """Most positions in one step whose logits are used for log-probabilities of prompt tokens."""

    @property
    def grammars(self) -> Grammars | None:
        """Compiler of the requests' grammars, or None on a rank that does not sample tokens."""

    @property
    def draft_pages(self) -> DraftPages | None:
        """KV pages of the draft model, or None on a rank without a draft model."""


EngineLoader = Callable[[WorkerSettings, int], Engine]
"""Function (settings, number of compute threads) that loads the engine of a rank, ready for steps."""

EnginePairLoader = Callable[[WorkerSettings, int], tuple[Engine, Engine]]
"""Function (settings, threads) that loads the engines of prefill and decode over one set of weights. One
thread runs the steps of both, one at a time."""
