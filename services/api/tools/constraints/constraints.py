"""Constraints that requests put on answers, compiled as grammars before a request is placed on workers.

A constraint is a JSON schema, a regular expression, a grammar, or a list of texts, tokens or words. Fields of
OpenAI, vLLM and SGLang express the same in several ways, and a request may give one constraint. It is
compiled as the workers will compile it. So a constraint that no answer can follow is refused with status 400.
Another process compiles it (`baton.grammars.grammar_check`), so that no request can end this one.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from starlette.requests import Request

from baton.api.errors import invalid
from baton.api.generation.choice_assembler import AnswerParsing
from baton.api.http.authentication import caller_in
from baton.api.http.disconnect import UntilDisconnect
from baton.api.http.metrics import GrammarOutcome, HttpMetrics
from baton.api.model_interface import Model
from baton.api.requests.meaning import Meaning
from baton.api.requests.schemas import ChatRequest, GenerationRequest, ResponseFormat, StructuredOutputs
from baton.api.requests.token_ids import check_ids
from baton.api.text.tokenizer_pool import FairThreadPool
from baton.api.tools.constraints.schema_text import schema_text
from baton.api.tools.constraints.tool_call_grammar import (
    answer_grammar,
    call_layout,
    constrained_format,
    constrained_tools,
    literal_regex,
)
from baton.api.tools.format_detection import ModelFormats, answer_parser
from baton.api.tools.formats.output_formats import NamedFormat
from baton.api.tools.parsing.constrained_parser import CallLayout
from baton.api.tools.reasoning_state import reasoning_state
from baton.grammars.grammar_check import TOO_COMPLEX, TOO_LONG, CheckGrammar
from baton.rooms.request import GRAMMAR_BYTES_MAX, Grammar, GrammarKind

CACHED_MAX: Final = 256
"""Most constraints whose compiled grammar, or reason of refusal, is cached."""
WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,40}"
"""Regular expression of the whitespace between parts of JSON. It is bounded, because small models may
otherwise never stop, and long enough for indentation."""
BLANKS: Final[Mapping[str, Any]] = {"whitespace_pattern": WHITESPACE}
ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Constraint:
    """Constraint that a request puts on its answer."""

    param: str
    """Path of the request field that gives the constraint."""
    grammar: Grammar
    any_bnf: bool = False
    """Whether a grammar given by the client may also be written in GBNF, which other servers call EBNF."""
    of_all: bool = False
    """Whether the constraint applies to the whole output, including reasoning and tool calls. Otherwise it
    applies to the content only."""


class ConstraintCompiler:
    """Compiler of the constraints that requests to one application give. Used from one event loop."""

    def __init__(
        self, model: Model, formats: ModelFormats, check: CheckGrammar, metrics: HttpMetrics
    ) -> None:
        """Create a compiler with an empty cache.

        `check`: function that compiles a grammar in another process.
        """
        self._model = model
        self._formats = formats
        self._metrics = metrics
        self._check = check
        self._turns = FairThreadPool("grammar", "compiled")
        self._results: OrderedDict[tuple[Grammar, bool], Grammar | str] = OrderedDict()
        """Compiler results by grammar and `any_bnf`: the grammar for workers, or the text of the reason why
        it is refused."""

    async def grammar(self, request: Request, body: GenerationRequest) -> Grammar | None:
        """Return the grammar that the answer has to follow, or None if nothing constrains it.

        Raises ApiError, which names the field and the schema keyword at fault. Raises Overloaded and
        ClientGone.
        """
        constraint = self._constraint(body)
        return None if constraint is None else await self._compile(request, constraint)

    async def constrain_chat(
        self, request: Request, body: ChatRequest, meaning: Meaning, prompt: Sequence[int]
    ) -> tuple[Grammar | None, Callable[[], AnswerParsing | None]]:
        """Return the grammar of a chat's answer, or None, and a function that creates a choice's parser.

        The grammar lets the answer begin with reasoning, unless the constraint is for all of the answer.
        Raises ApiError, Overloaded and ClientGone as `grammar` does.
        """
        constraint, tools = self._constraint(body), meaning.tools
        if constraint is None and not tools.offered:
            return None, self._parsing(meaning, prompt, self._formats.calls, None)
        if constraint is not None and constraint.of_all:
            if tools.are_constrained(with_format=False):
                why = f"'{constraint.param}' does not go with calls that are held to their tools."
                raise invalid(constraint.param, why)
            grammar = await self._compile(request, constraint)
            return grammar, self._parsing(meaning, prompt, self._formats.calls, None)
        if constraint is not None and tools.is_forced:
            why = f"Give '{constraint.param}' or force a call: an answer is held to one form."
            raise invalid(constraint.param, why)
        content = None if constraint is None else await self._compile(request, constraint)
        param = "tools" if constraint is None else constraint.param
        whole, calls, layout = await self._with_calls(request, meaning, prompt, content, param)
        return whole, self._parsing(meaning, prompt, calls, layout, constrained=content is not None)

    async def _with_calls(
        self, request: Request, meaning: Meaning, prompt: Sequence[int], content: Grammar | None, param: str
    ) -> tuple[Grammar | None, NamedFormat | None, CallLayout | None]:
        """Return a whole answer's grammar, the format of its tool calls, and the layout of constrained calls.

        `content`: grammar of the content, or None. `param`: field of the request that an error names.
        """
        formats, tokenizer, tools = self._formats, self._model.tokenizer, meaning.tools
        has_constrained_calls = tools.are_constrained(with_format=content is not None)
        template = tokenizer.chat.text
        own = constrained_format(tools, formats.calls, template, constrain_text=content is not None)
        constrained = [*constrained_tools(tools, BLANKS, own)] if has_constrained_calls else []
        for tool in constrained:
            schema = Grammar(GrammarKind.JSON_SCHEMA, tool.schema)
            await self._compile(request, Constraint(tool.param, schema))
        reasoning = formats.reasoning if meaning.reasoning.is_parsed else None
        markup = None if reasoning is None else reasoning.markup
        state = reasoning_state(meaning, prompt, markup, tokenizer)
        whole = answer_grammar(meaning, state, reasoning, formats.calls, tokenizer, constrained, content)
        calls = own if has_constrained_calls else formats.calls
        if whole is None or whole == content:
            return content, calls, None
        if len(whole.text.encode()) > GRAMMAR_BYTES_MAX:
            raise invalid(param, f"'{param}' makes a grammar of more than {GRAMMAR_BYTES_MAX} bytes.")
        layout = call_layout(calls) if has_constrained_calls and calls is not None else None
        if layout is not None and not layout.mark and content is not None:
            layout = None  # JSON content may begin as a call does
        return await self._compile(request, Constraint(param, whole)), calls, layout

    def _parsing(
        self,
        meaning: Meaning,
        prompt: Sequence[int],
        calls: NamedFormat | None,
        layout: CallLayout | None,
        *,
        constrained: bool = False,
    ) -> Callable[[], AnswerParsing | None]:
        """Return a function that creates the parser of one choice.

        `constrained`: whether a grammar constrains the content.
        """
        formats, has_calls = self._formats, bool(meaning.tools.offered) and calls is not None
        if formats.template is None and formats.reasoning is None and not has_calls:
            return lambda: None
        return partial(
            answer_parser,
            meaning,
            prompt,
            formats,
            self._model.tokenizer,
            calls,
            layout,
            constrained=constrained,
        )

    def _constraint(self, body: GenerationRequest) -> Constraint | None:
        """Return the constraint that a request gives, or None. Raises ApiError if there are two."""
        constraints = [*filter(None, (constraint_of(body),)), *_limits(body, self._model)]
        if len(constraints) > 1:
            first, second = constraints[0].param, constraints[1].param
            raise invalid(second, f"Give '{first}' or '{second}', not both.")
        return constraints[0] if constraints else None

    async def _compile(self, request: Request, constraint: Constraint) -> Grammar:
        """Return the compiled grammar of a constraint, from the cache or from the compiler process.

        Raises ApiError if no answer can follow the constraint. Raises Overloaded and ClientGone.
        """
        source = constraint.grammar, constraint.any_bnf
        found = self._results.get(source)
        if found is None:
            size = len(constraint.grammar.text)
            with UntilDisconnect(request.scope, request.receive):
                turn = self._turns.run(caller_in(request.scope), size, lambda: self._check(*source))
                found = self._results[source] = await turn
            self._metrics.count_grammar(_outcome(found))
            if len(self._results) > CACHED_MAX:
                self._results.popitem(last=False)
        if isinstance(found, str):
            why = f"no answer can be held to it: {found}."
            raise invalid(constraint.param, f"Invalid value for '{constraint.param}': {why}")
        return found


def _outcome(found: Grammar | str) -> GrammarOutcome:
    if isinstance(found, Grammar):
        return GrammarOutcome.COMPILED
    return GrammarOutcome.NOT_SURVIVED if found in (TOO_LONG, TOO_COMPLEX) else GrammarOutcome.REFUSED


def _limits(body: GenerationRequest, model: Model) -> Iterator[Constraint]:
    """Yield the constraints of the request fields `allowed_token_ids` and `bad_words`. They apply to the
    whole answer, including reasoning and tool calls."""
    if ids := body.allowed_token_ids:
        check_ids(ids, "allowed_token_ids", model.vocabulary)
        text = f"start: {_tokens(ids)}*"
        yield Constraint("allowed_token_ids", Grammar(GrammarKind.LARK, text), of_all=True)
    if body.bad_words:
        bad = "|".join(map(literal_regex, dict.fromkeys(body.bad_words)))
        added = sorted(id_ for id_ in model.tokenizer.added.values() if id_ < model.vocabulary)
        others = f"({_tokens(added)} TEXT?)*" if added else ""
        rule = f"TEXT: /(?s:.+)/ & ~/(?s:.*)({bad})(?s:.*)/"
        grammar = Grammar(GrammarKind.LARK, f"start: TEXT? {others}\n{rule}")
        yield Constraint("bad_words", grammar, of_all=True)


def _tokens(ids: Sequence[int]) -> str:
    """Return a grammar expression that matches any one of the tokens with these ids. It is written as ranges
    of ids."""
    ranges: list[list[int]] = []
    for id_ in sorted(set(ids)):
        if ranges and ranges[-1][1] == id_ - 1:
            ranges[-1][1] = id_
        else:
            ranges.append([id_, id_])
    return "<[" + ",".join(f"{first}-{last}" for first, last in ranges) + "]>"


def constraint_of(body: GenerationRequest) -> Constraint | None:
    """Return the constraint that a request puts on its content, or None.

    Raises ApiError for two different constraints, for an empty one, and for one that is too large.
    """
    blanks = _blanks(body)
    given = [*_content_constraints(body, blanks)]
    for other in given[1:]:
        if replace(other, param=given[0].param) != given[0]:
            first, second = given[0].param, other.param
            raise invalid(second, f"Give '{first}' or '{second}': an answer is held to one form.")
    if blanks is not None and not (given and given[0].grammar.kind is GrammarKind.JSON_SCHEMA):
        raise invalid(blanks.param, f"'{blanks.param}' needs a JSON schema beside it.")
    for constraint in given:
        if len(constraint.grammar.text.encode()) > GRAMMAR_BYTES_MAX:
            raise invalid(constraint.param, f"'{constraint.param}' is larger than {GRAMMAR_BYTES_MAX} bytes.")
        return constraint
    return None


@dataclass(frozen=True, slots=True)
class _Blanks:
    """Option of a request for the whitespace between parts of JSON, and the field that sets it."""

    param: str
    options: Mapping[str, Any]


def _blanks(body: GenerationRequest) -> _Blanks | None:
    given: list[_Blanks] = []
    if (outputs := body.structured_outputs) is not None:
        if outputs.whitespace_pattern is not None:
            given.append(_pattern("structured_outputs.whitespace_pattern", outputs.whitespace_pattern))
        if outputs.disable_any_whitespace:
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


def _content_constraints(body: GenerationRequest, blanks: _Blanks | None) -> Iterator[Constraint]:
    """Yield the constraint of each request field that constrains the answer's content. There is at most one
    for each field."""
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


def _of_response_format(given: ResponseFormat, options: Mapping[str, Any]) -> Iterator[Constraint]:
    param = "response_format.json_schema"
    schema_param = "response_format.schema"
    if given.schema_ is not None and given.type == "text":
        raise invalid(schema_param, f"'{schema_param}' comes with the type json_schema or json_object.")
    if (given.type == "json_schema") != (given.json_schema is not None) and given.schema_ is None:
        raise invalid(param, f"'{param}' comes with the type json_schema, and with no other.")
    if given.json_schema is not None:
        yield _json(f"{param}.schema", given.json_schema.schema_, options)
    if given.schema_ is not None:
        yield _json(schema_param, given.schema_, options)
    elif given.type == "json_object":
        yield _json("response_format", ANY_OBJECT, options)


def _of_structured_outputs(given: StructuredOutputs, options: Mapping[str, Any]) -> Iterator[Constraint]:
    param = "structured_outputs"
    constraints = [*_in_structured_outputs(given, param, options)]
    if not constraints:
        raise invalid(param, f"'{param}' has to hold one of json, regex, choice, grammar, json_object.")
    yield from constraints


def _in_structured_outputs(
    given: StructuredOutputs, param: str, options: Mapping[str, Any]
) -> Iterator[Constraint]:
    if given.json_ is not None:
        yield _json(f"{param}.json", given.json_, options)
    if given.json_object:
        yield _json(f"{param}.json_object", ANY_OBJECT, options)
    if given.regex is not None:
        yield Constraint(f"{param}.regex", Grammar(GrammarKind.REGEX, given.regex))
    if given.choice:
        yield _choice(f"{param}.choice", given.choice)
    if given.grammar is not None:
        yield Constraint(f"{param}.grammar", Grammar(GrammarKind.LARK, given.grammar), any_bnf=True)


def _json(param: str, schema: Mapping[str, Any], options: Mapping[str, Any]) -> Constraint:
    return Constraint(param, Grammar(GrammarKind.JSON_SCHEMA, schema_text(param, schema, options)))


def _choice(param: str, choices: Sequence[str]) -> Constraint:
    """Return the constraint that content is one of several texts. Lark writes texts as JSON does."""
    text = "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)
    return Constraint(param, Grammar(GrammarKind.LARK, text))
