"""Grammars of forced and strict tool calls, and of answers with reasoning before them.

Answers are drawn from the allowed tokens, as a worker draws them.
"""

import json
import random
from collections.abc import Sequence
from copy import copy
from typing import Any, Final

import httpx
import pytest
from jsonschema import Draft202012Validator
from prometheus_client import CollectorRegistry
from tokenizers import AddedToken

from baton.api.app import create_app
from baton.api.backend import Limits
from baton.api.served_model import ServedModel
from baton.api.text.tokenizer import Tokenizer
from baton.api.tools.constraints.tool_call_grammar import FORCED_CALLS_MAX
from baton.api.tools.format_detection import model_formats
from baton.api.tools.formats.output_formats import AUTO
from baton.grammars.grammar_compiler import compile_grammar
from baton.grammars.vocabulary import vocabulary_of
from baton.rooms.request import FinishReason, Request
from tests.api import tiny
from tests.api.chat.test_reasoning import THINKING
from tests.api.requests.test_bad_input import CHAT, chat, check
from tests.api.scripted import ScriptedBackend, Step, batch

CITY: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Bern"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NAMED: Final = {"type": "function", "function": {"name": "weather"}}


def tool(name: str = "weather", **said: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": CITY, **said}}


def served(
    template: str, calls: str = AUTO, added: Sequence[str] = (), end: int = tiny.END_ID
) -> ServedModel:
    reference = copy(tiny.byte_level())
    if added:
        reference = copy(type(reference)(tokenizer_object=reference.backend_tokenizer, eos_token="<|end|>"))
        reference.add_tokens([AddedToken(each, special=False) for each in added])
    reference.chat_template = template
    tokenizer = Tokenizer(reference)
    forms = model_formats(tokenizer, "", calls)
    return ServedModel(tiny.MODEL, tokenizer, (end,), len(reference), formats=forms)


class RandomModel:
    """Served model that draws its answers among the allowed tokens, and writes a text as far as it may."""

    def __init__(self, model: ServedModel, towards: str, seed: int = 0, tokens_max: int = 400) -> None:
        self._tokens_max = tokens_max
        self.model = model
        self.towards = model.tokenizer.encode(towards, add_special_tokens=False)
        self.backend = ScriptedBackend(self._script, Limits(8192, 8192, 8192))
        self._random = random.Random(seed)

    def _script(self, request: Request) -> list[Step]:
        codec, model = self.model.tokenizer.codec, self.model
        (end,) = model.eos_token_ids
        assert request.grammar is not None
        fold = compile_grammar(request.grammar, vocabulary_of(codec, model.vocabulary, model.eos_token_ids))
        output: list[int] = []
        while len(output) < self._tokens_max:
            mask = fold.allowed(request, output)
            allowed = [id_ for id_ in range(model.vocabulary) if mask[id_ // 8] >> id_ % 8 & 1]
            at = len(output)
            wanted = self.towards[at] if output == self.towards[:at] and at < len(self.towards) else end
            output.append(wanted if wanted in allowed else self._random.choice(allowed))
            if output[-1] == end:
                return _by_tokens(output, FinishReason.STOP)
            if len(output) == request.max_tokens:
                break
        return _by_tokens(output, FinishReason.LENGTH)

    async def ask(self, **fields: Any) -> dict[str, Any]:
        choice: dict[str, Any] = (await self.post(CHAT, chat(**fields))).json()["choices"][0]
        return choice

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        app = create_app(self.backend, self.model, CollectorRegistry())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            reply = await http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of a stream."""
        text = (await self.post(path, body | {"stream": True})).text
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]


def _by_tokens(output: list[int], finish: FinishReason) -> list[Step]:
    """Return one batch for each token."""
    last = len(output) - 1
    return [batch([id_], finish if place == last else None) for place, id_ in enumerate(output)]


def check_calls(choice: dict[str, Any], names: set[str]) -> None:
    calls = choice["message"]["tool_calls"]
    assert calls
    for call in calls:
        assert call["function"]["name"] in names
        told = json.loads(call["function"]["arguments"])
        assert told["city"] in ("Rome", "Bern")
        assert told["days"] in (1, 2, 3)


MARKS: Final = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>")


CHANNELS: Final = ("<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>")
HARMONY: Final = "{# <|channel|> #}" + tiny.CHAT_TEMPLATE
PAD_ID: Final = tiny.SPECIAL.index("<pad>")
"""Token that ends an answer of a model whose "<|end|>" ends a message."""
COMMENTARY: Final = "<|channel|>commentary to=functions."


@pytest.mark.parametrize("added", [(), CHANNELS], ids=["marks in letters", "marks as tokens"])
async def test_a_strict_tool_is_called_rightly_on_channels_or_the_answer_is_another(
    added: Sequence[str],
) -> None:
    model = served(HARMONY, "harmony", added, end=PAD_ID)
    asked: dict[str, Any] = {"tools": [tool(strict=True), tool("later")]}
    reasoning = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    said = "<|channel|>final<|message|>There is no need."
    choice = await RandomModel(model, reasoning + said).ask(**asked)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("There is no need.", "stop")
    assert choice["message"]["reasoning_content"] == "Hm."
    for before in ("", reasoning):
        choice = await RandomModel(model, f"{before}{COMMENTARY}weather").ask(**asked)
        check_calls(choice, {"weather"})
        assert choice["finish_reason"] == "tool_calls"
    choice = await RandomModel(model, "I will not.").ask(**asked, tool_choice="required")
    check_calls(choice, {"weather", "later"})


@pytest.mark.parametrize("added", [(), MARKS], ids=["marks in letters", "marks as tokens"])
@pytest.mark.parametrize(
    "calls", ["hermes", "llama3", "mistral", "deepseek", "kimi", "gemma", "pythonic", "harmony"]
)
async def test_a_call_is_forced_in_every_form(calls: str, added: Sequence[str]) -> None:
    model = served(tiny.CHAT_TEMPLATE, calls, added)
    tools = [tool(), tool("later")]
    choice = await RandomModel(model, "I will not call anything.").ask(tools=tools, tool_choice="required")
    check_calls(choice, {"weather", "later"})
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    choice = await RandomModel(model, "I will not.", seed=1).ask(tools=tools, tool_choice=NAMED)
    check_calls(choice, {"weather"})
    assert (len(choice["message"]["tool_calls"]), choice["finish_reason"]) == (1, "stop")


REPEATED: Final = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 1}}\n</tool_call>',
    "mistral": '[TOOL_CALLS]weather[ARGS]{"city": "Rome", "days": 1}',
}


@pytest.mark.parametrize("choice", ["required", "auto"])
@pytest.mark.parametrize("calls", REPEATED)
async def test_a_model_that_repeats_a_call_makes_a_bounded_number_of_them(calls: str, choice: str) -> None:
    model = served(tiny.CHAT_TEMPLATE, calls, MARKS)
    repeating = RandomModel(model, REPEATED[calls] * (2 * FORCED_CALLS_MAX), tokens_max=4_000)
    told = await repeating.ask(tools=[tool(strict=True)], tool_choice=choice)
    check_calls(told, {"weather"})
    assert len(told["message"]["tool_calls"]) == FORCED_CALLS_MAX
    assert told["finish_reason"] == "tool_calls"


async def test_of_allowed_tools_one_is_called() -> None:
    tools = [tool(), tool("later"), tool("other")]
    for mode in ("required", "auto"):
        names = [{"type": "function", "function": {"name": name}} for name in ("later", "other")]
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": names}}
        model_ = RandomModel(served(tiny.CHAT_TEMPLATE), '<tool_call>\n{"name": "', seed=2)
        strict = [{**each, "function": {**each["function"], "strict": True}} for each in tools]
        told = await model_.ask(tools=strict, tool_choice=choice, parallel_tool_calls=False)
        check_calls(told, {"later", "other"})
        text = model_.model.tokenizer.decode(model_.backend.asked[0].prompt, skip_special_tokens=False)
        assert ("weather" in text, "later" in text) == (False, True)


@pytest.mark.parametrize("added", [(), MARKS], ids=["marks in letters", "marks as tokens"])
@pytest.mark.parametrize(
    ("calls", "begun"),
    [("hermes", 'Yes.<tool_call>\n{"name": "'), ("mistral", "Yes.[TOOL_CALLS]"), ("llama3", "{")],
)
async def test_a_strict_tool_may_be_called_and_is_called_rightly(
    calls: str, begun: str, added: Sequence[str]
) -> None:
    model = served(tiny.CHAT_TEMPLATE, calls, added)
    choice = await RandomModel(model, "There is no need.").ask(tools=[tool(strict=True)])
    assert (choice["message"]["content"], choice["finish_reason"]) == ("There is no need.", "stop")
    choice = await RandomModel(model, begun).ask(tools=[tool(strict=True)], parallel_tool_calls=False)
    check_calls(choice, {"weather"})


async def test_with_a_response_format_an_answer_is_calls_or_of_that_form() -> None:
    model = served(tiny.CHAT_TEMPLATE)
    asked: dict[str, Any] = {"tools": [tool()], "structured_outputs": {"choice": ["yes", "no"]}}
    choice = await RandomModel(model, "no, never").ask(**asked)
    assert choice["message"]["content"] == "no"
    choice = await RandomModel(model, '<tool_call>\n{"name": "weather"').ask(**asked)
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize("added", [(), MARKS], ids=["marks in letters", "marks as tokens"])
@pytest.mark.parametrize(
    "form",
    [
        {"guided_choice": ["yes", "no"]},
        {"guided_regex": "(yes|no)(/x)?"},
        {"guided_json": {"enum": ["yes", "no"]}},
    ],
    ids=["choice", "regex", "json"],
)
async def test_a_grammar_begins_behind_the_reasoning(form: dict[str, Any], added: Sequence[str]) -> None:
    model = served(THINKING, added=added)
    block, no = "<think>Hm, no { form.</think>", '"no"' if "guided_json" in form else "no"
    for words, said, reasoning in (
        ({}, f"{block}\n{no}", "Hm, no { form."),
        ({}, no, None),
        ({"opens": True}, f"Hm.</think>{no}", "Hm."),
        ({"enable_thinking": False}, "<think>no", None),
    ):
        choice = await RandomModel(model, said).ask(chat_template_kwargs=words, **form)
        assert choice["message"]["content"].strip('"').removesuffix("/x") in ("yes", "no")
        assert choice["message"].get("reasoning_content") == reasoning
    choice = await RandomModel(model, block).ask(separate_reasoning=False, **form)
    assert choice["message"]["content"].strip('"').removesuffix("/x") in ("yes", "no")


async def test_a_forced_call_follows_the_reasoning() -> None:
    choice = await RandomModel(served(THINKING), "<think>Hm.</think>No.").ask(
        tools=[tool()], tool_choice="required"
    )
    assert choice["message"]["reasoning_content"] == "Hm."
    check_calls(choice, {"weather"})


@pytest.mark.parametrize("added", [(), ("<tool_call>", "</tool_call>")], ids=["letters", "tokens"])
async def test_an_argument_may_have_the_text_of_a_special_token(added: Sequence[str]) -> None:
    text = "a<|end|>b<|start|>"
    parameters = {"type": "object", "properties": {"x": {"const": text}}, "required": ["x"]}
    model_ = RandomModel(served(tiny.CHAT_TEMPLATE, added=added), "")
    choice = await model_.ask(tools=[tool(parameters=parameters)], tool_choice="required")
    assert choice["finish_reason"] == "tool_calls"
    for call in choice["message"]["tool_calls"]:
        assert json.loads(call["function"]["arguments"]) == {"x": text}


@pytest.mark.parametrize(
    "form",
    [
        {"guided_choice": ["a<|end|>b"]},
        {"guided_regex": r"a<\|end\|>b"},
        {"guided_grammar": 'root ::= "a<|end|>b"'},
        {"guided_json": {"enum": ["a<|end|>b"]}},
    ],
    ids=lambda form: next(iter(form)),
)
async def test_an_answer_may_have_the_text_of_the_end(form: dict[str, Any]) -> None:
    choice = await RandomModel(served(tiny.CHAT_TEMPLATE), "").ask(**form)
    assert choice["message"]["content"].strip().strip('"') == "a<|end|>b"
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
        (
            {
                "tools": [tool(), tool("b", parameters={"properties": {"a": {"not": {"pattern": "a"}}}})],
                "tool_choice": "required",
            },
            "tools[1].function.parameters",
        ),
        (
            {
                "tools": [
                    tool(parameters={"type": "object", "properties": {"a": {"$ref": "#/x"}}}, strict=True)
                ]
            },
            "tools[0].function.parameters",
        ),
    ],
)
async def test_calls_that_no_grammar_expresses_are_refused_by_field(
    fields: dict[str, Any], param: str
) -> None:
    model_ = RandomModel(served(tiny.CHAT_TEMPLATE), "")
    app = create_app(model_.backend, model_.model, CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        check(await http.post(CHAT, json=chat(**fields)), 400, param)
    assert model_.backend.asked == []


MANY: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Where."},
        "unit": {"enum": ["C", "F"], "type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 3},
        "more": {"type": "object", "properties": {"wind": {"type": "boolean"}}, "required": ["wind"]},
        "list": {"type": "array", "items": {"$ref": "#/$defs/short"}, "maxItems": 2},
    },
    "required": ["city", "more"],
    "$defs": {"short": {"type": "string", "maxLength": 2}},
}
ONE_BY_ONE: Final = [
    ("gemma", "<|tool_call>", '<|tool_call>call:weather{city:<|"|>Bern "x"<|"|>,unit:<|"|>F<|"|>'),
    ("gemma", "<start_function_call>", "<start_function_call>call:weather{city:<escape>Bern<escape>,d"),
    (
        "invoke",
        "<minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">\nB</parameter>\n',
    ),
    (
        "pythonic",
        "",
        '[weather(city="B\\/ern", days=2, more={"wind": true}, list=["\\ud83d\\ude00"]), weather(',
    ),
]
OF_ONE_BY_ONE: Final = (
    "<|tool_call>",
    "<tool_call|>",
    '<|"|>',
    "<minimax:tool_call>",
    "</minimax:tool_call>",
)


@pytest.mark.parametrize("added", [(), OF_ONE_BY_ONE], ids=["marks in letters", "marks as tokens"])
@pytest.mark.parametrize(("calls", "mark", "begun"), ONE_BY_ONE, ids=lambda each: each[:12])
async def test_arguments_of_a_strict_tool_are_constrained_one_by_one(
    calls: str, mark: str, begun: str, added: Sequence[str]
) -> None:
    model = served(f"{{# {mark} #}}{tiny.CHAT_TEMPLATE}", calls, added)
    tools = [tool(strict=True, parameters=MANY), tool("now", parameters={"type": "object", "properties": {}})]
    choice = await RandomModel(model, "There is no need.").ask(tools=tools)
    assert (choice["message"]["content"], choice["finish_reason"]) == ("There is no need.", "stop")
    for seed, towards in enumerate((begun, begun, begun.partition("weather")[0] + "now")):
        choice = await RandomModel(model, towards, seed).ask(tools=tools, parallel_tool_calls=False)
        assert choice["finish_reason"] == "tool_calls", choice
        (call,) = choice["message"]["tool_calls"]
        told, name = json.loads(call["function"]["arguments"]), call["function"]["name"]
        Draft202012Validator({**MANY, "additionalProperties": False} if name == "weather" else {}).validate(
            told
        )
        assert (name == "now") == (towards != begun)


@pytest.mark.parametrize(
    ("calls", "mark", "parameters", "param"),
    [
        ("invoke", "<｜DSML｜function_calls>", CITY, "strict"),
        ("gemma", "", CITY, "strict"),
        ("gemma", "<|tool_call>", {"properties": {}, "anyOf": [{"required": ["a"]}]}, "parameters"),
        ("gemma", "<|tool_call>", {"properties": {"a b": {"type": "string"}}}, "parameters"),
        (
            "invoke",
            "<minimax:tool_call>",
            {"properties": {"a": {"type": "string", "pattern": "b"}}},
            "parameters",
        ),
        ("invoke", "<minimax:tool_call>", {"properties": {"a": {"type": ["string", "null"]}}}, "parameters"),
    ],
)
async def test_a_strict_tool_is_refused_if_its_calls_cannot_be_constrained(
    calls: str, mark: str, parameters: dict[str, Any], param: str
) -> None:
    model_ = RandomModel(served(f"{{# {mark} #}}{tiny.CHAT_TEMPLATE}", calls), "")
    app = create_app(model_.backend, model_.model, CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        reply = await http.post(CHAT, json=chat(tools=[tool(strict=True, parameters=parameters)]))
    check(reply, 400, f"tools[0].function.{param}", "unsupported_value")


async def test_only_allowed_tokens_come() -> None:
    model = served(tiny.CHAT_TEMPLATE)
    allowed = model.tokenizer.encode("no yes", add_special_tokens=False)
    model_ = RandomModel(model, "no, never")
    choice = await model_.ask(allowed_token_ids=allowed, max_tokens=9, return_token_ids=True)
    assert set(choice["token_ids"]) <= {*allowed}
    assert choice["finish_reason"] == "length", "the end is not among them"
    choice = await RandomModel(model, "no").ask(allowed_token_ids=[*allowed, tiny.END_ID])
    assert (choice["message"]["content"], choice["finish_reason"]) == ("no", "stop")


@pytest.mark.parametrize("added", [(), MARKS], ids=["marks in letters", "marks as tokens"])
async def test_bad_words_do_not_come(added: Sequence[str]) -> None:
    model = served(THINKING, added=added)
    for text, words in (
        ("a cat sat", ["cat"]),
        ("a/b.c", ["/b."]),
        ("<think>a cat</think>x", ["cat", "dog"]),
    ):
        choice = await RandomModel(model, text).ask(bad_words=words, max_tokens=30, separate_reasoning=False)
        said = choice["message"]["content"]
        assert said.startswith(text.partition(words[0])[0])
        assert not any(word in said for word in words)
    choice = await RandomModel(model, "a cow sat").ask(bad_words=["cat"])
    assert choice["message"]["content"] == "a cow sat"
    choice = await RandomModel(model, "<think>Hm</think>\nYes").ask(bad_words=["cat"])
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("Yes", "Hm")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"bad_words": "cat"}, "bad_words"),
        ({"bad_words": ["x"] * 65}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": [1], "bad_words": ["x"]}, "bad_words"),
        ({"guided_regex": "a", "bad_words": ["x"]}, "bad_words"),
        ({"tools": [tool(strict=True)], "bad_words": ["x"]}, "bad_words"),
    ],
)
async def test_wrong_limits_are_refused_by_field(fields: dict[str, Any], param: str) -> None:
    model_ = RandomModel(served(tiny.CHAT_TEMPLATE), "")
    app = create_app(model_.backend, model_.model, CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        check(await http.post(CHAT, json=chat(**fields)), 400, param)
    assert model_.backend.asked == []


async def test_a_call_goes_back_as_the_clients_helper_read_it(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    """OpenAI's `.parse` leaves its result in the message with which a conversation continues."""
    call = {"name": "f", "arguments": '{"a": 1}', "parsed_arguments": {"a": 1}}
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "c", "content": "y"},
    ]
    assert (await http.post(CHAT, json=chat(messages=turns))).status_code == 200
    text = tiny.model().tokenizer.decode(backend.asked[0].prompt, skip_special_tokens=False)
    assert '"arguments": {"a": 1}' in text
    assert "parsed" not in text


async def test_a_call_has_no_arguments_that_nobody_named() -> None:
    """Schemas of pydantic allow unnamed properties without meaning to."""
    schema = {"properties": {"a": {"type": "object", "properties": {"b": {"const": {"properties": 1}}}}}}
    wanted = '<tool_call>\n{"name": "f", "arguments": {"a": {"b": {"properties": 1}, "c'
    asked: dict[str, Any] = {"tools": [tool("f", parameters=schema)], "tool_choice": "required"}
    choice = await RandomModel(served(tiny.CHAT_TEMPLATE), wanted).ask(**asked)
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {
        "a": {"b": {"properties": 1}}
    }
    open_ = {"properties": {}, "additionalProperties": {"type": "integer"}}
    asked["tools"] = [tool("f", parameters=open_)]
    text = '<tool_call>\n{"name": "f", "arguments": {"x": 3}}\n</tool_call>'
    choice = await RandomModel(served(tiny.CHAT_TEMPLATE), text).ask(**asked)
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"x": 3}'
