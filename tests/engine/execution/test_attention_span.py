"""Tests that spans are found from mask functions alone, and other masks are refused."""

import pytest
import torch
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from baton.engine.execution.attention_span import AttentionSpan, MaskFunction, UnknownSpan, find_span

NO_PADDING = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize("length", [2, 64, 65, 512, 2**17, 2**19 + 5])
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 100, 4096, 2**18 + 1])
def test_windows_and_chunks_are_told_where_a_token_within_the_length_is_past_one(
    tokens: int, length: int
) -> None:
    window = sliding_window_causal_mask_function(tokens)
    chunk = chunked_causal_mask_function(tokens, NO_PADDING)
    assert find_span(window, length) == (AttentionSpan(tokens) if tokens < length else None)
    told = find_span(chunk, length)
    # Chunks of one token are windows of one.
    assert told == (
        None
        if tokens >= length
        else AttentionSpan(1)
        if tokens == 1
        else AttentionSpan(tokens, in_chunks=True)
    )


def test_everything_before_a_token_is_no_reach() -> None:
    assert find_span(causal_mask_function, 2**17) is None


def within(window: int, *, of: int) -> MaskFunction:
    return lambda _, __, query, key: (key <= query) & ((query < of) | (key > query - window))


OTHERS: dict[str, MaskFunction] = {
    "later tokens": lambda _, __, query, key: key <= query + 1,
    "later tokens alone": lambda _, __, query, key: key > query,
    "not itself": lambda _, __, query, key: key < query,
    "the first, and a window": lambda _, __, query, key: (key <= query) & ((key > query - 64) | (key == 0)),
    "every other": lambda _, __, query, key: (key <= query) & ((query - key) % 2 == 0),
    "a window from the middle on": within(64, of=256),
    "chunks that are a token off": lambda _, __, query, key: (
        (key <= query) & ((key + 1) // 64 == (query + 1) // 64)
    ),
}


@pytest.mark.parametrize("mask", OTHERS)
def test_another_mask_is_not_taken_for_one_of_these(mask: str) -> None:
    with pytest.raises(UnknownSpan):
        find_span(OTHERS[mask], 512)


@pytest.mark.parametrize("reach", [AttentionSpan(5), AttentionSpan(5, in_chunks=True)], ids=str)
def test_what_is_hidden_is_what_the_library_hides(reach: AttentionSpan) -> None:
    make = (
        chunked_causal_mask_function(5, NO_PADDING)
        if reach.in_chunks
        else sliding_window_causal_mask_function(5)
    )
    places = torch.arange(17)
    seen = make(torch.tensor(0), torch.tensor(0), places[:, None], places[None])
    hidden = reach.hidden(places, 0, 17) | (places[None] > places[:, None])
    assert torch.equal(~hidden, seen)
    assert [reach.binds(length) for length in (5, 6)] == [False, True]
