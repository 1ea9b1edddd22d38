"""Tests of penalties, and that a step does not look at all tokens of a sequence again."""

from collections.abc import Sequence as Sequenced

import pytest
import torch

from baton.engine_interface import Sequence
from baton.rooms.request import Request, Sampling
from baton.sampling.penalties import adjust

VOCABULARY = 40
ASKED = Sampling(repetition_penalty=1.3)


def penalised(scores: torch.Tensor, tokens: Sequenced[int]) -> torch.Tensor:
    """Return `scores` after the repetition penalty for all of `tokens`, computed one by one."""
    changed = scores.clone()
    for token in {each for each in tokens if 0 <= each < VOCABULARY}:
        old = scores[token]
        changed[token] = old * 1.3 if old < 0 else old / 1.3
    return changed


def test_what_was_seen_is_kept_and_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases are repeated tokens, several new ones at once, and ids that cannot be drawn."""
    numbers = torch.Generator().manual_seed(3)
    sequence = Sequence(Request("mine", (3, 5, 3, VOCABULARY, -1), 100, sampling=ASKED), [])
    looked: list[range] = []
    tokens = Sequence.tokens

    def noting(self: Sequence, start: int, stop: int) -> Sequenced[int]:
        looked.append(range(start, stop))
        return tokens(self, start, stop)

    monkeypatch.setattr(Sequence, "tokens", noting)
    for new in ([], [7], [7], [3], [], [11, 12, 11, 5], [VOCABULARY + 3], [0]):
        sequence.output.extend(new)
        scores = torch.randn(VOCABULARY, generator=numbers)
        expected = penalised(scores, (*sequence.request.prompt, *sequence.output))
        adjust(scores, sequence)
        assert torch.equal(scores, expected)
    assert [place for each in looked for place in each] == [*range(sequence.length)]


def test_sequences_do_not_share_what_they_have_seen() -> None:
    ones = torch.ones(VOCABULARY)
    for prompt in ((1, 2), (3,)):
        scores = ones.clone()
        adjust(scores, Sequence(Request("mine", prompt, 100, sampling=ASKED), []))
        assert (scores != ones).nonzero().flatten().tolist() == [*prompt]
