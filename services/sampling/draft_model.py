"""A smaller model that drafts tokens for the sequences of a larger one (speculative decoding).

It samples as the larger model does, with the request's seed at the same positions and within its grammar. So
both sample the same token if they find the same tokens likely. Its drafts are checked like any others, and
never change what is sampled.

Its keys and values are in pages of its own and follow from a sequence's tokens, so they are not handed over.
A sequence that comes from another worker, or lost its pages to another sequence, lacks them. They are then
computed in bounded parts during later steps. Until they are complete, nothing is drafted for the sequence.
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
"""Most tokens that the draft model may lack of a sequence and still draft for it in the same step. A token is
lacking if its keys and values are not computed."""
BEHIND: Final = 64
"""Most tokens that the draft model computes in one step for all sequences of which it lacks more than AT_ONCE
tokens."""
FAILURES_MAX: Final = 3
"""Number of consecutive failed draft steps after which the draft model is not used any more."""


class DraftEngine(Protocol):
    """Members of the `Engine` protocol that a draft model uses."""

    @property
    def layout(self) -> KvLayout: ...
    @property
    def caches(self) -> abc.Sequence[KvMemory]: ...
    @property
    def context_length(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    def step(self, rows: abc.Sequence[Row]) -> abc.Sequence[RowResult]: ...
    def release(self, sequence: Sequence) -> None: ...


class DraftRequest(NamedTuple):
    """Request to draft tokens for one sequence, after a step that sampled a token for it."""

    sequence: Sequence
    """The sequence to draft for. Its grammar state has read all tokens of `output`."""
    proposal: Proposal
    output: abc.Sequence[int]
    """All output token ids of the sequence, including those that the step has just sampled."""
    most: int
    """Most tokens that the draft model should draft for this sequence."""


class DraftTimes(NamedTuple):
    """Time that the draft model took in one step, in microseconds."""

    all_us: int = 0
    each_us: int = 0
    """Average time that the draft model took for one drafted token, in microseconds. 0 if none was drafted.
    """


@dataclass(slots=True, eq=False)
class _DraftedSequence:
    """State of one sequence in the draft model: its tokens and its pages there."""

    sequence: Sequence
    """Copy of the sequence for the draft model's engine: the sampled tokens, then the drafts."""
    known: int = 0
    """Number of tokens at the beginning of the output of `sequence` that were really sampled. The tokens
    behind them are drafts."""
    filled: int = 0
    """Number of positions, from the first on, whose keys and values are in the draft model's pages."""
    pages: list[int] = field(default_factory=list)

    def follow(self, output: abc.Sequence[int]) -> None:
        """Set the sequence's output to the tokens that were really sampled, in place of its drafts."""
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
        """Number of tokens of the sequence that the draft model has not computed. It needs all of them to
        draft the next token."""
        return self.sequence.length - self.filled


class DraftModel:
    """Drafts tokens by an engine of its own, on the rank that samples.

    `propose` is called from one thread at a time.
    """

    def __init__(self, engine: DraftEngine, vocab_size: int) -> None:
        """Build a draft model that runs on `engine`.

        `vocab_size`: that of the larger model, which checks the drafts. Some vocabularies are padded: ids
        that only one of both models has stand for no text. They are never drafted.
        """
        (group,) = engine.layout.groups
        self._engine = engine
        self._page_tokens = group.page_tokens
        self._pages = engine.caches[0].pages
        self._free = list(range(self._pages))
        self._sequences: OrderedDict[Proposal, _DraftedSequence] = OrderedDict()
        """State of each sequence in the draft model, by the sequence's `Proposal`. The one that drafted most
        recently is last."""
        self._ended: set[Proposal] = set()
        """Proposals of sequences that ended during a draft step. The sequences' draft pages are freed after
        the step."""
        self._computes = False
        self._failures = 0
        """Number of draft steps that failed in succession."""
        self._ids = min(vocab_size, engine.vocab_size)
        self._lock = Lock()

    def census(self) -> Mapping[str, int]:
        """Return the number of the draft model's pages by state, `taken` and `free`. May be called from any
        thread."""
        with self._lock:
            return {"taken": self._pages - len(self._free), "free": len(self._free)}

    def release(self, proposal: Proposal) -> None:
        """Free the draft model's pages of a sequence that has ended. May be called from any thread.

        If drafts are being computed, the pages are freed when that is done.
        """
        with self._lock:
            proposal.over = True
            if self._computes:
                self._ended.add(proposal)
            else:
                self._drop(proposal)

    def propose(self, requests: abc.Sequence[DraftRequest]) -> tuple[list[list[int]], DraftTimes]:
        """Return draft token ids for each request, and the time that drafting took.

        A sequence gets no drafts if the draft model lacks too many of its tokens or has no free pages.
        Neither does one at the end of the draft model's context. Raises EngineLost.
        """
        if self._failures == FAILURES_MAX:
            return [[] for _ in requests], DraftTimes()
        with self._lock:
            self._computes = True
        try:
            return self._propose(requests)
        except EngineLost:
            raise
        except Exception as error:  # a step does not fail because of its drafts
            self._failures += 1
            log.error("nothing was drafted", error=error, last=self._failures == FAILURES_MAX)  # noqa: TRY400
            with self._lock:
                for each in [*self._sequences]:
                    self._drop(each)
            return [[] for _ in requests], DraftTimes()
        finally:
            with self._lock:
                self._computes = False
                for each in self._ended:
                    self._drop(each)
                self._ended.clear()

    def _propose(self, requests: abc.Sequence[DraftRequest]) -> tuple[list[list[int]], DraftTimes]:
        begun_s = time.perf_counter()
        drafted_sequences = [self._follow(request, requests) for request in requests]
        going = [
            at for at, each in enumerate(drafted_sequences) if each is not None and each.missing <= AT_ONCE
        ]
        self._catch_up([each for each in drafted_sequences if each is not None and each.missing > AT_ONCE])
        caught_up_s = time.perf_counter()
        drafted: list[list[int]] = [[] for _ in requests]
        count = 0
        while going:
            count += len(going)
            drawn = self._draw([each for at in going if (each := drafted_sequences[at]) is not None])
            for at, token in zip(going, drawn, strict=True):
                drafted[at] += token
            going = [
                at
                for at, token in zip(going, drawn, strict=True)
                if token and len(drafted[at]) < requests[at].most and not _ends(drafted_sequences[at])
            ]
        ended_s = time.perf_counter()
        each_us = round(1e6 * (ended_s - caught_up_s) / count) if count else 0
        return drafted, DraftTimes(round(1e6 * (ended_s - begun_s)), each_us)

    def _follow(self, request: DraftRequest, requests: abc.Sequence[DraftRequest]) -> _DraftedSequence | None:
        """Return the state of a request's sequence, with pages for all tokens to be drafted.

        Returns None if nothing can be drafted for it. `requests`: all requests of the step. Their sequences
        keep their pages.
        """
        if request.most <= 0:
            return None
        known = len(request.sequence.request.prompt) + len(request.output)
        needed = known + request.most - 1
        with self._lock:
            if request.proposal.over:
                return None
            if known > self._engine.context_length or not self._knows_tokens(request):
                request.proposal.over = True
                self._drop(request.proposal)
                return None
            if needed > self._engine.context_length:
                return None
            drafted = self._sequences.get(request.proposal)
            if drafted is None:
                drafted = self._sequences[request.proposal] = _DraftedSequence(
                    Sequence(_draft_request(request.sequence), [])
                )
            self._sequences.move_to_end(request.proposal)
            drafted.follow(request.output)
            fold = request.sequence.fold
            drafted.sequence.fold = None if fold is None else fold.copy()
            lacking = -(-needed // self._page_tokens) - len(drafted.pages)
            if lacking > len(self._free):
                self._make_space(lacking, {each.proposal for each in requests if each.most > 0})
            if lacking > len(self._free):
                return None
            for _ in range(lacking):
                drafted.pages.append(self._free.pop())
        return drafted

    def _knows_tokens(self, request: DraftRequest) -> bool:
        """Return whether the draft model's vocabulary contains all tokens of the sequence that are new to
        it."""
        drafted = self._sequences.get(request.proposal)
        new = (
            request.output[drafted.known :]
            if drafted
            else (*request.sequence.request.prompt, *request.output)
        )
        return max(new, default=0) < self._ids

    def _make_space(self, pages: int, spared: abc.Set[Proposal]) -> None:
        """Free pages of the draft model by dropping other sequences, until `pages` are free. Those that
        drafted longest ago go first.

        `spared`: proposals of sequences that keep their pages.
        """
        for proposal in [each for each in self._sequences if each not in spared]:
            if pages <= len(self._free):
                return
            self._drop(proposal)

    def _drop(self, proposal: Proposal) -> None:
        drafted = self._sequences.pop(proposal, None)
        if drafted is not None:
            self._free += drafted.pages
            self._engine.release(drafted.sequence)

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

    def _draw(self, drafted_sequences: abc.Sequence[_DraftedSequence]) -> list[list[int]]:
        """Draft the next token of each sequence, and return a list of one token id for each.

        The list is empty if the logits are not finite or the larger model lacks the token.
        """
        lengths = [each.sequence.length for each in drafted_sequences]
        rows = [
            Row(each.sequence, each.filled, length, (each.pages,), sample=True)
            for each, length in zip(drafted_sequences, lengths, strict=True)
        ]
        drawn: list[list[int]] = []
        took = self._engine.step(rows)
        self._failures = 0
        for each, length, taken in zip(drafted_sequences, lengths, took, strict=True):
            tokens = [token.id for token in taken] if isinstance(taken, tuple) else []
            tokens = tokens if max(tokens, default=0) < self._ids else []
            each.filled = length
            each.sequence.output += tokens
            drawn.append(tokens)
        return drawn


def _ends(drafted: _DraftedSequence | None) -> bool:
    """Return whether the last draft ends the answer, so that no further draft would be accepted."""
    return drafted is None or drafted.sequence.request.finish_reason(drafted.sequence.output) is not None


def _draft_request(sequence: Sequence) -> Request:
    """Return the request with which the draft model samples for a sequence: the same sampling parameters,
    without log-probabilities."""
    request = sequence.request
    sampling = replace(request.sampling, top_logprobs=None, logprob_token_ids=())
    return replace(request, sampling=sampling, prompt_logprobs=None, output=())
