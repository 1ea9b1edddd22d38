"""Tests of server-sent events."""

from typing import Any

import pytest

from baton.api.chat.chat_rendering import ChatRendering
from baton.api.completions.completion_rendering import CompletionRendering
from baton.api.generation.choice_assembler import ChoiceAssembler, Delta
from baton.api.generation.rendering import Rendering
from baton.api.http.event_stream import NAMED, TextEvent
from baton.api.requests.meaning_reader import chat_meaning, completion_meaning
from baton.api.requests.schemas import ChatRequest, CompletionRequest
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
        assert rendering.text_alone
        event = TextEvent(
            rendering.framing,
            lambda each, made=rendering, of=choice: made.chunks(of, Delta(text=each)),  # type: ignore[misc]
        )
        assert event.of(text) == rendering.framing.events(rendering.chunks(choice, Delta(text=text)))


def test_what_shows_more_than_text_has_no_template() -> None:
    assert not any(rendering.text_alone for rendering, _ in _renderings(return_token_ids=True))


def test_a_named_event_has_the_name_of_its_kind_and_fits_its_lines() -> None:
    chunks = [{"type": "ping"}, {"type": "delta", "text": "a\u2028\nb"}]
    assert NAMED.events(chunks) == (
        b'event: ping\ndata: {"type":"ping"}\n\n'
        b'event: delta\ndata: {"type":"delta","text":"a\\u2028\\nb"}\n\n'
    )
