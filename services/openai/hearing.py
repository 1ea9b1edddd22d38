"""How are an answer's thoughts and calls told from what it says, for this model and this request?"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from services.openai.choice import Heard
from services.openai.conversation import offered, schemas_of
from services.openai.dialects import (
    AUTO,
    CALL_FORMS,
    HERMES,
    NONE,
    THOUGHT_FORMS,
    Form,
    form_of,
    named,
)
from services.openai.schemas import ChatRequest
from services.openai.speech import Dialect, Kind, Speech
from services.openai.tokenizer import Tokenizer

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

    @property
    def names(self) -> dict[str, str]:
        return {
            "calls": NONE if self.calls is None else self.calls.names[0],
            "thoughts": NONE if self.thoughts is None else self.thoughts.names[0],
        }


def forms_of(
    tokenizer: Tokenizer,
    model_type: str,
    calls: str = AUTO,
    thoughts: str = AUTO,
    *,
    tells_tools: bool = True,
) -> Forms:
    """By the settings, or as the model has them. What is told in Hermes' words is answered so."""
    template = tokenizer.chat.text
    hermes = named(HERMES, CALL_FORMS)
    own = form_of(template, model_type, CALL_FORMS) if tokenizer.chat.knows_tools else None
    return Forms(
        (own or hermes) if calls == AUTO else named(calls, CALL_FORMS),
        form_of(template, model_type, THOUGHT_FORMS) if thoughts == AUTO else named(thoughts, THOUGHT_FORMS),
        tells_tools,
    )


def heard(body: ChatRequest, prompt: Sequence[int], forms: Forms, tokenizer: Tokenizer) -> Heard | None:
    """None: there is nothing to tell apart."""
    tools = offered(body)
    calls = forms.calls.dialect if tools and forms.calls is not None else None
    thoughts = forms.thoughts.dialect if forms.thoughts is not None and body.separate_reasoning else None
    if calls is None and thoughts is None:
        return None
    dialect = (calls or Dialect()) | (thoughts or Dialect())
    end, within = _end(body, prompt, tokenizer), body.continue_final_message
    marks = {} if not body.skip_special_tokens else _among(tokenizer, dialect)
    return Heard(
        Speech(dialect, schemas_of(tools), thinking=_opened(thoughts, end, within=within)),
        marks,
        _ids_of(forms.calls),
        calls_max=None if body.parallel_tool_calls else 1,
        thoughts_shown=body.include_reasoning,
        thoughts_told=thoughts is not None,
    )


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


def _opened(thoughts: Dialect | None, end: str, *, within: bool) -> bool:
    """Whether the prompt ends with the beginning of a thought, or `within` one."""
    for region in () if thoughts is None else thoughts.regions:
        opened = max(map(end.rfind, region.opens), default=-1)
        closed = max(map(end.rfind, region.closes), default=-1)
        if region.kind is Kind.THOUGHT and opened > closed and (within or end.endswith(region.opens)):
            return True
    return False


def _ids_of(form: Form | None) -> Callable[[str, int], str]:
    match None if form is None else form.names[0]:
        case "mistral":
            return lambda _, __: secrets.token_hex(MISTRAL_ID_CHARS)[:MISTRAL_ID_CHARS]
        case "kimi":
            return lambda name, place: f"functions.{name}:{place}"
        case _:
            return lambda _, __: f"call_{secrets.token_hex(ID_BYTES)}"
