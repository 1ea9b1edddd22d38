"""To which form does a request hold its answer, and can an answer be held to it?

OpenAI's, vLLM's and SGLang's fields say the same in several ways, and a request says it once. What it says is
compiled as the workers will compile it, so that what cannot be held to is refused as it comes in: by a
process of its own (`judge.py`), so that no request takes this one down.
"""

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from starlette.requests import Request

from baton.api.errors import invalid
from baton.api.http.authentication import caller_in
from baton.api.http.disconnect import unless_gone
from baton.api.http.metrics import GrammarOutcome, HttpMetrics
from baton.api.requests.request_builder import check_ids
from baton.api.requests.schemas import ChatRequest, GenerationRequest, ResponseFormat, StructuredOutputs
from baton.api.served_model import ServedModel
from baton.api.text.tokenizer_pool import FairThreadPool
from baton.api.tools.constraints.schema_text import schema_text
from baton.api.tools.constraints.tool_call_grammar import (
    answer_grammar,
    call_layout,
    constrained_format,
    constrained_tools,
    is_constrained,
    is_forced,
    literal_regex,
)
from baton.api.tools.formats.output_formats import NamedFormat
from baton.api.tools.parsing.constrained_parser import CallLayout
from baton.grammars.judge import TOO_COMPLEX, TOO_LONG, Ask
from baton.rooms.request import GRAMMAR_BYTES_MAX, Grammar, GrammarKind

KEPT_MAX: Final = 256
"""Structures of which it is remembered whether answers can be held to them."""
WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,40}"
"""Between two parts of a JSON text: room for an indented one. A small model may write blanks for ever."""
BLANKS: Final[Mapping[str, Any]] = {"whitespace_pattern": WHITESPACE}
ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a request asks for."""

    param: str
    """The field that says so."""
    grammar: Grammar
    any_bnf: bool = False
    """Its text may be in GBNF, too, which is what other servers mean by EBNF."""
    of_all: bool = False
    """Thoughts and calls are not exempt."""


class ConstraintCompiler:
    """Of one application. Used from one event loop."""

    def __init__(self, model: ServedModel, ask: Ask, metrics: HttpMetrics) -> None:
        """`ask`: of the process that judges."""
        self._model = model
        self._metrics = metrics
        self._ask = ask
        self._turns = FairThreadPool("grammar", "compiled")
        self._judged: OrderedDict[tuple[Grammar, bool], Grammar | str] = OrderedDict()
        """What workers are told, or why it is refused."""

    async def grammar(self, request: Request, body: GenerationRequest) -> Grammar | None:
        """What the answer to `body` is held to. Raises ApiError that names the field, and in a schema the
        keyword; Overloaded; ClientGone."""
        form = self._of(body)
        return None if form is None else await self._made(request, form)

    async def constrain_chat(
        self, request: Request, body: ChatRequest, prompt: Sequence[int]
    ) -> tuple[Grammar | None, NamedFormat | None, CallLayout | None]:
        """The same of a chat, whose answer may begin with thoughts, and whose calls may be held, too; the
        form in which those come; and as what they are written if they are held."""
        form = self._of(body)
        if form is not None and form.of_all:
            if is_constrained(body, to_a_form=False):
                raise invalid(
                    form.param, f"'{form.param}' does not go with calls that are held to their tools."
                )
            return await self._made(request, form), self._model.forms.calls, None
        if form is not None and is_forced(body):
            raise invalid(form.param, f"Give '{form.param}' or force a call: an answer is held to one form.")
        answer = None if form is None else await self._made(request, form)
        held = is_constrained(body, to_a_form=form is not None)
        template = self._model.tokenizer.chat.text
        own = constrained_format(body, self._model.forms, template, to_a_form=form is not None)
        tools = [*constrained_tools(body, BLANKS, own)] if held else []
        for tool in tools:
            await self._made(request, Constraint(tool.param, Grammar(GrammarKind.JSON_SCHEMA, tool.schema)))
        model = self._model
        whole = answer_grammar(body, prompt, model.forms, model.tokenizer, tools, answer)
        calls = own if held else model.forms.calls
        if whole is None or whole == answer:
            return answer, calls, None
        param = form.param if form is not None else "tools"
        if len(whole.text.encode()) > GRAMMAR_BYTES_MAX:
            raise invalid(param, f"'{param}' makes a grammar of more than {GRAMMAR_BYTES_MAX} bytes.")
        shape = call_layout(calls) if held and calls is not None else None
        if shape is not None and not shape.mark and answer is not None:
            shape = None  # an answer that is JSON may begin as a call does
        return await self._made(request, Constraint(param, whole)), calls, shape

    def _of(self, body: GenerationRequest) -> Constraint | None:
        """Raises ApiError."""
        asked = [*filter(None, (constraint_of(body),)), *_limits(body, self._model)]
        if len(asked) > 1:
            raise invalid(asked[1].param, f"Give '{asked[0].param}' or '{asked[1].param}', not both.")
        return asked[0] if asked else None

    async def _made(self, request: Request, form: Constraint) -> Grammar:
        """As workers are told of it. Raises as above."""
        source = form.grammar, form.any_bnf
        found = self._judged.get(source)
        if found is None:
            size = len(form.grammar.text)
            turn = self._turns.run(caller_in(request.scope), size, lambda: self._ask(*source))
            found = self._judged[source] = await unless_gone(request.scope, request.receive, turn)
            self._metrics.count_grammar(_outcome(found))
            if len(self._judged) > KEPT_MAX:
                self._judged.popitem(last=False)
        if isinstance(found, str):
            why = f"no answer can be held to it: {found}."
            raise invalid(form.param, f"Invalid value for '{form.param}': {why}")
        return found


def _outcome(found: Grammar | str) -> GrammarOutcome:
    if isinstance(found, Grammar):
        return GrammarOutcome.COMPILED
    return GrammarOutcome.NOT_SURVIVED if found in (TOO_LONG, TOO_COMPLEX) else GrammarOutcome.REFUSED


def _limits(body: GenerationRequest, model: ServedModel) -> Iterator[Constraint]:
    """What may not come at all."""
    if ids := body.allowed_token_ids:
        check_ids(ids, "allowed_token_ids", model.vocabulary)
        text = f"start: {_tokens(ids)}*"
        yield Constraint("allowed_token_ids", Grammar(GrammarKind.LARK, text), of_all=True)
    if body.bad_words:
        bad = "|".join(map(literal_regex, dict.fromkeys(body.bad_words)))
        beside = sorted(id_ for id_ in model.tokenizer.added.values() if id_ < model.vocabulary)
        others = f"({_tokens(beside)} TEXT?)*" if beside else ""
        rule = f"TEXT: /(?s:.+)/ & ~/(?s:.*)({bad})(?s:.*)/"
        grammar = Grammar(GrammarKind.LARK, f"start: TEXT? {others}\n{rule}")
        yield Constraint("bad_words", grammar, of_all=True)


def _tokens(ids: Sequence[int]) -> str:
    """Any of them, as a grammar names them: in ranges."""
    ranges: list[list[int]] = []
    for id_ in sorted(set(ids)):
        if ranges and ranges[-1][1] == id_ - 1:
            ranges[-1][1] = id_
        else:
            ranges.append([id_, id_])
    return "<[" + ",".join(f"{first}-{last}" for first, last in ranges) + "]>"


def constraint_of(body: GenerationRequest) -> Constraint | None:
    """Raises ApiError where a request asks for two forms, for none by a field that wants one, or for one that
    is too large."""
    blanks = _blanks(body)
    asked = [*_asked(body, blanks)]
    for other in asked[1:]:
        if replace(other, param=asked[0].param) != asked[0]:
            first, second = asked[0].param, other.param
            raise invalid(second, f"Give '{first}' or '{second}': an answer is held to one form.")
    if blanks is not None and not (asked and asked[0].grammar.kind is GrammarKind.JSON_SCHEMA):
        raise invalid(blanks.param, f"'{blanks.param}' needs a JSON schema beside it.")
    for form in asked:
        if len(form.grammar.text.encode()) > GRAMMAR_BYTES_MAX:
            raise invalid(form.param, f"'{form.param}' is larger than {GRAMMAR_BYTES_MAX} bytes.")
        return form
    return None


@dataclass(frozen=True, slots=True)
class _Blanks:
    """What is said of whitespace."""

    param: str
    options: Mapping[str, Any]


def _blanks(body: GenerationRequest) -> _Blanks | None:
    given = []
    if (asked := body.structured_outputs) is not None:
        if asked.whitespace_pattern is not None:
            given.append(_pattern("structured_outputs.whitespace_pattern", asked.whitespace_pattern))
        if asked.disable_any_whitespace:
            options = {"whitespace_flexible": False}
            given.append(_Blanks("structured_outputs.disable_any_whitespace", options))
    if body.guided_whitespace_pattern is not None:
        given.append(_pattern("guided_whitespace_pattern", body.guided_whitespace_pattern))
    for other in given[1:]:
        if other.options != given[0].options:
            raise invalid(other.param, f"Give '{given[0].param}' or '{other.param}', not both.")
    return given[0] if given else None


def _pattern(param: str, pattern: str) -> _Blanks:
    return _Blanks(param, {"whitespace_pattern": pattern})


def _asked(body: GenerationRequest, blanks: _Blanks | None) -> Iterator[Constraint]:
    """All forms that a request asks for."""
    options = BLANKS if blanks is None else blanks.options
    if body.response_format is not None:
        yield from _of_response_format(body.response_format, options)
    if body.structured_outputs is not None:
        yield from _of_structured_outputs(body.structured_outputs, options)
    for name in ("guided_json", "json_schema"):
        if (schema := getattr(body, name)) is not None:
            yield _json(name, schema, options)
    for name in ("guided_regex", "regex"):
        if (text := getattr(body, name)) is not None:
            yield Constraint(name, Grammar(GrammarKind.REGEX, text))
    for name in ("guided_grammar", "ebnf"):
        if (text := getattr(body, name)) is not None:
            yield Constraint(name, Grammar(GrammarKind.LARK, text), any_bnf=True)
    if body.guided_choice:
        yield _choice("guided_choice", body.guided_choice)


def _of_response_format(asked: ResponseFormat, options: Mapping[str, Any]) -> Iterator[Constraint]:
    param = "response_format.json_schema"
    beside = "response_format.schema"
    if asked.schema_ is not None and asked.type == "text":
        raise invalid(beside, f"'{beside}' comes with the type json_schema or json_object.")
    if (asked.type == "json_schema") != (asked.json_schema is not None) and asked.schema_ is None:
        raise invalid(param, f"'{param}' comes with the type json_schema, and with no other.")
    if asked.json_schema is not None:
        yield _json(f"{param}.schema", asked.json_schema.schema_, options)
    if asked.schema_ is not None:
        yield _json(beside, asked.schema_, options)
    elif asked.type == "json_object":
        yield _json("response_format", ANY_OBJECT, options)


def _of_structured_outputs(asked: StructuredOutputs, options: Mapping[str, Any]) -> Iterator[Constraint]:
    param = "structured_outputs"
    forms = [*_in_structured_outputs(asked, param, options)]
    if not forms:
        raise invalid(param, f"'{param}' has to hold one of json, regex, choice, grammar, json_object.")
    yield from forms


def _in_structured_outputs(
    asked: StructuredOutputs, param: str, options: Mapping[str, Any]
) -> Iterator[Constraint]:
    if asked.json_ is not None:
        yield _json(f"{param}.json", asked.json_, options)
    if asked.json_object:
        yield _json(f"{param}.json_object", ANY_OBJECT, options)
    if asked.regex is not None:
        yield Constraint(f"{param}.regex", Grammar(GrammarKind.REGEX, asked.regex))
    if asked.choice:
        yield _choice(f"{param}.choice", asked.choice)
    if asked.grammar is not None:
        yield Constraint(f"{param}.grammar", Grammar(GrammarKind.LARK, asked.grammar), any_bnf=True)


def _json(param: str, schema: Mapping[str, Any], options: Mapping[str, Any]) -> Constraint:
    return Constraint(param, Grammar(GrammarKind.JSON_SCHEMA, schema_text(param, schema, options)))


def _choice(param: str, choices: Sequence[str]) -> Constraint:
    """Lark's texts are written as JSON's are."""
    text = "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)
    return Constraint(param, Grammar(GrammarKind.LARK, text))
