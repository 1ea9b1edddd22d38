"""Tests of server-sent events."""

from collections.abc import Sequence
from typing import Any

import pytest

from baton.api.chat.chat_rendering import ChatRendering
from baton.api.completions.completion_rendering import CompletionRendering
from baton.api.generation.choice_assembler import ChoiceAssembler, Delta
from baton.api.generation.rendering import Chunk, Rendering
from baton.api.http.event_stream import NAMED, TextEvent
from baton.api.requests.meaning_reader import chat_meaning, completion_meaning
from baton.api.requests.schemas import ChatRequest, CompletionRequest
from baton.api.tools.parsing.output_parts import ContentDelta, ReasoningDelta
from baton.rooms.request import Request
from tests.api import tiny

TEXTS = ["hello", " ", '"', "a\\b", "\n\r\t", "\u2028", "é😀", "\x00", "\ufffd", "<|im_end|>"]


def _renderings(**more: Any) -> list[tuple[Rendering, ChoiceAssembler]]:
    messages = [{"role": "user", "content": "x"}]
    chat = ChatRequest.model_validate({"model": "m", "messages": messages, **more})
    completion = CompletionRequest.model_validate({"model": "m", "prompt": "x", **more})
    meaning = chat_meaning(chat)
    choice = ChoiceAssembler(1, Request("r", (1,), 9), meaning, tiny.detokenizer((1,), chat))
    return [
        (ChatRendering(chat, meaning, tiny.model(), "r", 7), choice),
        (CompletionRendering(completion, completion_meaning(completion), tiny.model(), "r", 7), choice),
    ]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("usage", [False, True])
def test_an_event_from_its_template_is_the_one_that_is_rendered(text: str, usage: bool) -> None:
    more = {"stream": True, "stream_options": {"include_usage": usage}}
    for rendering, choice in _renderings(**more):
        for kind in (ContentDelta, ReasoningDelta):
            assert rendering.has_template(kind)

            def render(each: str) -> Sequence[Chunk]:
                return rendering.chunks(choice, Delta(each, parts=[kind(each)]))  # noqa: B023

            assert TextEvent(rendering.framing, render).of(text) == rendering.framing.events(render(text))


def test_what_shows_more_than_text_has_no_template() -> None:
    assert not any(
        rendering.has_template(ContentDelta) for rendering, _ in _renderings(return_token_ids=True)
    )


def test_a_named_event_has_the_name_of_its_kind_and_fits_its_lines() -> None:
    chunks = [{"type": "ping"}, {"type": "delta", "text": "a\u2028\nb"}]
    assert NAMED.events(chunks) == (
        b'event: ping\ndata: {"type":"ping"}\n\n'
        b'event: delta\ndata: {"type":"delta","text":"a\\u2028\\nb"}\n\n'
    )
