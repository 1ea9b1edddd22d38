"""A small worker over an engine on vLLM: shuffled pages that hold NaN, rows in chunks, drafts, moves."""

import random
from collections.abc import Sequence as Items
from typing import Any

from baton.engine_interface import Row, Sequence
from baton.rooms.request import Request, Sampling

GREEDY = Sampling(temperature=0.0)


class Driver:
    """Computes answers on an engine. Free pages hold NaN at first."""

    def __init__(self, engine: Any, seed: int = 0) -> None:
        self.engine = engine
        self.size: int = engine.cache.group.page_tokens
        self._numbers = random.Random(seed)
        self._free = list(range(engine.cache.pages))
        self._numbers.shuffle(self._free)
        engine.cache.tensor.fill_(float("nan"))

    def answers(
        self,
        prompts: Items[Items[int]],
        tokens: int,
        *,
        chunk: int = 0,
        drafts: Items[Items[int]] = (),
        moving: bool = False,
        sampling: Sampling = GREEDY,
    ) -> list[list[int]]:
        """Return `tokens` ids behind each of `prompts`, computed together.

        `chunk`: most tokens of a row, 0 for any number. `drafts`: right answers, of which some are drafted,
        and some other ids. `moving`: move the memory behind each step.
        """
        sequences = [
            Sequence(Request(f"request-{index}", tuple(prompt), tokens, sampling=sampling), [])
            for index, prompt in enumerate(prompts)
        ]
        tables = [
            [self._free.pop() for _ in range(-(-(len(each) + 2 * tokens) // self.size))] for each in prompts
        ]
        computed = [0] * len(prompts)
        while running := [index for index, each in enumerate(sequences) if len(each.output) < tokens]:
            rows = []
            for index in running:
                sequence, start = sequences[index], computed[index]
                stop = min(sequence.length, start + (chunk or sequence.length))
                sample = stop == sequence.length
                guess = self._guess(drafts[index], len(sequence.output)) if drafts and sample else ()
                rows.append(Row(sequence, start, stop, (tables[index],), sample, guess))
            for index, row, taken in zip(running, rows, self.engine.step(rows), strict=True):
                computed[index] = row.stop
                if row.sample:
                    assert isinstance(taken, tuple), taken
                    row.sequence.output.extend(token.id for token in taken)
                    computed[index] = row.sequence.length - 1
            if moving:
                self.engine.cache.move()
        for sequence, table in zip(sequences, tables, strict=True):
            self.engine.release(sequence)
            self._free += table
        return [sequence.output[:tokens] for sequence in sequences]

    def _guess(self, answer: Items[int], at: int) -> list[int]:
        guess = list(answer[at : at + self._numbers.randrange(4)])
        if guess and self._numbers.random() < 0.5:
            guess[self._numbers.randrange(len(guess))] = 17
        return guess
