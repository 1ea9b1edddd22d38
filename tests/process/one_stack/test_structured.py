"""Tests of constrained answers of a real stack, whole and streamed, side by side."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Literal

import openai
from pydantic import BaseModel, Field

from baton.grammars.grammar_check import TOO_COMPLEX
from tests.grammars.test_grammar_check import CHAIN
from tests.http import web
from tests.process.stack import Stack

TOKENS: Final = 160
AT_ONCE: Final = 6


class Pet(BaseModel):
    name: str = Field(max_length=8)
    kind: Literal["cat", "dog"]


class Person(BaseModel):
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=150)
    pets: list[Pet] = Field(max_length=1)


ASK: Final[list[Any]] = [{"role": "user", "content": "Describe a person with a pet, as JSON."}]


def test_the_clients_own_parse_gives_an_object(client: openai.OpenAI, model: str) -> None:
    """The client makes a strict schema of a pydantic class, with $defs and $ref."""
    reply = client.chat.completions.parse(
        model=model, messages=ASK, response_format=Person, max_tokens=TOKENS, temperature=1, seed=5
    )
    assert isinstance(reply.choices[0].message.parsed, Person)
    assert reply.choices[0].finish_reason == "stop"


def test_a_stream_grows_to_the_same_object(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "messages": ASK, "max_tokens": TOKENS, "seed": 5}
    with client.chat.completions.stream(**asked, temperature=1, response_format=Person) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        streamed = stream.get_final_completion().choices[0].message
    whole = client.chat.completions.parse(**asked, temperature=1, response_format=Person).choices[0].message
    assert "".join(deltas) == streamed.content == whole.content
    assert streamed.parsed == whole.parsed
    assert len(deltas) > 4


def test_answers_beside_each_other_are_each_held_to_their_own(client: openai.OpenAI, model: str) -> None:
    """An unconstrained answer between them is the same as alone."""
    forms: list[dict[str, Any]] = [
        {"guided_json": Person.model_json_schema()},
        {"structured_outputs": {"regex": r"[0-9]{3}-[0-9]{4}"}},
        {},
        {"guided_choice": ["red", "green"]},
        {"ebnf": 'root ::= "yes" | "no"'},
        {"response_format": {"type": "json_object"}},
    ]

    def ask(place: int) -> str:
        """Greedily where it is held to nothing."""
        extra = forms[place]
        reply = client.chat.completions.create(
            model=model,
            messages=ASK,
            max_tokens=TOKENS if extra else 12,
            temperature=1 if extra else 0,
            seed=place,
            extra_body=extra,
        )
        return reply.choices[0].message.content or ""

    alone = ask(2)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        person, number, free, colour, answer, anything = threads.map(ask, range(len(forms)))
    assert Person.model_validate_json(person)
    assert re.fullmatch(r"[0-9]{3}-[0-9]{4}", number)
    assert free == alone
    assert colour in ("red", "green")
    assert answer in ("yes", "no")
    assert anything.startswith("{")


def test_completions_are_held_too_and_told_by_what_was_allowed(client: openai.OpenAI, model: str) -> None:
    reply = client.completions.create(
        model=model,
        prompt=["2 + 2 =", "The sky is"],
        max_tokens=8,
        logprobs=2,
        temperature=0,
        extra_body={"regex": " [0-9]{2}", "min_tokens": 8},
    )
    for choice in reply.choices:
        assert re.fullmatch(" [0-9]{2}", choice.text)
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[-1] == 0.0, "nothing but the end was allowed"


def test_an_answer_that_is_cut_off_says_so(client: openai.OpenAI, model: str) -> None:
    reply = client.chat.completions.create(
        model=model, messages=ASK, max_tokens=3, response_format={"type": "json_object"}, temperature=0
    )
    assert reply.choices[0].finish_reason == "length"


UNIQUE: Final = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
TOOL: Final[dict[str, Any]] = {"type": "function", "function": {"name": "now", "parameters": {}}}
FORCED: Final = {"type": "function", "function": {"name": "then"}}


def called(arguments: str) -> dict[str, Any]:
    """A call of an earlier turn."""
    function = {"name": "now", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": function}]}


FAULTS: Final[list[tuple[dict[str, Any], str, str]]] = [
    ({"guided_json": UNIQUE}, "guided_json", "uniqueItems"),
    ({"guided_regex": "(a"}, "guided_regex", "unclosed"),
    ({"guided_regex": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}"}, "guided_regex", "costly"),
    ({"guided_grammar": CHAIN}, "guided_grammar", TOO_COMPLEX),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name", "now"),
    ({"tools": [TOOL], "tool_choice": FORCED}, "tool_choice", "then"),
    (
        {"messages": [*ASK, {"role": "tool", "content": "x", "tool_call_id": "a"}]},
        "messages[1].tool_call_id",
        "",
    ),
    (
        {"messages": [*ASK, called("{'a': 1}"), *ASK]},
        "messages[1].tool_calls[0].function.arguments",
        "",
    ),
    ({"n": 64, "max_tokens": 100_000}, "max_tokens", ""),
]
"""Request fields, the field that the error names, and a part of its message."""


def test_what_cannot_be_asked_for_touches_no_worker(idle_stack: Stack, model: str) -> None:
    """The router does not compile it either, which would have ended its process."""
    for fields, param, why in FAULTS:
        body = {"model": model, "messages": ASK, "max_tokens": 8, **fields}
        reply = web().post(f"{idle_stack.url}/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 400, (fields, reply.text)
        error = reply.json()["error"]
        assert error["param"] == param, error
        assert why in error["message"]


def test_a_grammar_and_an_end_that_contradict_end_what_is_whole(client: openai.OpenAI, model: str) -> None:
    """After a complete answer, the grammar allows only its end."""
    against: list[dict[str, Any]] = [{"ignore_eos": True}, {"min_tokens": 20}, {"logit_bias": {"2": -100}}]
    for each in against:
        reply = client.completions.create(
            model=model, prompt="2 + 2 =", max_tokens=40, extra_body={"regex": "[0-9]{3}", **each}
        )
        assert re.fullmatch("[0-9]{3}", reply.choices[0].text), each
        assert reply.choices[0].finish_reason == "stop", each
