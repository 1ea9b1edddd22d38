"""Detection of a model's reasoning and tool-call formats, and the parser of an answer in these formats."""

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
"""Number of tokens at a prompt's end that are given to a response template. The template may find the start
of the answer in them."""


@dataclass(frozen=True, slots=True)
class ModelFormats:
    """Formats in which one model writes its tool calls and its reasoning."""

    calls: NamedFormat | None = None
    reasoning: NamedFormat | None = None
    describes_tools: bool = True
    """Whether tools are described in the system message if the chat template does not support tools. If
    False, a request with tools is then refused."""
    template: ResponseTemplate | None = None
    """Response template (a format of transformers) that parses both tool calls and reasoning, or None."""

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
    """Return the output formats that the settings name, or else those of the chat template or the model type.

    If the chat template does not support tools, the tools are described in Hermes' format, and calls have
    this format. `calls`: `auto`, the name of a tool-call format, or the path of a response template.
    `reasoning`: `auto` or the name of a reasoning format. Raises StartupError for an unknown name or a bad
    file in `calls`.
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

    `calls`: format of the tool calls. `layout`: layout of the tool calls if a grammar constrains them.
    `constrained`: whether a grammar constrains the content, too.
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
    """Return the special tokens that occur in a format's marks (such as `<tool_call>`), by token id."""
    marks = markup.marks
    return {
        id_: text for id_, text in tokenizer.special.items() if text and any(text in mark for mark in marks)
    }
