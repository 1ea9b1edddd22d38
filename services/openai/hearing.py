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
from baton.openai.dialects import (
    AUTO,
    CALL_FORMS,
    HERMES,
    NONE,
    THOUGHT_FORMS,
    Form,
    form_of,
    named,
    names_of,
)
from baton.openai.held_reading import CallShape
from baton.openai.output_parts import Voice
from baton.openai.output_regions import Dialect, RegionKind
from baton.openai.response_template import ResponseTemplate, TemplateVoice, read_template, template_file
from baton.openai.speech import Speech
from baton.runtime.errors import StartupError

TEMPLATE: Final = "response_template"
PREFIX_TOKENS: Final = 512
"""Of a prompt, in which a response template may find where the answer begins."""
TAIL_TOKENS: Final = 16
"""Of a prompt, in which its template may have opened a thought."""
ID_BYTES: Final = 12
MISTRAL_ID_CHARS: Final = 9


@dataclass(frozen=True, slots=True)
class Forms:
    """Of one model."""

    calls: Form | None = None
    thoughts: Form | None = None
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


def _name(form: Form | None) -> str:
    return NONE if form is None else form.names[0]


def forms_of(
    tokenizer: Tokenizer,
    model_type: str,
    calls: str = AUTO,
    thoughts: str = AUTO,
    *,
    tells_tools: bool = True,
) -> Forms:
    """By the settings, or as the model has them. What is told in Hermes' words is answered so. `calls`: a
    name, or a file with a response template. Raises StartupError."""
    template = tokenizer.chat.text
    if calls not in (AUTO, *names_of(CALL_FORMS)):
        if not Path(calls).is_file():
            known = ", ".join((AUTO, *(form.names[0] for form in CALL_FORMS)))
            raise StartupError(
                f"--tool-call-parser {calls}: there is no such file, and no such name: {known}"
            )
        parts = template_file(Path(calls))
    elif calls == AUTO and (told := tokenizer.response_template) is not None:
        parts = read_template(told, "the tokenizer's response_template")
    else:
        parts = None
    hermes = named(HERMES, CALL_FORMS)
    own = form_of(template, model_type, CALL_FORMS) if tokenizer.chat.knows_tools else None
    return Forms(
        (own or hermes) if calls == AUTO or parts is not None else named(calls, CALL_FORMS),
        form_of(template, model_type, THOUGHT_FORMS) if thoughts == AUTO else named(thoughts, THOUGHT_FORMS),
        tells_tools,
        parts,
    )


class Opening(Enum):
    """Where a prompt leaves the model's thoughts."""

    NONE = "none"
    """Thoughts are not told from answers."""
    WITHIN = "within"
    CLOSED = "closed"
    """It has none before this answer, or its prompt has them."""
    FREE = "free"
    """It may begin with some."""


def heard(
    body: ChatRequest,
    prompt: Sequence[int],
    forms: Forms,
    tokenizer: Tokenizer,
    calls: Form | None,
    held: CallShape | None,
    *,
    constrained: bool = False,
) -> Heard | None:
    """`calls`: the form in which they come. `held`: as what a grammar has them written. `constrained`: a
    grammar has the content, too. None: there is nothing to tell apart."""
    tools = offered(body)
    callable_ = calls.dialect if tools and calls is not None else None
    where = opening(body, prompt, forms, tokenizer)
    thoughts = forms.thoughts.dialect if forms.thoughts is not None and where is not Opening.NONE else None
    by_template = forms.template is not None and calls is forms.calls and body.separate_reasoning
    if callable_ is None and thoughts is None and not by_template:
        return None
    may_think = thoughts is not None and not (constrained and where is Opening.CLOSED)
    dialect = (callable_ or Dialect()) | ((thoughts if may_think else None) or Dialect())
    voice: Voice = Speech(
        dialect,
        schemas_of(tools),
        thinking=where is Opening.WITHIN,
        held=held,
        grows=not body.stop_token_ids,
        constrained=constrained,
    )
    marks = _among(tokenizer, dialect)
    if by_template and forms.template is not None:
        end = tokenizer.decode(prompt[-PREFIX_TOKENS:], skip_special_tokens=False)
        voice, marks = TemplateVoice(forms.template, end, plain_tools(tools)), dict(tokenizer.special)
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


def opening(body: ChatRequest, prompt: Sequence[int], forms: Forms, tokenizer: Tokenizer) -> Opening:
    if forms.thoughts is None or not body.separate_reasoning:
        return Opening.NONE
    end, continued = _end(body, prompt, tokenizer), body.continue_final_message
    for region in forms.thoughts.dialect.regions:
        opened = max(map(end.rfind, region.opens), default=-1)
        closed = max(map(end.rfind, region.closes), default=-1)
        if region.kind is not RegionKind.THOUGHT:
            continue
        if opened > closed and (continued or end.endswith(region.opens)):
            return Opening.WITHIN
        if end.endswith(region.closes):
            return Opening.CLOSED
    return Opening.FREE


def _among(tokenizer: Tokenizer, dialect: Dialect) -> dict[int, str]:
    """The special tokens that a dialect's marks are made of."""
    marks = dialect.marks
    return {
        id_: text for id_, text in tokenizer.special.items() if text and any(text in mark for mark in marks)
    }


def _end(body: ChatRequest, prompt: Sequence[int], tokenizer: Tokenizer) -> str:
    """Of the prompt, as far as a thought may be open there."""
    if not body.continue_final_message:
        return tokenizer.decode(prompt[-TAIL_TOKENS:], skip_special_tokens=False).rstrip()
    said = body.messages[-1].content or ""
    return said if isinstance(said, str) else "".join(said)


def _ids_of(form: Form | None) -> Callable[[str, int], str]:
    match None if form is None else form.names[0]:
        case "mistral":
            return lambda _, __: secrets.token_hex(MISTRAL_ID_CHARS)[:MISTRAL_ID_CHARS]
        case "kimi":
            return lambda name, place: f"functions.{name}:{place}"
        case _:
            return lambda _, __: f"call_{secrets.token_hex(ID_BYTES)}"
