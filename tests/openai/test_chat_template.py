"""What a message says reaches the prompt whole, in the form that the model's template knows."""

from copy import copy
from typing import Any, Final

import httpx
import pytest

from services.openai.chat_template import ChatTemplate
from tests.openai import tiny
from tests.openai.scripted import ScriptedBackend

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
    monkeypatch.setattr(tokenizer, "_chat", ChatTemplate(reference(LINES)))
    content = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = {"model": tiny.MODEL, "messages": [{"role": "user", "content": content}]}
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    assert tokenizer.decode(backend.asked[0].prompt, skip_special_tokens=False) == "<user>one\ntwo"
