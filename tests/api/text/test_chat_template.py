"""Tests that all of a message's content reaches the prompt, in the form that the model's chat template
knows."""

from copy import copy, deepcopy
from dataclasses import replace
from typing import Any, Final

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.api.served_model import ServedModel
from baton.api.text.chat_template import ChatTemplate
from baton.api.text.tokenizer import Tokenizer
from tests.api import tiny
from tests.api.scripted import ScriptedBackend

CHAT: Final = "/v1/chat/completions"
TURN: Final = "<{{ message['role'] }}>"
BOTH: Final = (
    "{% for message in messages %}" + TURN + "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] | trim }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
"""Llama 4's kind, and Gemma 3's: each part by itself."""
LINES: Final = (
    "{% for message in messages %}" + TURN + "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% set said = namespace(val='') %}{% for part in message.content %}"
    "{% if said.val != '' %}{% set said.val = said.val + '\\n' %}{% endif %}"
    "{% set said.val = said.val + part.text %}{% endfor %}{{ said.val }}{% endif %}{% endfor %}"
)
"""Granite's kind: a line for each part."""
PARTS: Final = (
    "{% for message in messages %}" + TURN + "{% for line in message['content'] %}"
    "{% if line['type'] == 'text' %}{{ line['text'] }}{% elif line['type'] == 'image' %}<image>{% endif %}"
    "{% endfor %}{% endfor %}"
)
"""SmolVLM's kind: it knows no text that is not a part."""
TEXT: Final = "{% for message in messages %}" + TURN + "{{ message['content'] }}{% endfor %}"
FIRST_OF_SYSTEM: Final = (
    "{% if messages[0]['role'] == 'system' %}{% if messages[0]['content'] is string %}"
    "<system>{{ messages[0]['content'] }}{% else %}<system>{{ messages[0]['content'][0]['text'] }}{% endif %}"
    "{% set messages = messages[1:] %}{% endif %}" + BOTH
)
"""Llama 4's and Gemma 3's, again: of a system message in parts they show the first."""
ALTERNATING: Final = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}" + LINES
)


def said(system: bool = True) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": ["Be brief. ", " Be kind."]},
        {"role": "user", "content": ["What is ", "this?"]},
        {"role": "assistant", "content": "A text."},
        {"role": "user", "content": ["And", " this?"]},
        {"role": "assistant", "content": ["Some", "parts"]},
    ]
    return turns if system else turns[1:]


def reference(template: str) -> Any:
    tokenizer = copy(tiny.byte_level())
    tokenizer.chat_template = template
    return tokenizer


def parts(content: str | list[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in ([content] if isinstance(content, str) else content)]


def joined(content: str | list[str]) -> str:
    return "".join(content)


@pytest.mark.parametrize(
    ("template", "shown"),
    [(BOTH, parts), (LINES, parts), (PARTS, parts), (TEXT, joined)],
    ids=["both", "lines", "parts alone", "text alone"],
)
def test_a_chat_is_what_the_library_makes_of_it_in_the_form_that_the_template_knows(
    template: str, shown: Any
) -> None:
    tokenizer = reference(template)
    expected = tokenizer.apply_chat_template(
        [{**each, "content": shown(each["content"])} for each in said()], tokenize=False
    )
    rendered = ChatTemplate(tokenizer).render(said(), add_generation_prompt=False)
    assert rendered == expected
    assert "brief" in rendered
    assert "A text." in rendered
    assert "'type'" not in rendered


def test_a_text_is_what_the_library_makes_of_a_text_where_the_template_knows_both() -> None:
    chat = [{"role": "user", "content": " a text "}]
    for template in (BOTH, LINES, TEXT):
        tokenizer = reference(template)
        expected = tokenizer.apply_chat_template(chat, tokenize=False)
        assert (
            ChatTemplate(tokenizer).render(chat, add_generation_prompt=False) == expected == "<user> a text "
        )


def test_no_part_is_lost_where_a_template_shows_the_first_alone() -> None:
    rendered = ChatTemplate(reference(FIRST_OF_SYSTEM)).render(said(), add_generation_prompt=False)
    assert rendered.startswith("<system>Be brief.  Be kind.<user>What isthis?")


def test_a_template_that_wants_its_roles_in_turn_is_asked_so() -> None:
    rendered = ChatTemplate(reference(ALTERNATING)).render(said(system=False), add_generation_prompt=False)
    assert rendered == "<user>What is \nthis?<assistant>A text.<user>And\n this?<assistant>Some\nparts"


async def test_parts_come_from_the_request_to_the_template(
    http: httpx.AsyncClient, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny.model().tokenizer
    monkeypatch.setattr(tokenizer, "chat", ChatTemplate(reference(LINES)))
    content = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = {"model": tiny.MODEL, "messages": [{"role": "user", "content": content}]}
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    assert tokenizer.decode(backend.asked[0].prompt, skip_special_tokens=False) == "<user>one\ntwo"


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ no_such_function() }}", "UndefinedError: 'no_such_function' is undefined"),
        ("{{ messages[0].content.lines.first }}", "UndefinedError"),
        ("{{ 1 + messages[0].content }}", "(TypeError)"),
        ("{% for message in messages %}", "TemplateSyntaxError"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "loops more than 1000000 times",
        ),
        ("{% for a in range(99999) %}{{ 'long ' * 1000 }}{% endfor %}", "makes more than"),
    ],
    ids=lambda text: text[:30],
)
async def test_a_template_that_fails_is_its_operators_affair(
    template: str, why: str, backend: ScriptedBackend
) -> None:
    app = create_app(backend, served(template), CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        message = {"role": "user", "content": "a-secret"}
        reply = await http.post(CHAT, json={"model": tiny.MODEL, "messages": [message]})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["code"]) == (500, None, "chat_template_failed")
    assert why in error["message"]
    assert "Whoever serves the model has to mend it" in error["message"]
    assert "a-secret" not in error["message"], "it goes into the log"
    assert backend.asked == []


async def test_a_template_that_refuses_names_its_clients_messages(backend: ScriptedBackend) -> None:
    app = create_app(backend, served("{{ raise_exception('Roles must alternate.') }}"), CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        messages = [{"role": "user", "content": "x"}]
        reply = await http.post(CHAT, json={"model": tiny.MODEL, "messages": messages})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "messages")
    assert error["message"].endswith("refuses these messages: Roles must alternate.")


def test_a_loop_that_is_counted_is_a_loop_as_the_template_knows_it() -> None:
    template = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ '.' if loop.last else ', ' }}"
        "{% for name, value in m.items() if name == 'role' %}{{ name }}={{ value }}{% endfor %}"
        "{% for a in [] %}{% else %} none{% endfor %}{% endfor %}"
    )
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    text = ChatTemplate(reference(template)).render(turns, add_generation_prompt=False)
    assert text == "1/2, role=user none2/2.role=assistant none"


FOREIGN: Final = "<|foreign|>"
"""A token of the tokenizer that the model has no row for."""


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (
            [{"role": "system", "content": "x"}, {"role": "user", "content": f"y {FOREIGN}"}],
            "messages[1].content",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "y"}, {"type": "text", "text": FOREIGN}]}],
            "messages[0].content[1].text",
        ),
        ([{"role": "user", "content": "y", "name": FOREIGN}], "messages[0].name"),
    ],
)
async def test_a_token_that_the_model_lacks_is_named_with_the_message_that_holds_it(
    messages: list[dict[str, Any]], param: str, backend: ScriptedBackend
) -> None:
    named = "{% for m in messages %}{{ m.name }}{{ m.content }}{% endfor %}"
    app = create_app(backend, served(named, foreign=True), CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        reply = await http.post(CHAT, json={"model": tiny.MODEL, "messages": messages})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
        assert FOREIGN in reply.json()["error"]["message"]
        for prompt, path in ((FOREIGN, "prompt"), (["x", f"y{FOREIGN}"], "prompt[1]")):
            reply = await http.post("/v1/completions", json={"model": tiny.MODEL, "prompt": prompt})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, path)
    assert backend.asked == []


async def test_a_token_that_the_model_lacks_and_the_template_writes_is_the_operators_affair(
    backend: ScriptedBackend,
) -> None:
    app = create_app(
        backend, served(FOREIGN + "{{ messages[0].content }}", foreign=True), CollectorRegistry()
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        messages = [{"role": "user", "content": "x"}]
        reply = await http.post(CHAT, json={"model": tiny.MODEL, "messages": messages})
    assert reply.status_code == 500
    assert FOREIGN in reply.json()["error"]["message"]


def served(template: str, *, foreign: bool = False) -> ServedModel:
    """Return a model with this chat template. `foreign` adds a token for which the model has no row."""
    tokenizer = deepcopy(tiny.byte_level())
    tokenizer.chat_template = template
    if foreign:
        tokenizer.add_tokens([FOREIGN], special_tokens=True)
    return replace(tiny.model(), tokenizer=Tokenizer(tokenizer))
