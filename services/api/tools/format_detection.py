"""Formats of a model's reasoning and tool calls, and the parser of an answer in them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from baton.api.generation.choice_assembler import AnswerParsing
from baton.api.requests.meaning import Meaning
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
    random_call_id,
)
from baton.api.tools.parsing.constrained_parser import CallLayout
from baton.api.tools.parsing.output_markup import OutputMarkup
from baton.api.tools.parsing.output_parser import OutputParser
from baton.api.tools.parsing.output_parts import AnswerParser
from baton.api.tools.parsing.template_parser import (
    ResponseTemplate,
    TemplateParser,
    read_template,
    template_file,
)
from baton.api.tools.reasoning_state import ReasoningState, reasoning_state
from baton.runtime.errors import StartupError

TEMPLATE: Final = "response_template"
PREFIX_TOKENS: Final = 512
"""Last tokens of a prompt, in which a response template may find where the answer begins."""


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """Formats of one model's output."""

    calls: NamedFormat | None = None
    reasoning: NamedFormat | None = None
    describes_tools: bool = True
    """Tools are described in the system message if the chat template has no place for them. If False, a
    request with tools is refused then."""
    template: ResponseTemplate | None = None
    """Response template that parses both, if there is one."""

    @property
    def names(self) -> dict[str, str]:
        return {
            "calls": _name(self.calls) if self.template is None else TEMPLATE,
            "reasoning": _name(self.reasoning),
        }


def _name(named: NamedFormat | None) -> str:
    return NONE if named is None else named.names[0]


def model_formats(
    tokenizer: Tokenizer,
    model_type: str,
    calls: str = AUTO,
    reasoning: str = AUTO,
    *,
    describes_tools: bool = True,
) -> ModelFormats:
    """Return the formats that the settings name, or else those that the model shows. Raises StartupError.

    A model whose chat template has no place for tools answers in the format of the description, Hermes'.
    `calls`: a format's name, or a file with a response template.
    """
    template = tokenizer.chat.text
    if calls not in (AUTO, *format_names(TOOL_CALL_FORMATS)):
        if not Path(calls).is_file():
            known = ", ".join((AUTO, *(each.names[0] for each in TOOL_CALL_FORMATS)))
            raise StartupError(
                f"--tool-call-parser {calls}: there is no such file, and no such name: {known}"
            )
        parts = template_file(Path(calls))
    elif calls == AUTO and (given := tokenizer.response_template) is not None:
        parts = read_template(given, "the tokenizer's response_template")
    else:
        parts = None
    hermes = find_format(HERMES, TOOL_CALL_FORMATS)
    own = detect_format(template, model_type, TOOL_CALL_FORMATS) if tokenizer.chat.knows_tools else None
    return ModelFormats(
        (own or hermes) if calls == AUTO or parts is not None else find_format(calls, TOOL_CALL_FORMATS),
        detect_format(template, model_type, REASONING_FORMATS)
        if reasoning == AUTO
        else find_format(reasoning, REASONING_FORMATS),
        describes_tools,
        parts,
    )


def answer_parser(
    meaning: Meaning,
    prompt: Sequence[int],
    formats: ModelFormats,
    tokenizer: Tokenizer,
    calls: NamedFormat | None,
    layout: CallLayout | None,
    *,
    constrained: bool = False,
) -> AnswerParsing | None:
    """Return the parser of a chat's answer, or None if all of the answer is content.

    `calls`: format of the calls. `layout`: layout of the calls, if a grammar constrains them.
    `constrained`: a grammar constrains the content, too.
    """
    tools = meaning.tools.offered
    own = None if formats.reasoning is None else formats.reasoning.markup
    call_markup = calls.markup if tools and calls is not None else None
    state = reasoning_state(meaning, prompt, own, tokenizer)
    reasoning = None if state is ReasoningState.NONE else own
    by_template = formats.template is not None and calls is formats.calls and meaning.reasoning.is_parsed
    if call_markup is None and reasoning is None and not by_template:
        return None
    may_reason = reasoning is not None and not (constrained and state is ReasoningState.CLOSED)
    markup = (call_markup or OutputMarkup()) | ((reasoning if may_reason else None) or OutputMarkup())
    parser: AnswerParser = OutputParser(
        markup,
        meaning.tools.schemas,
        thinking=state is ReasoningState.WITHIN,
        layout=layout,
        streams_calls=not meaning.has_stop_ids,
        constrained=constrained,
    )
    marks = _special_tokens(tokenizer, markup)
    if by_template and formats.template is not None:
        end = tokenizer.decode(prompt[-PREFIX_TOKENS:], skip_special_tokens=False)
        parser = TemplateParser(formats.template, end, [tool.template for tool in tools])
        marks = dict(tokenizer.special)
    return AnswerParsing(
        parser,
        marks if meaning.skips_special else {},
        random_call_id if calls is None else calls.new_call_id,
        calls_max=None if meaning.tools.are_parallel else 1,
        ends_by_calls=meaning.tools.forced_name is None,
        shows_reasoning=meaning.reasoning.is_shown,
        streams_reasoning=meaning.reasoning.is_streamed,
        counts_reasoning=reasoning is not None or by_template,
    )


def _special_tokens(tokenizer: Tokenizer, markup: OutputMarkup) -> dict[int, str]:
    """Return the special tokens that the marks consist of, by their ids."""
    marks = markup.marks
    return {
        id_: text for id_, text in tokenizer.special.items() if text and any(text in mark for mark in marks)
    }
