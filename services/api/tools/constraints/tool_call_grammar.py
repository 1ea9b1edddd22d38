"""Which grammar holds an answer to calls of tools, and lets thoughts come before what it is held to?

A forced call is a grammar, on any model: in the form in which the model writes calls where that holds JSON,
else in Hermes'. Thoughts are free, and what an answer is held to begins behind them.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from baton.api.errors import invalid
from baton.api.requests.chat_messages import offered
from baton.api.requests.schemas import AllowedTools, ChatRequest, ForcedTool, Tool
from baton.api.text.tokenizer import Tokenizer
from baton.api.tools.constraints.argument_grammar import (
    BRACKET,
    ArgumentFormat,
    InexpressibleArguments,
    argument_format,
    call_rule,
    up_to,
)
from baton.api.tools.constraints.schema_text import schema_text
from baton.api.tools.format_detection import ModelFormats, ReasoningState, reasoning_state
from baton.api.tools.formats.output_formats import HERMES, TOOL_CALL_FORMATS, NamedFormat, find_format
from baton.api.tools.parsing.constrained_parser import CallLayout
from baton.rooms.request import Grammar, GrammarKind

NAME: Final = "\0name"
ARGUMENTS: Final = "\0arguments"
HARMONY: Final = "harmony"
SHAPES: Final[Mapping[str, tuple[str, ...]]] = {
    HERMES: ("<tool_call>", '\n{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}\n", "</tool_call>"),
    "llama3": ('{"name": "', NAME, '", "parameters": ', ARGUMENTS, "}"),
    "mistral": ("[TOOL_CALLS]", NAME, "[ARGS]", ARGUMENTS),
    "deepseek": ("<｜tool▁call▁begin｜>", NAME, "<｜tool▁sep｜>", ARGUMENTS, "<｜tool▁call▁end｜>"),
    "kimi": (
        "<|tool_call_begin|>",
        "functions.",
        NAME,
        ":0",
        "<|tool_call_argument_begin|>",
        ARGUMENTS,
        "<|tool_call_end|>",
    ),
    HARMONY: (
        "<|channel|>",
        "commentary to=functions.",
        NAME,
        " ",
        "<|constrain|>",
        "json",
        "<|message|>",
        ARGUMENTS,
    ),
}
"""Of one call, by the form: marks, texts, the name and the arguments. The first mark tells that it is one."""
CALLS_MAX: Final = 16
"""Of one answer that is held to calls: a small model may go on for ever."""
ANY_OBJECT: Final[Mapping[str, Any]] = {"type": "object"}
NO_ARGUMENTS: Final[Mapping[str, Any]] = {"type": "object", "properties": {}, "additionalProperties": False}
BLANKS: Final = r"BLANKS: /[ \n]{1,4}/"


@dataclass(frozen=True, slots=True)
class ConstrainedTool:
    """One whose arguments an answer is held to."""

    param: str
    name: str
    schema: str
    """JSON."""


def constrained_format(
    body: ChatRequest, forms: ModelFormats, template: str, *, to_a_form: bool
) -> NamedFormat:
    """In which calls are written that an answer is held to: in the model's own where arguments are JSON, and
    where no call need come, since it is told by that; else in Hermes'. `template`: of its chats.
    `to_a_form`: what is no call is held, too."""
    own, hermes = forms.calls, find_format(HERMES, TOOL_CALL_FORMATS)
    assert hermes is not None
    if own is None or own.names[0] in SHAPES:
        return own or hermes
    free = not (to_a_form or is_forced(body)) and argument_format(own.names[0], template) is not None
    return own if free else hermes


def call_layout(form: NamedFormat) -> CallLayout | None:
    """As what a grammar has calls in that form written, where their arguments are JSON."""
    shape = SHAPES.get(form.names[0])
    if shape is None:
        return None
    name, arguments = shape.index(NAME), shape.index(ARGUMENTS)
    heads = [region.head for region in form.markup.regions if region.head and shape[0] in region.opens]
    if heads:  # which names the call
        return CallLayout(mark=heads[0], before="", between="", after="")
    bare = shape[0].startswith("{")
    closed = any(shape[0] in region.opens and region.closes for region in form.markup.regions)
    return CallLayout(
        mark="" if bare else shape[0],
        before="".join(shape[0 if bare else 1 : name]),
        between="".join(shape[name + 1 : arguments]),
        after="" if closed else "".join(shape[arguments + 1 :]),
    )


def is_forced(body: ChatRequest) -> bool:
    choice = body.tool_choice
    mode = choice.mode if isinstance(choice, AllowedTools) else choice
    return isinstance(choice, ForcedTool) or mode == "required"


def is_constrained(body: ChatRequest, *, to_a_form: bool) -> bool:
    """Whether the grammar of the answer says what a call is. `to_a_form`: what is no call is held, too."""
    tools = offered(body)
    return is_forced(body) or (bool(tools) and (to_a_form or any(each.function.strict for each in tools)))


def constrained_tools(
    body: ChatRequest, options: Mapping[str, Any], form: NamedFormat
) -> Iterator[ConstrainedTool]:
    """The tools that may be called. `options`: of each schema. In a form whose arguments are no JSON object
    each is held to its schema, strict or not."""
    loosely = form.names[0] in SHAPES
    allowed = offered(body)
    for place, tool in enumerate(body.tools):
        if isinstance(body.tool_choice, ForcedTool) and tool.function.name != body.tool_choice.name:
            continue
        if tool not in allowed:
            continue
        param = f"tools[{place}].function.parameters"
        text = schema_text(param, _schema(body, tool, loosely=loosely), options)
        yield ConstrainedTool(param, tool.function.name, text)


def _schema(body: ChatRequest, tool: Tool, *, loosely: bool) -> Mapping[str, Any]:
    function = tool.function
    if loosely and not (is_forced(body) or function.strict):
        return ANY_OBJECT
    return NO_ARGUMENTS if not function.parameters else {"type": "object", **function.parameters}


def answer_grammar(
    body: ChatRequest,
    prompt: Sequence[int],
    forms: ModelFormats,
    tokenizer: Tokenizer,
    tools: Sequence[ConstrainedTool],
    answer: Grammar | None,
) -> Grammar | None:
    """What all of an answer is held to: `answer` what is said in it, `tools` its calls, nothing its thoughts.
    Raises ApiError where calls in the model's form cannot be held."""
    term = _terms(tokenizer)
    thoughts = forms.thoughts if body.separate_reasoning else None
    rules: list[str] = []
    before, header = _before(thoughts, reasoning_state(body, prompt, forms, tokenizer), term, rules)
    if answer is not None:
        rules.append(f"answer: {header}{_inner(answer)}")
    if not tools:
        if answer is None or not before + header:
            return answer
        return Grammar(GrammarKind.LARK, "\n".join((f"start: {before}answer", *rules)))
    template = tokenizer.chat.text
    form = constrained_format(body, forms, template, to_a_form=answer is not None)
    argued = argument_format(form.names[0], template)
    shape = SHAPES.get(form.names[0], ())
    mark = shape[0] if argued is None else argued.mark
    framed = form.names[0] == HARMONY  # all of an answer is messages, and a call is the last of them
    several = not framed and body.parallel_tool_calls and not isinstance(body.tool_choice, ForcedTool)
    calls = f'call ("\\n"? call){{0,{CALLS_MAX - 1}}}' if several else "call"
    names = " | ".join(f"call_{place}" for place, _ in enumerate(tools))
    for place, tool in enumerate(tools):
        if argued is not None:
            rules.append(f"call_{place}: {_argued(place, tool, argued, form, term, rules)}")
            continue
        told = {NAME: json.dumps(tool.name), ARGUMENTS: f"arguments_{place}"}
        rules.append(f"call_{place}: " + " ".join(told.get(each) or term(each) for each in shape[1:]))
        rules.append(f"arguments_{place}: %json {tool.schema}")
    first = term(mark)
    rules.append(f"call: {first} ({names})")
    if mark == BRACKET:
        more = f'(", " ({names})){{0,{CALLS_MAX - 1}}} ' if several else ""
        calls = f'call {more}"]"'
    if is_forced(body):
        start = f"{before}({calls})"
    elif answer is not None:
        start = f"{before}(({calls}) | answer)"
    else:
        _check_held(body, forms, form)
        if framed:
            start = _start_with_messages(calls, term, rules)
        else:
            start = _start_with_text(mark, first, calls, names, rules, several=several, before=before)
    return Grammar(GrammarKind.LARK, "\n".join((f"start: {start}", *dict.fromkeys(rules))))


def _argued(
    place: int,
    tool: ConstrainedTool,
    argued: ArgumentFormat,
    form: NamedFormat,
    term: Callable[[str], str],
    rules: list[str],
) -> str:
    """A call behind its mark. Raises ApiError."""
    try:
        return call_rule(place, tool.name, json.loads(tool.schema), argued, term, rules)
    except InexpressibleArguments as error:
        why = f"in the form '{form.names[0]}' arguments stand one by one, and {error}."
        raise invalid(tool.param, f"'{tool.param}': {why}", "unsupported_value") from None


def _start_with_text(
    mark: str, first: str, calls: str, names: str, rules: list[str], *, several: bool, before: str
) -> str:
    """Of an answer that may call tools, and may not."""
    if mark == BRACKET or mark.startswith("{"):  # all of an answer is a call, or it begins otherwise
        rules.append(rf"OTHER: /\s*[^\{mark[0]}\s](?s:.*)/")
        return f"{before}(({calls}) | OTHER?)"
    rules += [f"behind: {names}", *_until(mark, first)]
    return f"(until behind){{0,{CALLS_MAX}}} TEXT?" if several else "(until behind) | TEXT?"


def _start_with_messages(calls: str, term: Callable[[str], str], rules: list[str]) -> str:
    """Of an answer that is messages with heads: thoughts and what is said on the way, then the answer or a
    call."""
    channel, message = term("<|channel|>"), term("<|message|>")
    ended = f'{up_to("<|end|>", "thought", term, rules)} {term("<|start|>")} "assistant"'
    rules += [
        f'early: {channel} ("analysis" | "commentary") {message} {ended}',
        f'final: {channel} "final" {message} TEXT?',
        _until("<|channel|>", channel)[1],
    ]
    return f"early* (({calls}) | final)"


def _check_held(body: ChatRequest, forms: ModelFormats, form: NamedFormat) -> None:
    """Raise ApiError where a call that need not come could not be told when it comes."""
    if forms.calls is None or forms.calls is form:
        return
    place = next(place for place, tool in enumerate(body.tools) if tool.function.strict)
    param, own = f"tools[{place}].function.strict", forms.calls.names[0]
    why = f"'{param}': calls in the form '{own}', which this model writes, are not held to a schema."
    raise invalid(param, why, "unsupported_value")


def _terms(tokenizer: Tokenizer) -> Callable[[str], str]:
    """A mark or a text, as a grammar has it: a token of its own is named by its id."""
    return lambda text: f"<[{tokenizer.added[text]}]>" if text in tokenizer.added else json.dumps(text)


def _until(mark: str, term: str) -> list[str]:
    """`until`: any text up to the mark, and the mark; `TEXT`: one without it."""
    if term.startswith("<["):
        return [f"until: TEXT? {term}", "TEXT: /(?s:.+)/"]
    plain = literal_regex(mark)
    return [
        f"until[suffix={term}]: /(?s:.*)/",
        f"TEXT: /(?s:.+)/ & ~/(?s:.*){plain}(?s:.*)/",
    ]


def literal_regex(text: str) -> str:
    """Of that text alone, to stand between slashes."""
    return "".join(each if each.isalnum() or each in "_<> " else f"\\x{{{ord(each):x}}}" for each in text)


def _before(
    thoughts: NamedFormat | None, where: ReasoningState, term: Callable[[str], str], rules: list[str]
) -> tuple[str, str]:
    """What may stand before an answer or a call, and what has to before an answer alone."""
    if thoughts is None or where is ReasoningState.NONE:
        return "", ""
    if thoughts.names[0] == "harmony":
        channel, message, start = term("<|channel|>"), term("<|message|>"), term("<|start|>")
        body = up_to("<|end|>", "thought", term, rules)
        rules.append(f'thoughts: {channel} "analysis" {message} {body} {start} "assistant"')
        return "thoughts? ", f'{channel} "final" {message} '
    region = thoughts.markup.regions[0]
    opens, closes = region.opens[0], region.closes[0]
    rules.append(BLANKS)
    body = up_to(closes, "thought", term, rules)
    if where is ReasoningState.WITHIN:
        return f"{body} BLANKS? ", ""
    if where is ReasoningState.CLOSED:
        return "", ""
    rules.append(f"thoughts: {term(opens)} {body} BLANKS?")
    return "thoughts? ", ""


def _inner(grammar: Grammar) -> str:
    """A grammar within another."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return f"%json {grammar.text}"
        case GrammarKind.LARK:
            return f"%lark {{\n{grammar.text}\n}}"
        case GrammarKind.REGEX:
            return f"/{_in_slashes(grammar.text)}/"


def _in_slashes(regex: str) -> str:
    """As a regular expression stands between slashes."""
    written, at = [], 0
    while at < len(regex):
        pair = regex[at : at + 2] if regex[at] == "\\" else regex[at]
        written.append({"/": "\\/", "\n": "\\n"}.get(pair, pair))
        at += len(pair)
    return "".join(written)
