"""What is the engine asked to compute in one step?"""

from array import array
from collections import abc
from dataclasses import dataclass, field

import torch

from services.grammars.fold import Fold
from services.pages.checksum import WORD
from services.rooms.request import Request, Score


@dataclass(slots=True, eq=False)
class PageSum:
    """The sum of what a sequence's pages hold (`services/pages/checksum.py`), from some position on."""

    stop: int
    """How far it has got; at first, where it starts."""
    here: dict[int, int] = field(default_factory=dict)
    """Of the layers that this rank holds, by KV head."""
    everywhere: dict[int, int] | None = None
    """Of all layers and KV heads of the worker, by KV head: known with the step that draws a token."""

    def add(self, summed: abc.Mapping[int, int], stop: int) -> None:
        """Carry it on to `stop` by what the pages up to there `summed` up to."""
        for head, value in summed.items():
            self.here[head] = (self.here.get(head, 0) + value) & WORD
        self.stop = stop

    @property
    def total(self) -> int:
        """Of what this rank holds."""
        return sum(self.here.values()) & WORD

    def of(self, kv_heads: abc.Iterable[int]) -> int:
        """Of the worker's pages, for some KV heads. Only after a step that drew a token."""
        if self.everywhere is None:
            raise ValueError("a sum of pages is asked for before all ranks have told theirs")
        return sum(self.everywhere.get(head, 0) for head in kv_heads) & WORD


@dataclass(slots=True, eq=False)
class Seen:
    """Which tokens a sequence has, each once, up to some position."""

    stop: int = 0
    ids: set[int] = field(default_factory=set)
    places: torch.Tensor | None = None
    """The same, where scores are."""


@dataclass(slots=True, eq=False)
class PromptScores:
    """How likely a sequence's prompt is, token by token, from its second one on."""

    told: list[Score] = field(default_factory=list)
    """Of the tokens at positions 1, 2, …, as far as they are computed: the same on all ranks."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's tokens as this worker knows them."""

    request: Request
    output: list[int]
    """Drawn so far, by an earlier room of the request too; the worker appends. Decode starts with the token
    that its room's prefill side drew."""
    tail_page: int = field(default=-1, init=False, repr=False)
    """The engine's own note: the page, partly used, whose unused end it has zeroed for this sequence."""
    seen: Seen = field(default_factory=Seen, init=False, repr=False)
    """The engine's own note, for penalties."""
    fold: Fold | None = field(default=None, init=False, repr=False)
    """Of a request with a grammar, on the rank that draws: set once it is compiled, before the first draw."""
    page_sum: PageSum | None = field(default=None, init=False, repr=False)
    """Where the caller set one: every step carries it on to the end of its row."""
    scores: PromptScores | None = field(default=None, init=False, repr=False)
    """Likewise, of a request whose prompt is scored."""

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
    pages: abc.Sequence[int]
    """The sequence's page table, covering at least `stop` tokens."""
    sample: bool
    """Draw the token at position `stop`."""

    @property
    def scored(self) -> range:
        """Positions whose logits score the prompt's token behind them (`scored-is-computed`)."""
        scores = self.sequence.scores
        if scores is None:
            return range(0)
        return range(max(self.start, len(scores.told)), min(self.stop, len(self.sequence.request.prompt) - 1))

    @property
    def wanted(self) -> abc.Sequence[int]:
        """Positions whose logits are asked for, ascending: the last one where a token is drawn."""
        drawn = (self.stop - 1,) if self.sample else ()
        return drawn if self.sequence.scores is None else (*self.scored, *drawn)


@dataclass(frozen=True, slots=True)
class SumPart:
    """A sum to be carried on to position `stop` of a sequence with these pages."""

    sum: PageSum
    pages: abc.Sequence[int]
    stop: int


def check(row: Row, page_tokens: int, pages: int, context_length: int) -> None:
    """Raise ValueError, naming request and numbers, if `row` cannot be computed as it stands."""
    known = row.sequence.length
    name = row.sequence.request.request_id
    if not 0 <= row.start < row.stop <= known:
        raise ValueError(f"{name}: positions [{row.start}, {row.stop}) of a sequence of {known} tokens")
    if row.stop > context_length:
        raise ValueError(f"{name}: position {row.stop - 1} in a model of {context_length} positions")
    if row.sample and row.stop != known:
        raise ValueError(f"{name}: token {row.stop} is known already and cannot be drawn")
    scores, prompt = row.sequence.scores, len(row.sequence.request.prompt)
    if scores is not None and len(scores.told) < min(row.start, prompt - 1):
        raise ValueError(f"{name}: scores behind position {row.start}, and {len(scores.told)} before it")
    needed = -(-row.stop // page_tokens)
    if len(row.pages) < needed:
        raise ValueError(f"{name}: {row.stop} tokens need {needed} pages, the table has {len(row.pages)}")
    for page in row.pages[:needed]:
        if not 0 <= page < pages:
            raise ValueError(f"{name}: page {page} of a cache of {pages} pages")


def integers(values: list[int]) -> torch.Tensor:
    """`values`, at least one, as int64 on the CPU: an eighth of the time that torch takes to read a list."""
    return torch.frombuffer(array("q", values), dtype=torch.int64)
