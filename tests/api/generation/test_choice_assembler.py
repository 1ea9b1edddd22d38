"""Tests of the assembly of one choice's text, tokens and end, however its tokens are batched."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.api.generation.choice_assembler import ChoiceAssembler, Delta
from baton.api.requests.meaning_reader import completion_meaning
from baton.api.requests.schemas import CompletionRequest
from baton.rooms.request import FinishReason, Request
from tests.api import tiny
from tests.api.scripted import LENGTH, STOP, batch


def run(
    output: list[int], cuts: list[int], finish: FinishReason, min_tokens: int = 0, **fields: Any
) -> tuple[str, list[int], list[int], FinishReason, bool]:
    """Text, token ids, offsets, finish and whether a stop string ended it, of output batched at `cuts`."""
    body = CompletionRequest.model_validate({"model": "m", "prompt": "x", "stop": [], **fields})
    request = Request("r", tuple(tiny.ids("x")), max_tokens=100, min_tokens=min_tokens)
    choice = ChoiceAssembler(0, request, completion_meaning(body), tiny.detokenizer(request.prompt, body))
    bounds = sorted({0, len(output), *(cut % (len(output) + 1) for cut in cuts)})
    deltas: list[Delta] = []
    for start, end in pairwise(bounds):
        deltas.append(choice.take(batch(output[start:end], finish if end == len(output) else None)))
        if deltas[-1].finish is not None:
            break
    ended = deltas[-1].finish
    assert ended is not None
    tokens = [token.id for delta in deltas for token in delta.tokens]
    assert choice.output_tokens == len(tokens)
    return (
        "".join(delta.text for delta in deltas),
        tokens,
        [offset for delta in deltas for offset in delta.offsets],
        ended,
        choice.stopped,
    )


@settings(max_examples=300, deadline=None)
@given(
    output=st.lists(st.integers(0, 400), min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=5),
    stop=st.lists(st.sampled_from(["a", "th", "e\ufffd", "\ufffd\ufffd", "The", " "]), max_size=3),
    min_tokens=st.integers(0, 10),
    include=st.booleans(),
    finish=st.sampled_from([STOP, LENGTH]),
)
def test_batching_changes_nothing(
    output: list[int], cuts: list[int], stop: list[str], min_tokens: int, include: bool, finish: FinishReason
) -> None:
    size = len(tiny.byte_level())
    output = [each % size for each in output]
    fields = {"stop": stop, "include_stop_str_in_output": include}
    one_by_one = run(output, list(range(len(output))), finish, min_tokens, **fields)
    assert run(output, cuts, finish, min_tokens, **fields) == one_by_one


def test_the_ending_token_counts_but_is_not_in_the_text() -> None:
    stop_id = tiny.ids("!")[0]
    text, tokens, _, finish, stopped = run([*tiny.ids("fox"), stop_id], [], STOP)
    assert (text, tokens[-1], finish, stopped) == ("fox", stop_id, STOP, False)


def test_the_ending_token_is_in_the_text_on_demand() -> None:
    stop_id = tiny.ids("!")[0]
    assert run([*tiny.ids("fox"), stop_id], [], STOP, include_stop_str_in_output=True)[0] == "fox!"
    text = run([*tiny.ids("fox"), tiny.END_ID], [], STOP, include_stop_str_in_output=True)[0]
    assert text == "fox"  # a special token is still skipped
    text = run(
        [*tiny.ids("fox"), tiny.END_ID], [], STOP, include_stop_str_in_output=True, skip_special_tokens=False
    )[0]
    assert text == "fox<|end|>"


def test_the_last_token_at_the_length_limit_is_in_the_text() -> None:
    assert run(tiny.ids("fox!"), [], LENGTH)[0] == "fox!"


def test_a_stop_string_over_tokens_drops_the_tokens_behind_it() -> None:
    output = tiny.ids("one two END three")
    text, tokens, _, finish, stopped = run(output, [], LENGTH, stop="END")
    assert (text, finish, stopped) == ("one two ", STOP, True)
    assert tiny.model().tokenizer.decode(tokens, skip_special_tokens=True).endswith("END")
    assert len(tokens) < len(output)


def test_min_tokens_outlast_a_stop_string() -> None:
    output = tiny.ids("a.b.c.")
    assert len(output) == 6
    assert run(output, [], LENGTH, min_tokens=3, stop=".")[0] == "a.b"


@pytest.mark.parametrize("text", ["The fox 😀 jumps", "naïve 東京"])
def test_offsets_point_into_the_text(text: str) -> None:
    output = tiny.ids(text)
    whole, tokens, offsets, _, _ = run(output, [], LENGTH)
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    for id_, offset in zip(tokens, offsets, strict=True):
        token = tiny.model().tokenizer.token_bytes(id_)
        if token.isascii():
            assert whole[offset : offset + len(token)] == token.decode()
