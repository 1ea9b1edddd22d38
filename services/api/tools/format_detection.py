"""How are an answer's thoughts and calls told from what it says, for this model and this request?"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from baton.api.generation.choice_assembler import Heard
from baton.api.requests.chat_messages import offered, plain_tools, schemas_of
from baton.api.requests.schemas import ChatRequest, ForcedTool
from baton.api.text.tokenizer import Tokenizer
from baton.api.tools.formats.output_formats import (
    AUTO,
    HERMES,
    NONE,
    REASONING_FORMATS,
    TOOL_CALL_FORMATS,
    NamedFormat,
    detect_format,
    find_format,
    format_names,
)
from baton.api.tools.parsing.constrained_parser import CallLayout
from baton.api.tools.parsing.output_markup import OutputMarkup, RegionKind
from baton.api.tools.parsing.output_parser import OutputParser
from baton.api.tools.parsing.output_parts import AnswerParser
from baton.api.tools.parsing.template_parser import (
    ResponseTemplate,
    TemplateParser,
    read_template,
    template_file,
)
from baton.runtime.errors import StartupError

TEMPLATE: Final = "response_template"
PREFIX_TOKENS: Final = 512
"""Of a prompt, in which a response template may find where the answer begins."""
TAIL_TOKENS: Final = 16
"""Of a prompt, in which its template may have opened a thought."""
ID_BYTES: Final = 12
MISTRAL_ID_CHARS: Final = 9


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """Of one model."""

    calls: NamedFormat | None = None
    thoughts: NamedFormat | None = None
    tells_tools: bool = True
    """Tools are told in the system message where the chat template knows none; else they are refused."""
    template: ResponseTemplate | None = None
    """By which both are told apart, where there is one."""

    @property
    def names(self) -> dict[str, str]:
        return {
            "calls": _name(self.calls) if self.template is None else TEMPLATE,
            "thoughts": _name(self.thoughts),
        }


def _name(form: NamedFormat | None) -> str:
    return NONE if form is None else form.names[0]


def model_formats(
    tokenizer: Tokenizer,
    model_type: str,
    calls: str = AUTO,
    thoughts: str = AUTO,
    *,
    tells_tools: bool = True,
) -> ModelFormats:
    """By the settings, or as the model has them. What is told in Hermes' words is answered so. `calls`: a
    name, or a file with a response template. Raises StartupError."""
    template = tokenizer.chat.text
    if calls not in (AUTO, *format_names(TOOL_CALL_FORMATS)):
        if not Path(calls).is_file():
            known = ", ".join((AUTO, *(form.names[0] for form in TOOL_CALL_FORMATS)))
            raise StartupError(
                f"--tool-call-parser {calls}: there is no such file, and no such name: {known}"
            )
        parts = template_file(Path(calls))
    elif calls == AUTO and (told := tokenizer.response_template) is not None:
        parts = read_template(told, "the tokenizer's response_template")
    else:
        parts = None
    hermes = find_format(HERMES, TOOL_CALL_FORMATS)
    own = detect_format(template, model_type, TOOL_CALL_FORMATS) if tokenizer.chat.knows_tools else None
    return ModelFormats(
        (own or hermes) if calls == AUTO or parts is not None else find_format(calls, TOOL_CALL_FORMATS),
        detect_format(template, model_type, REASONING_FORMATS)
        if thoughts == AUTO
        else find_format(thoughts, REASONING_FORMATS),
        tells_tools,
        parts,
    )


class ReasoningState(Enum):
    """Where a prompt leaves the model's thoughts."""

    NONE = "none"
    """Thoughts are not told from answers."""
    WITHIN = "within"
    CLOSED = "closed"
    """It has none before this answer, or its prompt has them."""
    FREE = "free"
    """It may begin with some."""


def answer_parser(
    body: ChatRequest,
    prompt: Sequence[int],
    forms: ModelFormats,
    tokenizer: Tokenizer,
    calls: NamedFormat | None,
    held: CallLayout | None,
    *,
    constrained: bool = False,
) -> Heard | None:
    """`calls`: the form in which they come. `held`: as what a grammar has them written. `constrained`: a
    grammar has the content, too. None: there is nothing to tell apart."""
    tools = offered(body)
    callable_ = calls.markup if tools and calls is not None else None
    where = reasoning_state(body, prompt, forms, tokenizer)
    thoughts = (
        forms.thoughts.markup if forms.thoughts is not None and where is not ReasoningState.NONE else None
    )
    by_template = forms.template is not None and calls is forms.calls and body.separate_reasoning
    if callable_ is None and thoughts is None and not by_template:
        return None
    may_think = thoughts is not None and not (constrained and where is ReasoningState.CLOSED)
    markup = (callable_ or OutputMarkup()) | ((thoughts if may_think else None) or OutputMarkup())
    voice: AnswerParser = OutputParser(
        markup,
        schemas_of(tools),
        thinking=where is ReasoningState.WITHIN,
        held=held,
        grows=not body.stop_token_ids,
        constrained=constrained,
    )
    marks = _among(tokenizer, markup)
    if by_template and forms.template is not None:
        end = tokenizer.decode(prompt[-PREFIX_TOKENS:], skip_special_tokens=False)
        voice, marks = TemplateParser(forms.template, end, plain_tools(tools)), dict(tokenizer.special)
    by_name = isinstance(body.tool_choice, ForcedTool)
    return Heard(
        voice,
        marks if body.skip_special_tokens else {},
        _ids_of(calls),
        calls_max=None if body.parallel_tool_calls and not by_name else 1,
        calls_end=not by_name,
        thoughts_shown=body.include_reasoning and not body.reasoning.exclude,
        thoughts_whole=not body.stream_reasoning,
        thoughts_told=thoughts is not None or by_template,
    )


def reasoning_state(
    body: ChatRequest, prompt: Sequence[int], forms: ModelFormats, tokenizer: Tokenizer
) -> ReasoningState:
    if forms.thoughts is None or not body.separate_reasoning:
        return ReasoningState.NONE
    end, continued = _end(body, prompt, tokenizer), body.continue_final_message
    for region in forms.thoughts.markup.regions:
        opened = max(map(end.rfind, region.opens), default=-1)
        closed = max(map(end.rfind, region.closes), default=-1)
        if region.kind is not RegionKind.REASONING:
            continue
        if opened > closed and (continued or end.endswith(region.opens)):
            return ReasoningState.WITHIN
        if end.endswith(region.closes):
            return ReasoningState.CLOSED
    return ReasoningState.FREE


def _among(tokenizer: Tokenizer, markup: OutputMarkup) -> dict[int, str]:
    """The special tokens that a dialect's marks are made of."""
    marks = markup.marks
    return {
        id_: text for id_, text in tokenizer.special.items() if text and any(text in mark for mark in marks)
    }


def _end(body: ChatRequest, prompt: Sequence[int], tokenizer: Tokenizer) -> str:
    """Of the prompt, as far as a thought may be open there."""
    if not body.continue_final_message:
        return tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False).rstrip()
    said = body.messages[-1].content or ""
    return said if isinstance(said, str) else "".join(said)


def _ids_of(form: NamedFormat | None) -> Callable[[str, int], str]:
    match None if form is None else form.names[0]:
        case "mistral":
            return lambda _, __: secrets.token_hex(MISTRAL_ID_CHARS)[:MISTRAL_ID_CHARS]
        case "kimi":
            return lambda name, place: f"functions.{name}:{place}"
        case _:
            return lambda _, __: f"call_{secrets.token_hex(ID_BYTES)}"
