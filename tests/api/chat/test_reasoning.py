"""Tests of reasoning, in answers and in the history that clients send back."""

import json
from collections.abc import AsyncIterator
from copy import copy
from typing import Any, Final

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.api.served_model import ServedModel
from baton.api.settings import ApiSettings
from baton.api.text.tokenizer import Tokenizer
from baton.api.tools.format_detection import model_formats
from baton.api.tools.formats.output_formats import AUTO
from baton.rooms.request import FinishReason
from tests.api import tiny
from tests.api.requests.test_bad_input import CHAT, USER, chat, check
from tests.api.scripted import LENGTH, STOP, ScriptedBackend, saying

THINKING: Final = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}"
    "{% for d in documents or [] %}[{{ d.title }}]{% endfor %}{{ reasoning_effort or '' }}"
    "{% if add_generation_prompt %}<|start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% if opens %}<think>\n{% endif %}{% endif %}"
)
REASONED: Final = "<think>\nHm, they ask.\n</think>\n\nHello"


def served(template: str, reasoning: str = AUTO) -> ServedModel:
    reference = copy(tiny.byte_level())
    reference.chat_template = template
    tokenizer = Tokenizer(reference)
    forms = model_formats(tokenizer, "", reasoning=reasoning)
    return ServedModel(tiny.MODEL, tokenizer, (tiny.END_ID,), len(reference), formats=forms)


@pytest.fixture
async def http(backend: ScriptedBackend) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(backend, served(THINKING), CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


def prompt(backend: ScriptedBackend) -> str:
    return tiny.model().tokenizer.decode(backend.asked[-1].prompt, skip_special_tokens=False)


async def message(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    reply = await http.post(CHAT, json=chat(**fields))
    assert reply.status_code == 200, reply.text
    told: dict[str, Any] = reply.json()["choices"][0]["message"]
    return told


@pytest.mark.parametrize(
    ("fields", "said", "content", "reasoning"),
    [
        ({}, REASONED, "Hello", "Hm, they ask."),
        ({}, "Hello", "Hello", None),
        ({"include_reasoning": False}, REASONED, "Hello", None),
        ({"separate_reasoning": False}, REASONED, REASONED, None),
        ({"chat_template_kwargs": {"opens": True}}, "Hm.\n</think>\n\nHello", "Hello", "Hm."),
        ({"chat_template_kwargs": {"opens": True}}, "Hm, no end", None, "Hm, no end"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "Hello", "Hello", None),
        ({"reasoning_effort": "none"}, "Hello", "Hello", None),
        ({"reasoning": {"exclude": True}}, REASONED, "Hello", None),
        ({"messages": [{"role": "user", "content": "What is <think>?"}]}, "A mark.", "A mark.", None),
    ],
)
async def test_reasoning_is_separated(
    http: httpx.AsyncClient,
    backend: ScriptedBackend,
    fields: dict[str, Any],
    said: str,
    content: str | None,
    reasoning: str | None,
) -> None:
    backend.script = lambda _: saying(said)
    told = await message(http, **fields)
    assert told["content"] == content
    assert told.get("reasoning_content") == told.get("reasoning") == reasoning


async def test_reasoning_is_streamed_before_the_answer(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: saying(REASONED)
    reply = await http.post(CHAT, json=chat(stream=True))
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    deltas = [each["choices"][0]["delta"] for each in chunks]
    assert "".join(each["reasoning_content"] or "" for each in deltas) == "Hm, they ask."
    assert all(each.get("reasoning_content") == each.get("reasoning") for each in deltas)
    assert "".join(each.get("content") or "" for each in deltas) == "Hello"
    kinds = ["reasoning" if "reasoning" in each else "answer" for each in deltas[1:-1]]
    assert kinds == sorted(kinds, reverse=True)
    assert len(kinds) > 3


@pytest.mark.parametrize(
    ("said", "finish", "reasoning"), [(REASONED, STOP, "Hm, they ask."), (REASONED[:16], LENGTH, "Hm, they")]
)
async def test_reasoning_that_is_not_streamed_comes_in_one_piece(
    http: httpx.AsyncClient, backend: ScriptedBackend, said: str, finish: FinishReason, reasoning: str
) -> None:
    """This holds for reasoning that is cut off, too."""
    backend.script = lambda _: saying(said, finish=finish)
    reply = await http.post(CHAT, json=chat(stream=True, stream_reasoning=False))
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    deltas = [each["choices"][0]["delta"] for each in chunks]
    assert [each["reasoning"] for each in deltas if "reasoning" in each] == [reasoning]
    whole = await message(http, stream_reasoning=False)
    assert whole["reasoning"] == reasoning
    assert "".join(each.get("content") or "" for each in deltas) == (whole["content"] or "")


async def test_tokens_of_reasoning_are_counted(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.script = lambda _: saying("Hm.</think>Hello")
    for fields in ({}, {"include_reasoning": False}):
        body = chat(chat_template_kwargs={"opens": True}, **fields)
        usage = (await http.post(CHAT, json=body)).json()["usage"]
        reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
        assert len(tiny.ids("Hm.")) < reasoning < usage["completion_tokens"] - len(tiny.ids("ello"))
    backend.script = lambda _: saying("Hello")
    usage = (await http.post(CHAT, json=chat())).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_a_stop_string_counts_in_content_alone_and_a_limit_everywhere(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: saying("<think>one they</think>two they three")
    reply = (await http.post(CHAT, json=chat(stop=["they"]))).json()["choices"][0]
    message = reply["message"]
    assert (message["reasoning_content"], message["content"]) == ("one they", "two ")
    assert (reply["finish_reason"], reply["stop_reason"]) == ("stop", "they")
    lines = (await http.post(CHAT, json=chat(stop=["they"], stream=True))).text.splitlines()
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line.startswith("data: {")]
    for key in ("reasoning_content", "content"):
        assert "".join(each.get(key) or "" for each in deltas) == message[key]
    backend.script = lambda _: saying(REASONED[:16], finish=LENGTH)
    reply = (await http.post(CHAT, json=chat())).json()["choices"][0]
    assert (reply["message"]["content"], reply["finish_reason"]) == (None, "length")


NOT_THINKING: Final = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("reasoning", "effort", "thinks"),
    [
        ({}, "", True),
        ({"effort": "high"}, "high", True),
        ({"reasoning_effort": "high", "enabled": True}, "high", True),
        ({"effort": "none"}, "none", False),
        ({"enabled": False}, "none", False),
    ],
)
async def test_the_reasoning_object_has_an_effort(
    http: httpx.AsyncClient, backend: ScriptedBackend, reasoning: dict[str, Any], effort: str, thinks: bool
) -> None:
    await message(http, reasoning=reasoning)
    nothing = "" if thinks else NOT_THINKING
    assert prompt(backend).endswith(f"<|end|>\n{effort}<|start|>assistant\n{nothing}")


async def test_what_a_template_asks_for_is_given_to_it(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    earlier = {"role": "assistant", "content": "Hello", "reasoning_content": "Hm.", "refusal": None}
    for turn in (earlier, {"role": "assistant", "content": "Hello", "reasoning": "Hm."}):
        await message(http, messages=[USER, turn, USER], reasoning_effort="low", documents=[{"title": "A"}])
        assert "<|start|>assistant\n<think>\nHm.\n</think>\nHello<|end|>" in prompt(backend)
        assert "[A]low<|start|>" in prompt(backend)
    await message(http, messages=[USER, {"role": "assistant", "content": None, "reasoning": "Hm"}, USER])
    await message(http, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": "high"})
    assert "high" in prompt(backend)
    await message(http, add_generation_prompt=False)
    assert prompt(backend).endswith("hi<|end|>\n")


@pytest.mark.parametrize(
    "content", ["Hello, my ", [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "my "}]]
)
async def test_an_answer_goes_on_where_the_last_message_ends(
    http: httpx.AsyncClient, backend: ScriptedBackend, content: Any
) -> None:
    last = {"role": "assistant", "content": content}
    await message(http, messages=[USER, last], continue_final_message=True)
    assert prompt(backend).endswith("<|start|>assistant\nHello, my ")
    backend.script = lambda _: saying("so.</think>Yes")
    told = await message(
        http,
        messages=[USER, {"role": "assistant", "content": "<think>I think "}],
        continue_final_message=True,
    )
    assert (told["reasoning_content"], told["content"]) == ("so.", "Yes")


NO_WORDS: Final[list[Any]] = [
    {"messages": []},
    {"add_generation_prompt": False},
    {"bos_token": "x"},
    {"raise_exception": 1},
    {"a b": 1},
    {"__class__": 1},
    {"x": "y" * 100_000},
    dict.fromkeys((f"a{place}" for place in range(33)), 1),
    [1],
]
FAULTS: Final[list[tuple[dict[str, Any], str]]] = [
    *(({"chat_template_kwargs": words}, "chat_template_kwargs") for words in NO_WORDS),
    ({"include_reasoning": 1}, "include_reasoning"),
    ({"messages": [{**USER, "reasoning": "x"}]}, "messages[0].reasoning"),
    ({"messages": [USER, {"role": "assistant", "reasoning_content": 5}]}, "messages[1].reasoning_content"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, "reasoning"),
    ({"reasoning": {"effort": "low", "reasoning_effort": "high"}}, "reasoning"),
    ({"reasoning": {"effort": "low", "enabled": False}}, "reasoning"),
    ({"reasoning": {"effort": "none", "enabled": True}}, "reasoning"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
    ({"reasoning": {"max_tokens": 5}}, "reasoning.max_tokens"),
    ({"reasoning": "high"}, "reasoning"),
    ({"documents": [5]}, "documents[0]"),
]


@pytest.mark.parametrize(("fields", "param"), FAULTS, ids=lambda value: json.dumps(value)[:60])
async def test_what_is_wrong_with_them_is_told_by_field(
    http: httpx.AsyncClient, backend: ScriptedBackend, fields: dict[str, Any], param: str
) -> None:
    check(await http.post(CHAT, json=chat(**fields)), 400, param)
    assert backend.asked == []


async def test_documents_are_refused_where_they_would_not_be_shown(backend: ScriptedBackend) -> None:
    app = create_app(backend, tiny.model(), CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        reply = await http.post(CHAT, json=chat(documents=[{"title": "A"}]))
    check(reply, 400, "documents", "unsupported_value")


def test_no_reasoning_parser_leaves_reasoning_in_the_answer() -> None:
    assert served(THINKING).formats.names["reasoning"] == "think"
    assert served(THINKING, "none").formats.names["reasoning"] == "none"
    assert served(tiny.CHAT_TEMPLATE, "qwen3").formats.names["reasoning"] == "think"


async def test_a_chat_may_bring_its_template_where_that_is_trusted(backend: ScriptedBackend) -> None:
    trusting = ApiSettings(trust_request_chat_template=True)
    own = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ tone }}"
    for settings, status in ((trusting, 200), (ApiSettings(), 400)):
        app = create_app(backend, tiny.model(), CollectorRegistry(), settings)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            body = chat(chat_template=own, chat_template_kwargs={"tone": "!"})
            reply = await http.post(CHAT, json=body)
            assert reply.status_code == status, reply.text
            if status == 400:
                check(reply, 400, "chat_template", "unsupported_parameter")
                continue
            assert prompt(backend) == "[hi]!"
            backend.asked.clear()
            for wrong in (
                "{% for %}",
                "{{ 1 + 'a' }}",
                "{{ ''.__class__.__mro__ }}",
                "{{ raise_exception('no') }}",
            ):
                reply = await http.post(CHAT, json=chat(chat_template=wrong))
                assert reply.json()["error"]["param"] in ("chat_template", "messages"), wrong
                assert reply.status_code == 400
            assert backend.asked == []
