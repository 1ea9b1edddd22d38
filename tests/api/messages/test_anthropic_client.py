"""Tests of the unchanged `anthropic` client against the Messages API on a real socket."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import anthropic
import pytest
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from baton.api.app import create_app
from baton.api.backend import Hangup, Limits, NoWorker, Overloaded, RoomFailed
from baton.rooms.errors import Reason
from baton.runtime.listening_ports import bind_port
from baton.web.http_server import serve_http
from tests.api import tiny
from tests.api.chat.test_reasoning import REASONED, THINKING, served
from tests.api.scripted import LENGTH, ScriptedBackend, Step, batch, saying

HELLO: Final[list[Any]] = [{"role": "user", "content": "Say hello"}]
WEATHER: Final[dict[str, Any]] = {
    "name": "weather",
    "description": "The weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL: Final = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ASKED: Final[dict[str, Any]] = {"model": tiny.MODEL, "max_tokens": 64, "messages": HELLO}


def told(prompt: Sequence[int]) -> str:
    return tiny.model().tokenizer.decode(prompt, skip_special_tokens=False)


def client_of(url: str, **more: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=url, **{"api_key": "none", "max_retries": 0, "timeout": 20, **more}
    )


@pytest.fixture
async def client(url: str, backend: ScriptedBackend) -> AsyncIterator[anthropic.AsyncAnthropic]:
    backend.known_limits = Limits(context_tokens=8192, prompt_tokens=8000, sequence_tokens=8192)
    async with client_of(url) as client:
        yield client


@pytest.fixture
async def thinker(backend: ScriptedBackend) -> AsyncIterator[anthropic.AsyncAnthropic]:
    """A client of a server whose model writes reasoning."""
    app = create_app(backend, served(THINKING), CollectorRegistry())
    server = await serve_http(app, bind_port("127.0.0.1", 0, "test"), graceful_timeout_s=5)
    async with client_of(f"http://127.0.0.1:{server.port}") as client:
        yield client
    await server.stop()


async def test_a_message(client: anthropic.AsyncAnthropic, backend: ScriptedBackend) -> None:
    reply = await client.messages.create(**ASKED, system="Be brief.")
    assert (reply.type, reply.role, reply.model) == ("message", "assistant", tiny.MODEL)
    assert reply.id == f"msg_{reply._request_id}"
    (block,) = reply.content
    assert isinstance(block, anthropic.types.TextBlock)
    assert block.text == "Hello world"
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    (asked,) = backend.asked
    text = "<|start|>system\nBe brief.<|end|>\n<|start|>user\nSay hello<|end|>\n<|start|>assistant\n"
    assert told(asked.prompt) == text
    usage = reply.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (len(asked.prompt) - 3, 3)
    assert usage.output_tokens == len(tiny.ids("Hello world")) + 1
    counted = await client.messages.count_tokens(model=tiny.MODEL, messages=HELLO, system="Be brief.")
    assert counted.input_tokens == len(asked.prompt)


async def test_a_stream_comes_to_the_same_message(
    client: anthropic.AsyncAnthropic, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: saying("Grüße 😀 aus 東京")
    whole = await client.messages.create(**ASKED)
    async with client.messages.stream(**ASKED) as stream:
        kinds = [event.type async for event in stream]
        message = await stream.get_final_message()
        text = await stream.get_final_text()
    assert text == "Grüße 😀 aus 東京"
    assert message.model_dump(exclude={"id"}) == whole.model_dump(exclude={"id"})
    raw = [kind for kind in dict.fromkeys(kinds) if "_" in kind]
    assert raw == [
        *("message_start", "content_block_start", "content_block_delta"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]


@pytest.mark.parametrize(
    ("script", "fields", "told"),
    [
        (saying("Hello wor", finish=LENGTH), {}, ("max_tokens", None)),
        (saying("Hello wor", finish=LENGTH), {"max_tokens": 9000}, ("model_context_window_exceeded", None)),
        (saying("Hello, world"), {"stop_sequences": ["wor", ","]}, ("stop_sequence", ",")),
        (saying(f"Let me see.\n{CALL}"), {"tools": [WEATHER]}, ("tool_use", None)),
        (
            saying(CALL),
            {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"}},
            ("tool_use", None),
        ),
    ],
)
async def test_why_it_ended(
    client: anthropic.AsyncAnthropic,
    backend: ScriptedBackend,
    script: list[Step],
    fields: dict[str, Any],
    told: tuple[str, str | None],
) -> None:
    backend.script = lambda _: script
    reply = await client.messages.create(**{**ASKED, **fields})
    assert (reply.stop_reason, reply.stop_sequence) == told
    async with client.messages.stream(**{**ASKED, **fields}) as stream:
        streamed = await stream.get_final_message()
    assert (streamed.stop_reason, streamed.stop_sequence) == told


async def test_a_tool_is_called_and_its_result_answered(
    client: anthropic.AsyncAnthropic, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: saying(f"Let me see.\n{CALL}")
    asked: dict[str, Any] = {**ASKED, "tools": [WEATHER]}
    async with client.messages.stream(**asked) as stream:
        reply = await stream.get_final_message()
    text, call = reply.content
    assert isinstance(text, anthropic.types.TextBlock)
    assert isinstance(call, anthropic.types.ToolUseBlock)
    assert (text.text, call.name, call.input) == ("Let me see.", "weather", {"city": "Paris"})
    whole = await client.messages.create(**asked)
    assert [block.model_dump(exclude={"id"}) for block in whole.content] == [
        block.model_dump(exclude={"id"}) for block in reply.content
    ]
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": call.id, "is_error": True}
    result["content"] = [{"type": "text", "text": "no city", "cache_control": {"type": "ephemeral"}}]
    asked["messages"] = [
        *HELLO,
        {"role": "assistant", "content": reply.content},
        {"role": "user", "content": [result, {"type": "text", "text": "Again."}]},
    ]
    backend.script = lambda _: saying("Where?")
    (block,) = (await client.messages.create(**asked)).content
    assert isinstance(block, anthropic.types.TextBlock)
    assert block.text == "Where?"
    prompt = told(backend.asked[-1].prompt)
    assert prompt.partition("Say hello<|end|>\n")[2] == (
        "<|start|>assistant\nLet me see.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|end|>\n'
        "<|start|>user\n<tool_response>\nError: no city\n</tool_response><|end|>\n"
        "<|start|>user\nAgain.<|end|>\n<|start|>assistant\n"
    )
    counted = await client.messages.count_tokens(
        **{name: value for name, value in asked.items() if name != "max_tokens"}
    )
    assert counted.input_tokens == len(backend.asked[-1].prompt)


async def test_the_clients_own_loop_over_tools_comes_to_its_end(
    client: anthropic.AsyncAnthropic, backend: ScriptedBackend
) -> None:
    """The client asks for a conversation that the server stores. It is refused, and goes on without one."""
    backend.script = lambda asked: saying("Warm." if "sunny" in told(asked.prompt) else CALL)

    @anthropic.beta_async_tool
    async def weather(city: str) -> str:
        """The weather."""
        return f"sunny in {city}"

    asked: dict[str, Any] = {**ASKED, "tools": [weather]}
    message = await client.beta.messages.tool_runner(**asked).until_done()
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Warm."}]
    assert "sunny in Paris" in told(backend.asked[-1].prompt)


async def test_reasoning_is_blocks_where_it_is_requested_and_comes_back_as_history(
    thinker: anthropic.AsyncAnthropic, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: saying(REASONED)
    on: dict[str, Any] = {**ASKED, "max_tokens": 100, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    whole = await thinker.messages.create(**on)
    thinking, text = whole.content
    assert isinstance(thinking, anthropic.types.ThinkingBlock)
    assert isinstance(text, anthropic.types.TextBlock)
    assert (thinking.thinking, bool(thinking.signature), text.text) == ("Hm, they ask.", True, "Hello")
    assert whole.usage.output_tokens_details is not None
    assert whole.usage.output_tokens_details.thinking_tokens > 0
    async with thinker.messages.stream(**on) as stream:
        streamed = await stream.get_final_message()
    assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]
    assert streamed.usage == whole.usage

    again = [*HELLO, {"role": "assistant", "content": whole.content}, *HELLO]
    await thinker.messages.create(**{**on, "messages": again})
    assert "<think>\nHm, they ask.\n</think>\nHello<|end|>" in tiny.model().tokenizer.decode(
        backend.asked[-1].prompt, skip_special_tokens=False
    )

    hidden = await thinker.messages.create(**{**on, "thinking": {"type": "adaptive", "display": "omitted"}})
    assert [block.type for block in hidden.content] == ["thinking", "text"]
    assert getattr(hidden.content[0], "thinking", None) == ""


@pytest.mark.parametrize("thinking", [{}, {"thinking": {"type": "disabled"}}])
async def test_a_request_without_thinking_gets_none(
    thinker: anthropic.AsyncAnthropic, backend: ScriptedBackend, thinking: dict[str, Any]
) -> None:
    backend.script = lambda _: saying(REASONED)  # of a model that thinks all the same
    reply = await thinker.messages.create(**ASKED, **thinking)
    assert [block.type for block in reply.content] == ["text"]
    prompt = told(backend.asked[-1].prompt)
    assert prompt.endswith("<think>\n\n</think>\n\n")
    async with thinker.messages.stream(**ASKED, **thinking) as stream:
        assert await stream.get_final_text() == "Hello"


class City(BaseModel):
    name: str


async def test_an_answer_is_held_to_a_schema(
    client: anthropic.AsyncAnthropic, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: saying('{"name": "Paris"}')
    reply = await client.messages.parse(**ASKED, output_format=City)
    assert reply.parsed_output == City(name="Paris")
    grammar = backend.asked[-1].grammar
    assert grammar is not None
    assert json.loads(grammar.text)["properties"]["name"]["type"] == "string"


@pytest.mark.parametrize(
    ("fields", "error", "kind", "names"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "not_found_error", "other"),
        ({"extra_body": {"top_q": 3}}, anthropic.BadRequestError, "invalid_request_error", "'top_p'"),
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error", "'messages'"),
    ],
)
async def test_what_is_wrong_is_an_error_of_its_class(
    client: anthropic.AsyncAnthropic, fields: dict[str, Any], error: Any, kind: str, names: str
) -> None:
    for stream in (False, True):
        with pytest.raises(error) as raised:
            await client.messages.create(**{**ASKED, **fields, "stream": stream})
        body = raised.value.body
        assert (body["type"], body["error"]["type"]) == ("error", kind)
        assert raised.value.error_code in ("model_not_found", "unknown_parameter", "invalid_value")
        assert names in body["error"]["message"]
        assert body["request_id"] == raised.value.request_id


@pytest.mark.parametrize(
    ("failure", "error", "kind"),
    [
        (Overloaded("the queue is full", 2), anthropic.RateLimitError, "rate_limit_error"),
        (NoWorker("no decode worker is there"), anthropic.InternalServerError, "overloaded_error"),
        (RuntimeError("a bug"), anthropic.InternalServerError, "api_error"),
    ],
)
async def test_what_fails_is_an_error_of_its_class(
    client: anthropic.AsyncAnthropic, backend: ScriptedBackend, failure: Exception, error: Any, kind: str
) -> None:
    backend.script = lambda _: failure
    with pytest.raises(error) as raised:
        await client.messages.create(**ASKED)
    assert raised.value.body["error"]["type"] == kind


async def test_a_stream_that_breaks_off_ends_with_an_error(
    client: anthropic.AsyncAnthropic, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: [batch(tiny.ids("Hello")), RoomFailed("the worker died", Reason.DECODE_LOST)]
    async with client.messages.stream(**ASKED) as stream:
        with pytest.raises(anthropic.APIStatusError) as raised:
            await stream.until_done()
    body: Any = raised.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "overloaded_error")
    assert backend.left_open == []


async def test_a_client_that_leaves_a_stream_ends_its_request(
    client: anthropic.AsyncAnthropic, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: [batch(tiny.ids("Hello")), asyncio.Event()]
    async with client.messages.stream(**ASKED) as stream:
        async for text in stream.text_stream:
            assert text == tiny.model().tokenizer.decode(tiny.ids("Hello")[:1], skip_special_tokens=False)
            break
    (asked,) = backend.streams
    async with asyncio.timeout(10):
        await asked.hung_up.wait()
    assert asked.hangups == [Hangup.CLIENT_GONE]


async def test_models_are_told_as_it_reads_them(client: anthropic.AsyncAnthropic) -> None:
    page = await client.models.list()
    assert [(each.id, each.display_name, each.type) async for each in page] == [
        (tiny.MODEL, tiny.MODEL, "model")
    ]
    assert (await client.models.retrieve(tiny.MODEL)).max_input_tokens == 8192
    with pytest.raises(anthropic.NotFoundError) as raised:
        await client.models.retrieve("other")
    body: Any = raised.value.body
    assert body["error"]["type"] == "not_found_error"
