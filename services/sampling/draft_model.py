"""What does a smaller model draft behind each sequence?

It draws as the model does, by the request's seed at the same positions, and held to its grammar: where both
find the same likely, both draw the same. What it drafts is checked like any other draft, and never decides
what is drawn.

Its keys and values lie in pages of its own, and follow from a sequence's tokens. So nothing of them is handed
over: where a sequence comes from elsewhere, or its pages were given to another, they are computed anew, in
bounded parts beside the steps. Until then nothing is drafted for it.
"""

import time
from collections import OrderedDict, abc
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Final, NamedTuple, Protocol

from baton.engine_interface import PROPOSED_MAX, EngineLost, KvMemory, Proposal, Row, RowResult, Sequence
from baton.pages.layout import KvLayout
from baton.rooms.request import Request
from baton.runtime.logging import Log

log = Log(__name__)

AT_ONCE: Final = 2 * PROPOSED_MAX
"""Tokens of a sequence that are computed to draft behind it: those of its last steps."""
BEHIND: Final = 64
"""Tokens of all sequences that are computed beside a step for those that are further behind."""
FAILURES_MAX: Final = 3
"""Steps in a row that brought no drafts for an error, until none is asked for any more."""


class DraftEngine(Protocol):
    """What is asked of the smaller model's own engine."""

    @property
    def layout(self) -> KvLayout: ...
    @property
    def caches(self) -> abc.Sequence[KvMemory]: ...
    @property
    def context_length(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    def step(self, rows: abc.Sequence[Row]) -> abc.Sequence[RowResult]: ...


class DraftRequest(NamedTuple):
    """Of one sequence, behind a step that drew for it."""

    sequence: Sequence
    """Its fold, if it has one, has taken the output."""
    proposal: Proposal
    output: abc.Sequence[int]
    """All of it that is drawn, by that step as well."""
    most: int
    """Tokens that are to be drafted."""


class DraftTimes(NamedTuple):
    """Microseconds."""

    all_us: int = 0
    each_us: int = 0
    """Of one drafted token; 0 where none was."""


@dataclass(slots=True, eq=False)
class _DraftedSequence:
    """What is kept of one sequence."""

    sequence: Sequence
    """Its tokens so far, and the drafts behind them."""
    known: int = 0
    """Tokens of the output that are no drafts."""
    filled: int = 0
    """Leading positions whose keys and values are those of its tokens."""
    pages: list[int] = field(default_factory=list)

    def follow(self, output: abc.Sequence[int]) -> None:
        """So much was drawn: drafts that were not are forgotten."""
        mine, same = self.sequence.output, self.known
        while same < min(len(mine), len(output)) and mine[same] == output[same]:
            same += 1
        prompt = len(self.sequence.request.prompt)
        self.filled = min(self.filled, prompt + same, prompt + len(output) - 1)
        if same < len(mine):
            self.sequence.engine_state = self.sequence.sampler_state = None  # both include lost drafts
        mine[:] = output
        self.known = len(mine)

    @property
    def missing(self) -> int:
        """Tokens that are to be computed before one is drafted."""
        return self.sequence.length - self.filled


class DraftModel:
    """Over an engine of its own, on the rank that draws. `propose` is called from one thread at a time."""

    def __init__(self, engine: DraftEngine, vocab_size: int) -> None:
        """`vocab_size`: of the model that checks. Ids that only one of both has stand for no text: some
        widths are rounded up. None of them is drafted, and nothing behind one."""
        (group,) = engine.layout.groups
        self._engine = engine
        self._page_tokens = group.page_tokens
        self._pages = engine.caches[0].pages
        self._free = list(range(self._pages))
        self._held: OrderedDict[Proposal, _DraftedSequence] = OrderedDict()
        """The one that drafted last at the end."""
        self._over: set[Proposal] = set()
        """Of these, that ended while drafts were computed."""
        self._computes = False
        self._failures = 0
        """In a row."""
        self._ids = min(vocab_size, engine.vocab_size)
        self._lock = Lock()

    def census(self) -> Mapping[str, int]:
        """Pages, by whether a sequence has them. From any thread."""
        with self._lock:
            return {"taken": self._pages - len(self._free), "free": len(self._free)}

    def release(self, proposal: Proposal) -> None:
        """Its sequence is over, and has no pages once nothing is computed. From any thread."""
        with self._lock:
            proposal.over = True
            if self._computes:
                self._over.add(proposal)
            else:
                self._drop(proposal)

    def propose(self, wishes: abc.Sequence[DraftRequest]) -> tuple[list[list[int]], DraftTimes]:
        """What comes next of each wish, as far as it is known: nothing where its sequence is too far behind,
        has no pages, or is at the end of what the model can read. Raises EngineLost."""
        if self._failures == FAILURES_MAX:
            return [[] for _ in wishes], DraftTimes()
        with self._lock:
            self._computes = True
        try:
            return self._propose(wishes)
        except EngineLost:
            raise
        except Exception as error:  # whatever it is: a step does not fail for its drafts
            self._failures += 1
            log.error("nothing was drafted", error=error, last=self._failures == FAILURES_MAX)  # noqa: TRY400
            with self._lock:
                for each in [*self._held]:
                    self._drop(each)
            return [[] for _ in wishes], DraftTimes()
        finally:
            with self._lock:
                self._computes = False
                for each in self._over:
                    self._drop(each)
                self._over.clear()

    def _propose(self, wishes: abc.Sequence[DraftRequest]) -> tuple[list[list[int]], DraftTimes]:
        begun_s = time.perf_counter()
        held = [self._follow(wish, wishes) for wish in wishes]
        going = [at for at, each in enumerate(held) if each is not None and each.missing <= AT_ONCE]
        self._catch_up([each for each in held if each is not None and each.missing > AT_ONCE])
        caught_s = time.perf_counter()
        drafted: list[list[int]] = [[] for _ in wishes]
        count = 0
        while going:
            count += len(going)
            drawn = self._draw([each for at in going if (each := held[at]) is not None])
            for at, token in zip(going, drawn, strict=True):
                drafted[at] += token
            going = [
                at
                for at, token in zip(going, drawn, strict=True)
                if token and len(drafted[at]) < wishes[at].most and not _ends(held[at])
            ]
        ended_s = time.perf_counter()
        each_us = round(1e6 * (ended_s - caught_s) / count) if count else 0
        return drafted, DraftTimes(round(1e6 * (ended_s - begun_s)), each_us)

    def _follow(self, wish: DraftRequest, wishes: abc.Sequence[DraftRequest]) -> _DraftedSequence | None:
        """What is held of its sequence, with pages for all that is to be computed; None where that cannot
        be."""
        if wish.most <= 0:
            return None
        known = len(wish.sequence.request.prompt) + len(wish.output)
        reach = known + wish.most - 1
        with self._lock:
            if wish.proposal.over:
                return None
            if known > self._engine.context_length or not self._has(wish):
                wish.proposal.over = True
                self._drop(wish.proposal)
                return None
            if reach > self._engine.context_length:
                return None
            held = self._held.get(wish.proposal)
            if held is None:
                held = self._held[wish.proposal] = _DraftedSequence(Sequence(_alone(wish.sequence), []))
            self._held.move_to_end(wish.proposal)
            held.follow(wish.output)
            fold = wish.sequence.fold
            held.sequence.fold = None if fold is None else fold.copy()
            lacking = -(-reach // self._page_tokens) - len(held.pages)
            if lacking > len(self._free):
                self._make_space(lacking, {each.proposal for each in wishes if each.most > 0})
            if lacking > len(self._free):
                return None
            for _ in range(lacking):
                held.pages.append(self._free.pop())
        return held

    def _has(self, wish: DraftRequest) -> bool:
        """The smaller model has all tokens of its sequence that are not known to it yet."""
        held = self._held.get(wish.proposal)
        new = wish.output[held.known :] if held else (*wish.sequence.request.prompt, *wish.output)
        return max(new, default=0) < self._ids

    def _make_space(self, pages: int, spared: abc.Set[Proposal]) -> None:
        """Of those that drafted least lately, and are not `spared`."""
        for proposal in [each for each in self._held if each not in spared]:
            if pages <= len(self._free):
                return
            self._drop(proposal)

    def _drop(self, proposal: Proposal) -> None:
        held = self._held.pop(proposal, None)
        if held is not None:
            self._free += held.pages

    def _catch_up(self, behind: abc.Sequence[_DraftedSequence]) -> None:
        left, rows = BEHIND, []
        for each in behind:
            stop = min(each.filled + left, each.sequence.length - 1)
            if stop > each.filled:
                rows.append(Row(each.sequence, each.filled, stop, (each.pages,), sample=False))
                left -= stop - each.filled
                each.filled = stop
        if rows:
            self._engine.step(rows)

    def _draw(self, held: abc.Sequence[_DraftedSequence]) -> list[list[int]]:
        """The next token of each; none where the logits are no numbers, or the other model lacks it."""
        lengths = [each.sequence.length for each in held]
        rows = [
            Row(each.sequence, each.filled, length, (each.pages,), sample=True)
            for each, length in zip(held, lengths, strict=True)
        ]
        drawn: list[list[int]] = []
        took = self._engine.step(rows)
        self._failures = 0
        for each, length, taken in zip(held, lengths, took, strict=True):
            tokens = [token.id for token in taken] if isinstance(taken, tuple) else []
            tokens = tokens if max(tokens, default=0) < self._ids else []
            each.filled = length
            each.sequence.output += tokens
            drawn.append(tokens)
        return drawn


def _ends(held: _DraftedSequence | None) -> bool:
    """With the last draft: nothing behind it is taken."""
    return held is None or held.sequence.request.finish_reason(held.sequence.output) is not None


def _alone(sequence: Sequence) -> Request:
    """What the smaller model is asked: nothing is told of its draws."""
    request = sequence.request
    told = replace(request.sampling, top_logprobs=None, logprob_token_ids=())
    return replace(request, sampling=told, prompt_logprobs=None, output=())
