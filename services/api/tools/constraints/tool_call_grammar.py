"""Grammars that constrain tool calls, and leave the reasoning before them free.

Any model can be forced to call a tool. The call is written in the model's own format if its arguments are
JSON, and in Hermes' format otherwise. Reasoning is not constrained. The constrained part begins after it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from baton.api.errors import invalid
from baton.api.requests.meaning import Meaning, OfferedTool, ToolOptions
from baton.api.text.tokenizer import Tokenizer
from baton.api.tools.constraints.argument_grammar import InexpressibleArguments, call_rule, text_up_to
from baton.api.tools.constraints.schema_text import schema_text
from baton.api.tools.formats.call_layouts import (
    ARGUMENTS,
    NAME,
    ArgumentLayout,
    JsonCallLayout,
    argument_layout,
)
from baton.api.tools.formats.output_formats import HERMES, TOOL_CALL_FORMATS, NamedFormat, find_format
from baton.api.tools.parsing.constrained_parser import CallLayout
from baton.api.tools.reasoning_state import ReasoningState
from baton.rooms.request import Grammar, GrammarKind

FORCED_CALLS_MAX: Final = 16
"""Most tool calls in one answer that a grammar constrains. Small models may otherwise never stop."""
ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}
NO_ARGUMENTS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
BLANKS: Final = r"BLANKS: /[ \n]{1,4}/"

Term = Callable[[str], str]
"""Function that writes a mark (such as `<tool_call>`) or a text for a grammar: as a token id or a string."""


@dataclass(frozen=True, slots=True)
class ConstrainedTool:
    """A tool whose arguments are constrained by its JSON schema."""

    param: str
    """Path of the request field that holds the tool's schema, for errors."""
    name: str
    schema: str
    """JSON schema of the tool's arguments, as JSON text."""


def constrained_format(
    tools: ToolOptions, own: NamedFormat | None, template: str, *, constrain_text: bool
) -> NamedFormat:
    """Return the format in which constrained tool calls are written.

    It is the model's own format if its arguments are JSON, or if a call is optional: then the opening mark of
    the model's format shows whether there is a call. It is Hermes' format otherwise.
    `own`: format of the model's tool calls, or None if it is not known.
    `template`: source of the chat template.
    `constrain_text`: whether text that is not a tool call is constrained, too.
    """
    hermes = find_format(HERMES, TOOL_CALL_FORMATS)
    assert hermes is not None
    if own is None or isinstance(own.layouts, JsonCallLayout):
        return own or hermes
    is_optional = not (constrain_text or tools.is_forced)
    return own if is_optional and argument_layout(own.layouts, template) is not None else hermes


def call_layout(named: NamedFormat) -> CallLayout | None:
    """Return the texts around a tool call's name and JSON arguments, for `ConstrainedCallParser`. Return None
    if the format's arguments are not JSON."""
    layout = named.layouts
    if not isinstance(layout, JsonCallLayout):
        return None
    regions = [region for region in named.markup.regions if layout.mark in region.opens]
    heads = [region.head for region in regions if region.head]
    if heads:  # the head names the call
        return CallLayout(mark=heads[0], before="", between="", after="")
    parts = layout.parts
    name, arguments = parts.index(NAME), parts.index(ARGUMENTS)
    has_end = any(region.closes for region in regions)
    return CallLayout(
        mark="" if layout.is_unmarked else layout.mark,
        before="".join(parts[0 if layout.is_unmarked else 1 : name]),
        between="".join(parts[name + 1 : arguments]),
        after="" if has_end else "".join(parts[arguments + 1 :]),
    )


def constrained_tools(
    tools: ToolOptions, options: Mapping[str, Any], named: NamedFormat
) -> Iterator[ConstrainedTool]:
    """Yield the tools that the answer may call, each with the schema that constrains its arguments.

    If the format has JSON arguments, a tool that is neither forced nor strict may get any object. In other
    formats each tool is constrained by its own schema.
    `options`: options for the grammar library, which are written into each schema.
    """
    only_strict = isinstance(named.layouts, JsonCallLayout)
    for tool in tools.callable:
        param = f"{tool.param}.function.parameters"
        text = schema_text(param, _schema(tools, tool, only_strict=only_strict), options)
        yield ConstrainedTool(param, tool.name, text)


def _schema(tools: ToolOptions, tool: OfferedTool, *, only_strict: bool) -> Mapping[str, Any]:
    if only_strict and not (tools.is_forced or tool.is_strict):
        return ANY_OBJECT
    return NO_ARGUMENTS if not tool.parameters else {"type": "object", **tool.parameters}


def answer_grammar(
    meaning: Meaning,
    state: ReasoningState,
    reasoning: NamedFormat | None,
    own: NamedFormat | None,
    tokenizer: Tokenizer,
    tools: Sequence[ConstrainedTool],
    content: Grammar | None,
) -> Grammar | None:
    """Return the grammar of a whole answer: free reasoning, then calls to `tools` or the grammar `content`.

    `state`: state of the reasoning at the end of the prompt. Returns None if nothing is constrained. Raises
    ApiError if tool calls in the model's format cannot be constrained.
    """
    term = _term(tokenizer)
    rules: list[str] = []
    before, header = _reasoning_rule(reasoning, state, term, rules)
    if content is not None:
        rules.append(f"answer: {header}{_nested(content)}")
    if not tools:
        if content is None or not before + header:
            return content
        return Grammar(GrammarKind.LARK, "\n".join((f"start: {before}answer", *rules)))
    template = tokenizer.chat.text
    named = constrained_format(meaning.tools, own, template, constrain_text=content is not None)
    is_single = not meaning.tools.are_parallel
    calls = _Calls.of(named, template, tools, term, rules, is_single=is_single)
    if meaning.tools.is_forced:
        start = f"{before}({calls.all})"
    elif content is not None:
        start = f"{before}(({calls.all}) | answer)"
    else:
        _check_format(meaning.tools, own, named)
        start = calls.or_messages(rules) if named.in_messages else calls.or_text(before, rules)
    return Grammar(GrammarKind.LARK, "\n".join((f"start: {start}", *dict.fromkeys(rules))))


@dataclass(frozen=True, slots=True)
class _Calls:
    """Grammar expressions and rules of the tool calls in one answer, written for llguidance's Lark."""

    layout: JsonCallLayout | ArgumentLayout
    term: Term
    names: str
    """Grammar expression for one tool call after its opening mark, with an alternative for each tool that may
    be called."""
    all: str
    """Grammar expression for all tool calls of an answer, with their opening and closing marks."""
    is_single: bool
    """Whether the answer has at most one tool call."""

    @classmethod
    def of(
        cls,
        named: NamedFormat,
        template: str,
        tools: Sequence[ConstrainedTool],
        term: Term,
        rules: list[str],
        *,
        is_single: bool,
    ) -> "_Calls":
        """Return the grammar of an answer's tool calls, for a format and the tools that may be called.

        The grammar rules of the calls are added to `rules`. Raises ApiError if a tool's schema cannot be
        expressed.
        """
        layout: JsonCallLayout | ArgumentLayout
        if isinstance(named.layouts, JsonCallLayout):
            layout = named.layouts
        else:
            variant = argument_layout(named.layouts, template)
            assert variant is not None
            layout = variant
        is_single = is_single or named.in_messages
        for index, tool in enumerate(tools):
            if isinstance(layout, JsonCallLayout):
                rules.append(f"call_{index}: {_json_call(index, tool, layout, term)}")
                rules.append(f"arguments_{index}: %json {tool.schema}")
            else:
                rules.append(f"call_{index}: {_argument_call(index, tool, named, layout, term, rules)}")
        names = " | ".join(f"call_{index}" for index, _ in enumerate(tools))
        rules.append(f"call: {term(layout.mark)} ({names})")
        more = "" if is_single else f"{{0,{FORCED_CALLS_MAX - 1}}}"
        all_calls = f'call ("\\n"? call){more}' if more else "call"
        if isinstance(layout, ArgumentLayout) and layout.list_end:
            following = f"({json.dumps(layout.between)} ({names})){more} " if more else ""
            all_calls = f"call {following}{json.dumps(layout.list_end)}"
        return cls(layout, term, names, all_calls, is_single)

    def or_text(self, before: str, rules: list[str]) -> str:
        """Return the grammar expression for an answer of text that may contain tool calls.

        `before`: expression for the reasoning before the answer.
        """
        mark = self.layout.mark
        if self.layout.is_unmarked:  # an answer that begins with it is a call as a whole
            rules.append(rf"OTHER: /\s*[^\{mark[0]}\s](?s:.*)/")
            return f"{before}(({self.all}) | OTHER?)"
        rules += [f"behind: {self.names}", *_text_rules(mark, self.term(mark))]
        if self.is_single:
            return "(until behind) | TEXT?"
        return f"(until behind){{0,{FORCED_CALLS_MAX}}} TEXT?"

    def or_messages(self, rules: list[str]) -> str:
        """Return the grammar expression for gpt-oss' messages: reasoning, then content or a tool call."""
        channel, message = self.term("<|channel|>"), self.term("<|message|>")
        body = text_up_to("<|end|>", "thought", self.term, rules)
        ended = f'{body} {self.term("<|start|>")} "assistant"'
        rules += [
            f'early: {channel} ("analysis" | "commentary") {message} {ended}',
            f'final: {channel} "final" {message} TEXT?',
            _text_rules("<|channel|>", channel)[1],
        ]
        return f"early* (({self.all}) | final)"


def _json_call(index: int, tool: ConstrainedTool, layout: JsonCallLayout, term: Term) -> str:
    """Return the grammar rule of a tool call with JSON arguments, without its opening mark."""
    own = {NAME: json.dumps(tool.name), ARGUMENTS: f"arguments_{index}"}
    return " ".join(own.get(part) or term(part) for part in layout.parts[1:])


def _argument_call(
    index: int,
    tool: ConstrainedTool,
    named: NamedFormat,
    layout: ArgumentLayout,
    term: Term,
    rules: list[str],
) -> str:
    """Return the grammar rule of a tool call with arguments written one by one, without its opening mark.

    Adds the rules of its arguments to `rules`. Raises ApiError if the tool's schema cannot be expressed.
    """
    try:
        return call_rule(index, tool.name, json.loads(tool.schema), layout, term, rules)
    except InexpressibleArguments as error:
        why = f"in the form '{named.names[0]}' arguments stand one by one, and {error}."
        raise invalid(tool.param, f"'{tool.param}': {why}", "unsupported_value") from None


def _check_format(tools: ToolOptions, own: NamedFormat | None, named: NamedFormat) -> None:
    """Raise ApiError for strict tools on a model whose own tool-call format cannot be constrained. `own`: the
    model's format. `named`: format in which constrained calls would be written."""
    if own is None or own is named:
        return
    param = next(f"{tool.param}.function.strict" for tool in tools.offered if tool.is_strict)
    why = f"'{param}': calls in the form '{own.names[0]}', which this model writes, are not held to a schema."
    raise invalid(param, why, "unsupported_value")


def _term(tokenizer: Tokenizer) -> Term:
    """Return the function that writes a mark or a text for a grammar: a special token of the tokenizer as its
    id, anything else as a quoted string."""
    return lambda text: f"<[{tokenizer.added[text]}]>" if text in tokenizer.added else json.dumps(text)


def _text_rules(mark: str, term: str) -> list[str]:
    """Return two grammar rules: `until` is any text up to the mark, and `TEXT` is a text without the mark.

    The mark opens a tool call, such as `<tool_call>`.
    """
    if term.startswith("<["):
        return [f"until: TEXT? {term}", "TEXT: /(?s:.+)/"]
    plain = literal_regex(mark)
    return [
        f"until[suffix={term}]: /(?s:.*)/",
        f"TEXT: /(?s:.+)/ & ~/(?s:.*){plain}(?s:.*)/",
    ]


def literal_regex(text: str) -> str:
    """Return a regular expression that matches exactly this text, for use between slashes."""
    return "".join(each if each.isalnum() or each in "_<> " else f"\\x{{{ord(each):x}}}" for each in text)


def _reasoning_rule(
    reasoning: NamedFormat | None, state: ReasoningState, term: Term, rules: list[str]
) -> tuple[str, str]:
    """Return two grammar expressions: the reasoning before an answer, and the message header that content
    needs in gpt-oss' format.

    Either one may be empty. The rules of the reasoning are added to `rules`.
    """
    if reasoning is None or state is ReasoningState.NONE:
        return "", ""
    if reasoning.in_messages:
        channel, message, start = term("<|channel|>"), term("<|message|>"), term("<|start|>")
        body = text_up_to("<|end|>", "thought", term, rules)
        rules.append(f'thoughts: {channel} "analysis" {message} {body} {start} "assistant"')
        return "thoughts? ", f'{channel} "final" {message} '
    region = reasoning.markup.regions[0]
    opens, closes = region.opens[0], region.closes[0]
    rules.append(BLANKS)
    body = text_up_to(closes, "thought", term, rules)
    if state is ReasoningState.WITHIN:
        return f"{body} BLANKS? ", ""
    if state is ReasoningState.CLOSED:
        return "", ""
    rules.append(f"thoughts: {term(opens)} {body} BLANKS?")
    return "thoughts? ", ""


def _nested(grammar: Grammar) -> str:
    """Return a grammar as an expression within a Lark grammar."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return f"%json {grammar.text}"
        case GrammarKind.LARK:
            return f"%lark {{\n{grammar.text}\n}}"
        case GrammarKind.REGEX:
            return f"/{_in_slashes(grammar.text)}/"


def _in_slashes(regex: str) -> str:
    """Return a regular expression escaped so that it can be written as `/regex/` in a Lark grammar."""
    written, at = [], 0
    while at < len(regex):
        pair = regex[at : at + 2] if regex[at] == "\\" else regex[at]
        written.append({"/": "\\/", "\n": "\\n"}.get(pair, pair))
        at += len(pair)
    return "".join(written)
