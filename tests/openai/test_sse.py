"""What does sending an event cost, and what does it look like?"""

import asyncio
from typing import Any

import pytest
from starlette.types import Message

from services.openai.chat_rendering import ChatRendering
from services.openai.choice import Choice, Delta
from services.openai.completion_rendering import CompletionRendering
from services.openai.hangup import ClientGone
from services.openai.rendering import Rendering
from services.openai.schemas import ChatRequest, CompletionRequest
from services.openai.sse import EventStream, TextEvent, events
from services.rooms.request import Request
from tests.openai import tiny

TEXTS = ["hello", " ", '"', "a\\b", "\n\r\t", "\u2028", "é😀", "\x00", "\ufffd", "<|im_end|>"]


def _renderings(**more: Any) -> list[tuple[Rendering, Choice]]:
    tokenizer = tiny.model().tokenizer
    messages = [{"role": "user", "content": "x"}]
    chat = ChatRequest.model_validate({"model": "m", "messages": messages, **more})
    completion = CompletionRequest.model_validate({"model": "m", "prompt": "x", **more})
    choice = Choice(1, Request("r", (1,), 9), chat, tokenizer)
    return [
        (ChatRendering(chat, tokenizer, "r", 7), choice),
        (CompletionRendering(completion, tokenizer, "r", 7), choice),
    ]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("usage", [False, True])
def test_an_event_from_its_template_is_the_one_that_is_rendered(text: str, usage: bool) -> None:
    more = {"stream": True, "stream_options": {"include_usage": usage}}
    for rendering, choice in _renderings(**more):
        assert rendering.text_alone
        event = TextEvent(lambda each, made=rendering, of=choice: made.chunks(of, Delta(text=each)))  # type: ignore[misc]
        assert event.of(text) == events(rendering.chunks(choice, Delta(text=text)))


def test_what_shows_more_than_text_has_no_template() -> None:
    assert not any(rendering.text_alone for rendering, _ in _renderings(return_token_ids=True))


async def test_one_timer_watches_a_whole_response(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, timers = asyncio.get_running_loop(), 0
    at = loop.call_at

    def counted(*args: Any, **more: Any) -> asyncio.TimerHandle:
        nonlocal timers
        timers += 1
        return at(*args, **more)

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    monkeypatch.setattr(loop, "call_at", counted)
    stream = EventStream(send, stalled_client_s=60.0)
    for _ in range(1_000):
        await stream.write(b"x")
    await stream.write(b"", last=True)
    assert timers == 1
    assert len(sent) == 1_002


async def test_a_client_may_be_slow_for_longer_than_it_may_stall() -> None:
    async def slow(message: Message) -> None:
        await asyncio.sleep(0.02)

    stream = EventStream(slow, stalled_client_s=0.2)
    for _ in range(25):
        await stream.write(b"x")


async def test_a_client_that_takes_nothing_is_gone_and_the_task_goes_on() -> None:
    async def never(message: Message) -> None:
        await asyncio.Event().wait()

    stream = EventStream(never, stalled_client_s=0.01)
    with pytest.raises(ClientGone):
        await stream.write(b"x")
    await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
