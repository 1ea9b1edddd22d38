"""A small worker for tests of engines: it hands out pages, packs rows and appends tokens."""

import random
from collections import abc
from dataclasses import dataclass, field, replace
from itertools import count

import torch

from baton.engine_interface import DrawFailed, PromptScores, Row, Sequence
from baton.inference.step_engine import StepEngine
from baton.pages.layout import PLAIN
from baton.rooms.choice_pages import ChoicePages
from baton.rooms.request import Request, Sampling, Token

GREEDY = Sampling(temperature=0.0)


DRAFTS_MAX = 5
"""Most drafts of a row."""


@dataclass(eq=False)
class Tenant:
    """A sequence and its pages on this worker."""

    sequence: Sequence
    computed: int = 0
    tables: list[list[int]] = field(default_factory=list)
    """Page indices by KV group."""
    shared: int = 0
    """Number of leading pages that belong to another sequence, in a model with one KV group."""

    @property
    def pages(self) -> list[int]:
        """Page indices of a model with one KV group."""
        (pages,) = self.tables
        return pages

    @property
    def done(self) -> bool:
        return self.sequence.request.finish_reason(self.sequence.output) is not None


Guess = abc.Callable[[Tenant], abc.Sequence[int]]
"""Function that returns drafts for a sequence."""


class Guesses:
    """Drafts of which some are the next tokens, and some are not."""

    def __init__(self, outputs: dict[str, list[int]], vocabulary: int, seed: int = 3) -> None:
        """`outputs`: the right output tokens, by request."""
        self.right = self.asked = 0
        self._outputs = outputs
        self._vocabulary = vocabulary
        self._numbers = random.Random(seed)

    def __call__(self, tenant: Tenant) -> list[int]:
        numbers, had = self._numbers, len(tenant.sequence.output)
        count = numbers.randrange(DRAFTS_MAX + 1)
        drafts = self._outputs[tenant.sequence.request.request_id][had : had + count]
        drafts += [numbers.randrange(self._vocabulary) for _ in range(count - len(drafts))]
        if count and numbers.random() < 0.5:
            drafts[numbers.randrange(count)] = numbers.randrange(self._vocabulary)
        return drafts


class ShuffledWorker:
    """A worker over an engine whose free pages hold NaN. It hands out pages in a shuffled order."""

    def __init__(self, engine: StepEngine, seed: int = 0) -> None:
        self.engine = engine
        self._numbers = count()
        self._free = [list(range(cache.pages)) for cache in engine.caches]
        for free, cache in zip(self._free, engine.caches, strict=True):
            random.Random(seed).shuffle(free)
            cache.tensor.fill_(float("nan"))

    def admit(
        self,
        prompt: abc.Sequence[int],
        max_tokens: int,
        sampling: Sampling = GREEDY,
        prompt_logprobs: int | None = None,
    ) -> Tenant:
        name = f"request-{next(self._numbers)}"
        request = Request(name, tuple(prompt), max_tokens, sampling=sampling, prompt_logprobs=prompt_logprobs)
        sequence = Sequence(request, [])
        sequence.scores = None if prompt_logprobs is None else PromptScores()
        return Tenant(sequence)

    def fork(self, tenant: Tenant, seed: int) -> Tenant:
        """Return a further choice behind a computed prompt, as `baton.decode` begins it."""
        request = tenant.sequence.request
        asked = replace(request, sampling=replace(request.sampling, seed=seed))
        size = self.engine.cache.group.page_tokens
        division = ChoicePages(len(request.prompt), asked.tokens_max, 2, (size,))
        (shared,) = division.shared
        return Tenant(Sequence(asked, []), division.shared_tokens, [tenant.pages[:shared]], shared)

    def release(self, tenant: Tenant) -> None:
        """Free the pages of a sequence, filled with NaN."""
        for table, free, cache in zip(tenant.tables, self._free, self.engine.caches, strict=True):
            cache.tensor[table[tenant.shared :]] = float("nan")
            free += table[tenant.shared :]
            table.clear()

    def grow(self, tenant: Tenant, tokens: int) -> None:
        needed = self.engine.layout.pages_for(tokens)
        tenant.tables = tenant.tables or [[] for _ in needed]
        for table, free, pages in zip(tenant.tables, self._free, needed, strict=True):
            while len(table) < pages:
                table.append(free.pop())

    def step(self, tenants: abc.Sequence[Tenant], chunk: int) -> list[Token | None]:
        """Make one step of all unfinished sequences: the next chunk of a prompt, or the next token. Return
        the draws."""
        return [tokens[0] if tokens else None for tokens in self.guess(tenants, chunk, lambda _: ())]

    def guess(self, tenants: abc.Sequence[Tenant], chunk: int, guess: Guess) -> list[tuple[Token, ...]]:
        """Make one step with drafts where a token is drawn. Tokens behind an answer's end are dropped."""
        rows, taking = [], []
        for tenant in tenants:
            if tenant.done:
                continue
            known = tenant.sequence.length
            stop = min(tenant.computed + chunk, known)
            drafts = guess(tenant) if stop == known else ()
            self.grow(tenant, stop + len(drafts))
            place = (tenant.sequence, tenant.computed, stop, tenant.tables)
            rows.append(Row(*place, sample=stop == known, drafts=drafts))
            taking.append(tenant)
        drawn: list[tuple[Token, ...]] = []
        for tenant, row, taken in zip(taking, rows, self.engine.step(rows), strict=True):
            assert not isinstance(taken, DrawFailed)
            assert bool(taken) is row.sample
            tenant.computed = row.stop + max(len(taken) - 1, 0)
            drawn.append(taken)
            for had, token in enumerate(taken, 1):
                tenant.sequence.output.append(token.id)
                if tenant.done:
                    drawn[-1] = taken[:had]
                    break
        return drawn

    def answers(
        self, tenants: abc.Sequence[Tenant], guess: Guess, chunk: int = 20
    ) -> tuple[list[list[Token]], int]:
        """Return the tokens of each sequence with drafts, and the number of steps."""
        told: dict[int, list[Token]] = {id(tenant): [] for tenant in tenants}
        steps = 0
        while not all(tenant.done for tenant in tenants):
            going = [tenant for tenant in tenants if not tenant.done]
            for tenant, tokens in zip(going, self.guess(going, chunk, guess), strict=True):
                told[id(tenant)] += tokens
            steps += 1
        return [*told.values()], steps

    def run(self, tenants: abc.Sequence[Tenant], chunk: int) -> list[list[int]]:
        """Step until all sequences have ended. Return their outputs."""
        while not all(tenant.done for tenant in tenants):
            self.step(tenants, chunk)
        return [tenant.sequence.output for tenant in tenants]


def hand_over(tenant: Tenant, source: ShuffledWorker, target: ShuffledWorker) -> Tenant:
    """Copy a sequence's pages to another worker as a transfer does: bytes, by their place in memory.

    What the sender's last page holds behind the prompt does not count. In plain pages it is NaN on arrival.
    """
    there = target.admit(tenant.sequence.request.prompt, 1)
    there.sequence = Sequence(tenant.sequence.request, list(tenant.sequence.output))
    there.computed = tenant.computed
    target.grow(there, tenant.computed)
    for group, cache in enumerate(target.engine.caches):
        mine, yours = tenant.tables[group], there.tables[group]
        memory_of(target.engine, group)[yours] = memory_of(source.engine, group)[mine]
        used = tenant.computed % cache.group.page_tokens
        if used and cache.group.encoding == PLAIN and not cache.group.is_state:
            cache.tensor[yours[-1], :, :, :, used:] = float("nan")
    return there


def memory_of(engine: StepEngine, group: int = 0) -> torch.Tensor:
    """[pages, page_bytes] bytes of a KV group."""
    cache = engine.caches[group]
    return cache.tensor.view(torch.uint8).view(cache.pages, cache.group.page_bytes)
