"""Constraints in every field of a request are applied, and those that no answer can follow are refused."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any, Final

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.api.backend import Limits
from baton.api.tools.constraints.constraints import WHITESPACE
from baton.rooms.request import GRAMMAR_BYTES_MAX, Grammar, GrammarKind
from tests.api.conftest import LocalGrammarChecker
from tests.api.requests.test_bad_input import CHAT, COMPLETIONS, chat, check, completion
from tests.api.scripted import ScriptedBackend
from tests.grammars.answers import drawn, fold_of, request, text_of

PERSON: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
BLANKS: Final = {"whitespace_pattern": WHITESPACE}
GBNF: Final = 'root ::= "yes" | "no" "!"*'


def schema(value: Any, **options: Any) -> Grammar:
    return Grammar(
        GrammarKind.JSON_SCHEMA, json.dumps({**value, "x-guidance": options or BLANKS}, separators=(",", ":"))
    )


def named(value: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": value, **more}}


OBJECT: Final = schema({"type": "object"})
DIGITS: Final = Grammar(GrammarKind.REGEX, r"\d{3}")
CHOICES: Final = ["yes", "no", 'a "quoted"\n line', "日本", "a ::= b"]
ASKED: dict[str, tuple[dict[str, Any], Grammar | None]] = {
    "OpenAI": ({"response_format": named(PERSON, strict=True, description="of one")}, schema(PERSON)),
    "OpenAI, not strict": ({"response_format": named(PERSON, strict=False)}, schema(PERSON)),
    "OpenAI, any object": ({"response_format": {"type": "json_object"}}, OBJECT),
    "OpenAI, a text": ({"response_format": {"type": "text"}}, None),
    "vLLM json": ({"structured_outputs": {"json": PERSON}}, schema(PERSON)),
    "vLLM json as a text": ({"structured_outputs": {"json": json.dumps(PERSON)}}, schema(PERSON)),
    "vLLM any object": ({"structured_outputs": {"json_object": True}}, OBJECT),
    "vLLM regex": ({"structured_outputs": {"regex": r"\d{3}"}}, DIGITS),
    "vLLM without blanks": (
        {"structured_outputs": {"json": PERSON, "disable_any_whitespace": True}},
        schema(PERSON, whitespace_flexible=False),
    ),
    "vLLM with its blanks": (
        {"structured_outputs": {"json": PERSON, "whitespace_pattern": "[ ]?"}},
        schema(PERSON, whitespace_pattern="[ ]?"),
    ),
    "a text beside it": (
        {"response_format": {"type": "text"}, "structured_outputs": {"regex": r"\d{3}"}},
        DIGITS,
    ),
    "vLLM before, json": ({"guided_json": PERSON}, schema(PERSON)),
    "vLLM before, regex": ({"guided_regex": r"\d{3}", "guided_decoding_backend": "xgrammar"}, DIGITS),
    "vLLM before, blanks": (
        {"guided_json": PERSON, "guided_whitespace_pattern": "[ ]?"},
        schema(PERSON, whitespace_pattern="[ ]?"),
    ),
    "SGLang json": ({"json_schema": json.dumps(PERSON)}, schema(PERSON)),
    "SGLang regex": ({"regex": r"\d{3}"}, DIGITS),
    "null": ({"response_format": None, "guided_json": None}, None),
}


@pytest.mark.parametrize(("fields", "grammar"), ASKED.values(), ids=ASKED.keys())
async def test_each_servers_fields_give_the_constraint(
    http: httpx.AsyncClient, backend: ScriptedBackend, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    for path, body in ((CHAT, chat(**fields)), (COMPLETIONS, completion(**fields))):
        reply = await http.post(path, json=body)
        assert reply.status_code == 200, reply.text
    assert [asked.grammar for asked in backend.asked] == [grammar, grammar]


WORDS: Final = {
    "choice": [{"structured_outputs": {"choice": CHOICES}}, {"guided_choice": CHOICES}],
    "grammar": [
        {"structured_outputs": {"grammar": GBNF}},
        {"guided_grammar": 'start: "yes" | "no" "!"*'},
        {"ebnf": GBNF},
    ],
}


@pytest.mark.parametrize("fields", [each for some in WORDS.values() for each in some])
async def test_choices_and_grammars_allow_what_they_say(
    http: httpx.AsyncClient, backend: ScriptedBackend, fields: dict[str, Any]
) -> None:
    assert (await http.post(CHAT, json=chat(**fields))).status_code == 200
    grammar = backend.asked[0].grammar
    assert grammar is not None
    root = fold_of(grammar)
    texts = {text_of(drawn(root.anew(), request(), seed)) for seed in range(60)}
    if fields in WORDS["choice"]:
        assert texts == {*CHOICES}
    else:
        assert {text.rstrip("!") for text in texts} == {"yes", "no"}


FAULTS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"response_format": "json"}, "response_format", "invalid_type"),
    ({"response_format": {}}, "response_format.type", "missing_required_parameter"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type", "unsupported_parameter"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", None),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", None),
    (
        {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
        "response_format.json_schema",
        None,
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
        "missing_required_parameter",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strickt": True}}},
        "response_format.json_schema.strickt",
        "unknown_parameter",
    ),
    ({"response_format": named([])}, "response_format.json_schema.schema", "invalid_type"),
    (
        {"response_format": named({"x-guidance": {"lenient": True}})},
        "response_format.json_schema.schema",
        None,
    ),
    ({"structured_outputs": {}}, "structured_outputs", None),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", None),
    ({"structured_outputs": {"json": PERSON, "regex": "a"}}, "structured_outputs.regex", None),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", None),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]", "invalid_type"),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "unknown_parameter"),
    (
        {"structured_outputs": {"structural_tag": "x"}},
        "structured_outputs.structural_tag",
        "unsupported_parameter",
    ),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
        None,
    ),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", None),
    (
        {
            "guided_json": {},
            "guided_whitespace_pattern": " ",
            "structured_outputs": {"whitespace_pattern": ""},
        },
        "guided_whitespace_pattern",
        None,
    ),
    ({"guided_json": "{"}, "guided_json", None),
    ({"guided_json": 5}, "guided_json", "invalid_type"),
    ({"guided_json": PERSON, "response_format": {"type": "json_object"}}, "guided_json", None),
    ({"regex": "a", "ebnf": GBNF}, "ebnf", None),
    ({"regex": "(a"}, "regex", None),
    ({"regex": "(?=a)b"}, "regex", None),
    ({"regex": "a" * (GRAMMAR_BYTES_MAX + 1)}, "regex", None),
    ({"regex": r"[^\s\S]"}, "regex", None),
    ({"ebnf": "root ::= other"}, "ebnf", None),
    ({"ebnf": "root ::= ("}, "ebnf", None),
    ({"guided_grammar": "start: other"}, "guided_grammar", None),
    ({"guided_regex": 5}, "guided_regex", "invalid_type"),
    ({"guided_json": {"type": "strin"}}, "guided_json", None),
]


@pytest.mark.parametrize(("fields", "param", "code"), FAULTS, ids=lambda value: json.dumps(value)[:60])
async def test_a_constraint_that_no_answer_can_follow_is_refused_by_its_field(
    http: httpx.AsyncClient, backend: ScriptedBackend, fields: dict[str, Any], param: str, code: str | None
) -> None:
    for _ in range(2):  # as it was judged, and as it is remembered
        message = check(await http.post(CHAT, json=chat(**fields)), 400, param, code)
        assert param in message
    assert backend.asked == []


@pytest.mark.parametrize(
    ("value", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}, "if"),
        ({"type": "array", "contains": {"type": "null"}}, "contains"),
        ({"properties": {"a": {"not": {"pattern": "a"}}}}, "not"),
    ],
)
async def test_a_schema_that_no_grammar_expresses_is_refused_by_its_keyword(
    http: httpx.AsyncClient, value: Any, keyword: str
) -> None:
    reply = await http.post(CHAT, json=chat(response_format=named(value, strict=True)))
    assert keyword in check(reply, 400, "response_format.json_schema.schema")


async def test_what_is_judged_is_counted_once_by_what_came_of_it(
    http: httpx.AsyncClient, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.api.tools.constraints.constraints.TOO_LONG", "unclosed group")
    for text in ("a", "a", "b", "(?=a)b", "(a", "(a"):
        await http.post(CHAT, json=chat(regex=text))
    counts = [
        registry.get_sample_value("baton_grammars_total", {"outcome": outcome})
        for outcome in ("compiled", "refused", "not_survived")
    ]
    assert counts == [2, 1, 1]


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Compile nothing until the event is set."""
    go = threading.Event()

    def wait(judge: LocalGrammarChecker, grammar: Grammar, any_bnf: bool) -> Grammar | str:
        assert go.wait(20)
        return check_at_once(judge, grammar, any_bnf)

    check_at_once = LocalGrammarChecker.check
    monkeypatch.setattr(LocalGrammarChecker, "check", wait)
    yield go
    go.set()


async def test_other_requests_go_on_while_one_is_compiled(
    held_up: threading.Event, http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    slow = asyncio.create_task(http.post(CHAT, json=chat(regex="slow")))
    await asyncio.sleep(0.01)
    assert (await http.post(CHAT, json=chat())).status_code == 200
    assert not slow.done()
    held_up.set()
    assert (await slow).status_code == 200
    assert [asked.grammar is not None for asked in backend.asked] == [False, True]


async def test_what_waits_to_be_compiled_is_bounded(
    held_up: threading.Event, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("baton.api.text.tokenizer_pool.CALLER_WAITING_BYTES_MAX", 3 * 4096)
    asked = [asyncio.create_task(http.post(CHAT, json=chat(regex=f"a{place}"))) for place in range(8)]
    await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED, timeout=20)
    held_up.set()
    statuses = [(await each).status_code for each in asked]
    assert sorted(statuses) == [200] * 5 + [429] * 3


TWICE: Final[list[tuple[dict[str, Any], dict[str, Any]]]] = [
    ({"structured_outputs": {"grammar": GBNF}, "guided_grammar": GBNF}, {"guided_grammar": 'start: "a"'}),
    ({"guided_grammar": GBNF, "ebnf": GBNF}, {"ebnf": 'root ::= "no"'}),
    ({"structured_outputs": {"regex": r"\d"}, "guided_regex": r"\d", "regex": r"\d"}, {"regex": "a"}),
    ({"structured_outputs": {"choice": CHOICES}, "guided_choice": CHOICES}, {"guided_choice": ["yes"]}),
    ({"guided_json": PERSON, "json_schema": json.dumps(PERSON)}, {"json_schema": {"type": "object"}}),
    ({"response_format": named(PERSON), "structured_outputs": {"json": PERSON}}, {"guided_json": {}}),
    ({"response_format": {**named(PERSON), "schema": PERSON}}, {"json_schema": {"type": "null"}}),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"json_object": True}},
        {"regex": "a"},
    ),
    (
        {"guided_json": PERSON, "guided_whitespace_pattern": " ?"}
        | {"structured_outputs": {"json": PERSON, "whitespace_pattern": " ?"}},
        {"guided_whitespace_pattern": " "},
    ),
]


@pytest.mark.parametrize(("twice", "other"), TWICE, ids=lambda value: json.dumps(value)[:60])
async def test_one_form_in_two_words_is_one(
    http: httpx.AsyncClient, backend: ScriptedBackend, twice: dict[str, Any], other: dict[str, Any]
) -> None:
    """Grammars as the client of guidance writes them."""
    reply = await http.post(CHAT, json=chat(**twice))
    assert reply.status_code == 200, reply.text
    assert backend.asked[0].grammar is not None
    check(await http.post(CHAT, json=chat(**{**twice, **other})), 400, next(iter(other)))


RECURSIVE: Final = {
    "$defs": {"n": {"properties": {"c": {"$ref": "#/$defs/n"}}, "required": ["c"]}},
    "$ref": "#/$defs/n",
}
"""A schema that describes properties without a type is one of objects."""


async def test_a_schema_that_no_finite_answer_fits_is_refused(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    backend.known_limits = Limits(4096, prompt_tokens=4096, sequence_tokens=4096)
    for given in (RECURSIVE, {"type": "array", "items": {"$ref": "#"}, "minItems": 1}):
        reply = await http.post(CHAT, json=chat(guided_json=given))
        assert "no finite answer fits it" in check(reply, 400, "guided_json")
    tool = {"type": "function", "function": {"name": "f", "parameters": RECURSIVE}}
    reply = await http.post(CHAT, json=chat(tools=[tool], tool_choice="required"))
    assert "no finite answer fits it" in check(reply, 400, "tools[0].function.parameters")


def nested(levels: int) -> dict[str, Any]:
    given: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": 9}
    for _ in range(levels):
        given = {"type": "object", "properties": {"a": given}, "required": ["a"]}
    return given


async def test_a_schema_of_a_hundred_levels_is_applied(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    for fields in (
        {"response_format": named(nested(100))},
        {"guided_json": json.dumps(nested(100))},
        {"structured_outputs": {"json": nested(100), "disable_any_whitespace": True}},
    ):
        reply = await http.post(CHAT, json=chat(**fields))
        assert reply.status_code == 200, reply.text
    grammar = backend.asked[-1].grammar
    assert grammar is not None
    asked = request()
    value = json.loads(text_of(drawn(fold_of(grammar), asked, 1, most=2000)))
    for _ in range(100):
        value = value["a"]
    assert value in range(1, 10)


async def test_what_is_deeper_is_refused_by_the_bound(http: httpx.AsyncClient) -> None:
    body = json.dumps(chat(guided_json="?")).replace('"?"', '{"items":' * 5000 + "{}" + "}" * 5000)
    reply = await http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert "240 levels" in check(reply, 400, None, "nested_too_deeply")
    reply = await http.post(CHAT, json=chat(guided_json=json.dumps(nested(124))))
    assert "240 levels" in check(reply, 400, "guided_json")
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"items": deep}
    reply = await http.post(CHAT, json=chat(guided_json=deep))
    assert "more than 128 schemas" in check(reply, 400, "guided_json")


@pytest.mark.parametrize("inner", ["NaN", "1e999", '"\\ud800"', "{", "[1,]"])
async def test_what_is_no_json_is_none_however_deep(http: httpx.AsyncClient, inner: str) -> None:
    body = json.dumps(chat(guided_json="?")).replace('"?"', '{"items":' * 210 + inner + "}" * 210)
    reply = await http.post(CHAT, content=body, headers={"content-type": "application/json"})
    check(reply, 400, None, "invalid_json")
