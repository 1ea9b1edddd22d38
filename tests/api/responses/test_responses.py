"""Tests of the unchanged `openai` client against the Responses API on a real socket."""

import asyncio
import json
from copy import copy
from typing import Any, Final, cast

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from baton.api.app import create_app
from baton.api.backend import Hangup, Overloaded, RoomFailed
from baton.api.http.middleware import ApiMiddleware
from baton.api.served_model import ServedModel
from baton.api.text.tokenizer import Tokenizer
from baton.api.tools.format_detection import model_formats
from baton.rooms.errors import Reason
from tests.api import tiny
from tests.api.conftest import CREATED_S
from tests.api.scripted import LENGTH, ScriptedBackend, batch, saying
from tests.support.manual_clock import ManualClock

WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "name": "weather",
    "description": "The weather in a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": False,
}
SPACE: Final[dict[str, Any]] = {
    "type": "namespace",
    "name": "crm",
    "description": "Of customers.",
    "tools": [{"type": "function", "name": "find", "description": "By name.", "parameters": {}}],
}
CALL: Final = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
REASONED: Final = "<think>\nHm, they ask.\n</think>\n\nHello"
TEMPLATE: Final = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}{{ reasoning_effort or '' }}{{ verbosity or '' }}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture
def app(backend: ScriptedBackend) -> ApiMiddleware:
    """An application of a model that may reason before it answers."""
    reference = copy(tiny.byte_level())
    reference.chat_template = TEMPLATE
    tokenizer = Tokenizer(reference)
    model = ServedModel(
        tiny.MODEL, tokenizer, (tiny.END_ID,), len(reference), formats=model_formats(tokenizer, "")
    )
    return create_app(backend, model, CollectorRegistry(), clock=ManualClock(wall_ms=CREATED_S * 1000))


@pytest.fixture
def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20)


def prompt(backend: ScriptedBackend) -> str:
    return tiny.model().tokenizer.decode(backend.asked[-1].prompt, skip_special_tokens=False)


def told(*turns: tuple[str, str]) -> str:
    """Return the prompt of these turns."""
    return "".join(f"<|start|>{role}\n{text}<|end|>\n" for role, text in turns) + "<|start|>assistant\n"


def valid(answer: Response) -> Response:
    """Return the response after strict validation by the client's models, which the client itself skips."""
    return Response.model_validate(answer.model_dump(exclude_none=True, by_alias=True), strict=True)


async def ask(client: openai.AsyncOpenAI, **fields: Any) -> Response:
    return valid(
        cast(Response, await client.responses.create(**{"model": tiny.MODEL, "input": "hi", **fields}))
    )


def items_of(answer: Response) -> list[Any]:
    """Return the items of a response."""
    return [*answer.output]


async def events_of(client: openai.AsyncOpenAI, **fields: Any) -> list[ResponseStreamEvent]:
    asked = {"model": tiny.MODEL, "input": "hi", "stream": True, **fields}
    events = [event async for event in await client.responses.create(**asked)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


async def test_a_text(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
    answer = await ask(client, instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=20)
    assert answer.output_text == "Hello world"
    assert prompt(backend) == told(("system", "Be brief."), ("user", "hi"))
    assert backend.asked[-1].max_tokens == 20
    assert answer.id.startswith("resp_")
    assert (answer.object, answer.status, answer.created_at) == ("response", "completed", CREATED_S)
    assert (answer.error, answer.incomplete_details, answer.background) == (None, None, False)
    assert (answer.instructions, answer.metadata, answer.max_output_tokens) == ("Be brief.", {"a": "b"}, 20)
    (item,) = items_of(answer)
    assert (item.type, item.status) == ("message", "completed")
    assert answer.usage is not None
    output = len(tiny.ids("Hello world")) + 1
    assert answer.usage.input_tokens == len(backend.asked[-1].prompt)
    assert (answer.usage.output_tokens, answer.usage.input_tokens_details.cached_tokens) == (output, 3)
    assert answer.usage.total_tokens == answer.usage.input_tokens + output
    assert backend.left_open == []


async def test_items_are_the_turns_of_a_chat(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "In French."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "One"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Two", "annotations": []}],
        },
        {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "a", "output": "warm"},
        {"role": "user", "content": "Three"},
    ]
    await ask(client, instructions="Be brief.", input=items)
    called = f"<think>\nHm.\n</think>\nTwo\n{CALL}"
    result = "<tool_response>\nwarm\n</tool_response>"
    turns = (("user", "One"), ("assistant", called), ("user", result), ("user", "Three"))
    assert prompt(backend) == told(("system", "Be brief.\n\nIn French."), *turns)


async def test_a_custom_tools_call_is_read_as_a_functions(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    """The free text of a custom tool's call becomes the argument `input` in the prompt."""
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "One"},
        {"type": "custom_tool_call", "id": "ct_1", "call_id": "a", "name": "patch", "input": 'say "x"'},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "done"},
    ]
    await ask(client, input=items)
    called = '<tool_call>\n{"name": "patch", "arguments": {"input": "say \\"x\\""}}\n</tool_call>'
    result = "<tool_response>\ndone\n</tool_response>"
    assert prompt(backend) == told(("user", "One"), ("assistant", called), ("user", result))


async def test_settings_are_a_chats(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
    answer = await ask(
        client,
        temperature=0.5,
        top_p=0.9,
        reasoning={"effort": "low"},
        text={"verbosity": "high"},
        extra_body={"top_k": 5, "seed": 7, "stop": "wor"},
    )
    sampling = backend.asked[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 5, 7)
    assert answer.output_text == "Hello "
    assert prompt(backend).endswith("lowhigh<|start|>assistant\n")
    assert (answer.temperature, answer.top_p) == (0.5, 0.9)
    assert answer.text is not None
    assert answer.text.verbosity == "high"
    assert answer.reasoning is not None
    assert answer.reasoning.effort == "low"


async def test_what_is_cut_off_is_incomplete(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
    backend.script = lambda _: saying("Hello", finish=LENGTH)
    answer = await ask(client)
    assert (answer.status, items_of(answer)[0].status) == ("incomplete", "incomplete")
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    events = await events_of(client)
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == "Hello"


async def test_an_answer_without_text_is_an_empty_message(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: saying("")
    assert (await ask(client)).output_text == ""
    assert [event.type for event in await events_of(client)][2:-1] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]


async def test_calls_and_their_results(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
    backend.script = lambda _: saying(f"Let me see.\n{CALL}")
    first = await ask(client, tools=[WEATHER], parallel_tool_calls=False)
    said, call = first.output
    assert first.output_text == "Let me see."
    assert said.type == "message"
    assert call.type == "function_call"
    assert (call.name, call.arguments, call.status) == ("weather", '{"city": "Paris"}', "completed")
    backend.script = lambda _: saying("It is warm.")
    back: Any = [{"role": "user", "content": "hi"}, *first.output]
    back.append({"type": "function_call_output", "call_id": call.call_id, "output": "warm"})
    assert (await ask(client, tools=[WEATHER], input=back)).output_text == "It is warm."
    result = "<tool_response>\nwarm\n</tool_response>"
    assert prompt(backend).endswith(
        told(("user", "hi"), ("assistant", f"Let me see.\n{CALL}"), ("user", result))
    )


async def test_functions_of_a_namespace_are_told_with_it_and_called_back_without(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: saying('<tool_call>{"name": "crm__find", "arguments": {}}</tool_call>')
    answer = await ask(client, tools=[SPACE])
    assert '"name": "crm__find", "description": "Of customers.\\nBy name."' in prompt(backend)
    (call,) = answer.output
    assert call.type == "function_call"
    assert (call.namespace, call.name) == ("crm", "find")
    back: Any = [{"role": "user", "content": "hi"}, call]
    back.append({"type": "function_call_output", "call_id": call.call_id, "output": "none"})
    await ask(client, tools=[SPACE], input=back)
    assert '{"name": "crm__find", "arguments": {}}' in prompt(backend)


async def test_parse_gives_an_object(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
    class Place(BaseModel):
        city: str

    backend.script = lambda _: saying('{"city": "Paris"}')
    parsed = await client.responses.parse(model=tiny.MODEL, input="hi", text_format=Place)
    assert parsed.output_parsed == Place(city="Paris")
    grammar = backend.asked[-1].grammar
    assert grammar is not None
    assert '"city"' in grammar.text
    async with client.responses.stream(model=tiny.MODEL, input="hi", text_format=Place) as stream:
        final = await stream.get_final_response()
    assert final.output_parsed == Place(city="Paris")


async def test_every_event_of_a_stream_in_its_place(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: saying(f"{REASONED}\n{CALL}")
    events = await events_of(client, tools=[WEATHER])
    kinds = [event.type.removeprefix("response.") for event in events]
    assert list(dict.fromkeys(kinds[:4])) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
    ]
    once = [kind for place, kind in enumerate(kinds) if place == 0 or kinds[place - 1] != kind]
    assert once == [
        "created",
        "in_progress",
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done"),
        "output_item.done",
        "completed",
    ]
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [each.id for each in added] == [each.id for each in done]
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output == done
    assert valid(last.response).output_text == "Hello"
    whole = await ask(client, tools=[WEATHER])
    assert [_said(each) for each in whole.output] == [_said(each) for each in last.response.output]
    assert whole.usage == last.response.usage
    reasoning = "".join(each.delta for each in events if each.type == "response.reasoning_text.delta")
    assert reasoning == "Hm, they ask."


def _said(item: Any) -> dict[str, Any]:
    """Return an item without its ids, which are random."""
    told: dict[str, Any] = item.to_dict(exclude_none=True)
    return {name: value for name, value in told.items() if name not in ("id", "call_id")}


async def test_the_clients_own_stream_joins_to_what_is_told_at_its_end(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: saying(f"{REASONED}\n{CALL}")
    async with client.responses.stream(
        model=tiny.MODEL, input="hi", tools=cast(Any, [WEATHER]), reasoning={"summary": "auto"}
    ) as stream:
        events = [event async for event in stream]
        final = await stream.get_final_response()
    texts = [event.snapshot for event in events if event.type == "response.output_text.delta"]
    assert texts[-1] == final.output_text == "Hello"
    calls = [each for each in events if each.type == "response.function_call_arguments.delta"]
    assert calls[-1].snapshot == '{"city": "Paris"}'
    summaries = [each.delta for each in events if each.type == "response.reasoning_summary_text.delta"]
    assert "".join(summaries) == "Hm, they ask."
    reasoning = final.output[0]
    assert reasoning.type == "reasoning"
    assert [each.text for each in reasoning.summary] == ["Hm, they ask."]
    assert reasoning.content == []


async def test_log_probabilities_are_those_of_what_is_said(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: saying(REASONED, top=2)
    include: Any = ["message.output_text.logprobs"]
    answer = await ask(client, include=include, top_logprobs=2)
    message = answer.output[1]
    assert message.type == "message"
    assert message.content[0].type == "output_text"
    logprobs = message.content[0].logprobs
    assert logprobs is not None
    assert "".join(each.token for each in logprobs) == "Hello<|end|>"
    assert {len(each.top_logprobs) for each in logprobs} == {2}
    events = await events_of(client, include=include, top_logprobs=2)
    done = next(event for event in events if event.type == "response.output_text.done")
    assert [each.token for each in done.logprobs] == [each.token for each in logprobs]
    streamed = [
        each for event in events if event.type == "response.output_text.delta" for each in event.logprobs
    ]
    assert [each.token for each in streamed] == [each.token for each in logprobs]


async def test_reasoning_that_a_client_carries_comes_back_as_it_was(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: saying(REASONED)
    carried: Any = {"store": False, "include": ["reasoning.encrypted_content"]}
    first = await ask(client, **carried)
    reasoning = first.output[0].to_dict()
    assert reasoning["encrypted_content"]
    back: Any = [{"role": "user", "content": "hi"}]
    back += [{**reasoning, "content": [], "summary": []}, first.output[1], {"role": "user", "content": "so?"}]
    await ask(client, input=back, **carried)
    spoken = ("assistant", "<think>\nHm, they ask.\n</think>\nHello")
    assert prompt(backend) == told(("user", "hi"), spoken, ("user", "so?"))
    asked = len(backend.asked)
    forged = str(reasoning["encrypted_content"])
    for each in (forged[:-4] + "AAAA", "gAAAAABo", forged[:-3], "baton1.ü"):
        back[1] = {**reasoning, "encrypted_content": each}
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(client, input=back, **carried)
        assert refused.value.param == "input[1].encrypted_content"
    assert len(backend.asked) == asked


async def test_a_failure_behind_the_first_event_is_told_by_the_last_two(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    failed = RoomFailed("every room failed", Reason.DECODE_LOST)
    backend.script = lambda _: [batch(tiny.ids("Hello")), failed]
    events = await events_of(client)
    error, last = events[-2:]
    assert error.type == "error"
    assert (error.code, error.message) == ("decode_lost", "every room failed")
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert last.response.error.code == "server_error"
    assert last.response.output_text == "Hello"
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(last.response.id)


async def test_a_failure_before_the_first_event_is_a_status(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: Overloaded("full", 7)
    for stream in (False, True):
        with pytest.raises(openai.RateLimitError) as refused:
            await client.responses.create(model=tiny.MODEL, input="hi", stream=stream)
        assert refused.value.response.headers["retry-after"] == "7"


async def test_a_client_that_closes_the_stream_hangs_up(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: [batch(tiny.ids("Hello")), asyncio.Event()]
    stream = await client.responses.create(model=tiny.MODEL, input="hi", stream=True)
    async for event in stream:
        if event.type == "response.output_text.delta":
            break
    await stream.close()
    await asyncio.wait_for(backend.streams[0].hung_up.wait(), 10)
    assert backend.streams[0].hangups == [Hangup.CLIENT_GONE]


async def test_the_prompt_is_counted(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
    counted = await client.responses.input_tokens.count(
        model=tiny.MODEL, input="hi", instructions="Be brief."
    )
    await ask(client, instructions="Be brief.")
    assert counted.input_tokens == len(backend.asked[-1].prompt)
    assert len(backend.asked) == 1
    assert json.loads(counted.to_json())["object"] == "response.input_tokens"
