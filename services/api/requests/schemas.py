"""Which fields does each request have, and which values may they take on their own?

What depends on the model or on the stack that is up is judged by `intake`. Unknown fields are errors:
a misspelt parameter must not be served as if it had been understood.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Final, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from baton.api.errors import shown
from baton.api.http.request_headers import REQUEST_ID
from baton.api.requests.call_arguments import arguments_text
from baton.api.requests.json_reader import TooDeep, read_json
from baton.api.requests.message_history import TEXT_PARTS, chat_message, text_part
from baton.api.requests.unsupported_fields import OPENAI_UNSUPPORTED, UnsupportedFields
from baton.api.text.chat_template import Content
from baton.rooms.request import (
    CHOICES_MAX,
    LOGIT_BIAS_MAX,
    LOGPROB_TOKEN_IDS_MAX,
    LOGPROBS_MAX,
    STOP_TOKEN_IDS_MAX,
)

STOP_STRINGS_MAX: Final = 32
STOP_STRING_CHARS_MAX: Final = 1024
PROMPTS_MAX: Final = 64
"""Prompts of one /v1/completions request; each runs as a request of its own."""
ANSWERS_MAX: Final = 512
"""Drawn for one request, over all its prompts."""
MESSAGES_MAX: Final = 8192
COMPLETION_TOKENS_DEFAULT: Final = 16
"""OpenAI's, of /v1/completions only."""
ROLES: Final = ("system", "developer", "user", "assistant", "tool")
FORMATS: Final = ("text", "json_object", "json_schema")
FUNCTION_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,128}")
"""As Anthropic has it; OpenAI's are half as long."""
BAD_WORDS_MAX: Final = 64
BAD_WORD_CHARS_MAX: Final = 128
ALLOWED_TOKEN_IDS_MAX: Final = 4096
CHAT_TEMPLATE_CHARS_MAX: Final = 256 * 2**10
TOOLS_MAX: Final = 1024
"""OpenAI takes 128, Anthropic any number: agents with several MCP servers bring hundreds."""
TOOL_CHARS_MAX: Final = 64 * 2**10
"""Of one tool, as JSON."""
CALLS_MAX: Final = 4096
"""Of one message; as many as blocks of Anthropic's."""
CALL_ID_CHARS_MAX: Final = 256
DOCUMENTS_MAX: Final = 1024
WORDS_MAX: Final = 32
WORDS_CHARS_MAX: Final = 64 * 2**10
CACHE_SALT_CHARS_MAX: Final = 256
RESERVED: Final = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
    | {"tokenize", "loop", "self", "baton_counted", "raise_exception", "strftime_now"}
    | {"namespace", "range", "dict", "lipsum", "cycler", "joiner"}
)
"""Names that a chat template knows already: a field of the request gives their values, or nobody does."""
FIELDS_MAX: Final = 128
"""Of any object: of what is wrong with a body one thing is told, and each field that is found wrong before
takes time and memory."""


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _is_token_ids(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return not value or ({*map(type, value)} == {int} and min(value) >= 0)


def _prompts(value: Any) -> Any:
    """A text, texts, token ids or lists of token ids → the list of prompts, each a text or token ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise PydanticCustomError(
            "prompt_type", "it has to be a text, a list of texts, token ids, or a list of token ids"
        )
    if not value:
        raise PydanticCustomError("prompt_empty", "it is empty")
    if _is_token_ids(value):
        return [value]
    if len(value) > PROMPTS_MAX:
        raise PydanticCustomError(
            "prompts", f"it holds {len(value)} prompts; at most {PROMPTS_MAX} are taken"
        )
    if all(isinstance(each, str) for each in value) or all(_is_token_ids(each) for each in value):
        return value
    raise PydanticCustomError(
        "prompt_type",
        "its elements have to be all texts, all token ids, or all lists of token ids (integers >= 0)",
    )


def _content(value: Any) -> Any:
    """Of a message: a text, or a list of text parts of any API → their texts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content_type", "it has to be a text or a list of text parts")
    texts = []
    for place, part in enumerate(value):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise PydanticCustomError("content_part", f"part {place} is not an object with a type")
        if part["type"] not in TEXT_PARTS:
            raise PydanticCustomError(
                "content_part", f"part {place} has an unsupported type; only 'text' parts are taken"
            )
        if not isinstance(text := text_part(part), str):
            raise PydanticCustomError("content_part", f"part {place} has no text")
        texts.append(text)
    return texts


def _role(value: str) -> str:
    if value == "function":
        raise PydanticCustomError("role", "role 'function' is not supported; use 'tool'")
    if value not in ROLES:
        raise PydanticCustomError("role", f"the role has to be one of {', '.join(ROLES)}")
    return value


def call_arguments(value: Any) -> Any:
    """Of a call: JSON in a text, as OpenAI has it, also one that was cut off, or an object → the text."""
    if not isinstance(value, str | dict):
        raise PydanticCustomError("arguments_type", "it has to be a text that holds a JSON object")
    try:
        return arguments_text(value)
    except ValueError:
        raise PydanticCustomError("arguments", "it is no JSON object") from None


def _bounded(tool: "Tool") -> "Tool":
    if len(tool.model_dump_json()) > TOOL_CHARS_MAX:
        raise PydanticCustomError("tool", f"it is longer than {TOOL_CHARS_MAX} characters of JSON")
    return tool


def function_name(value: str) -> str:
    if FUNCTION_NAME.fullmatch(value) is None:
        raise PydanticCustomError("name", "it has to be 1 to 128 letters, digits, '_' and '-'")
    return value


def _request_id(value: str) -> str:
    if REQUEST_ID.fullmatch(value) is None:
        raise PydanticCustomError("name", "it has to be 1 to 128 letters, digits and any of ._:/+=@-")
    return value


def _prompt_length(value: int) -> int:
    if value == 0:
        raise PydanticCustomError("prompt_length", "it has to be above 0, or -1")
    return value


def _few_tools(value: Any) -> Any:
    if isinstance(value, list) and len(value) > TOOLS_MAX:
        raise PydanticCustomError("tools", f"it holds {len(value)} tools; at most {TOOLS_MAX} are taken")
    return value


def _words(value: dict[str, Any]) -> dict[str, Any]:
    """Of a chat template's own."""
    if len(value) > WORDS_MAX:
        raise PydanticCustomError("words", f"it holds {len(value)} names; at most {WORDS_MAX} are taken")
    for name in value:
        if name in RESERVED or name.endswith("_token") or not name.isidentifier() or name.startswith("_"):
            raise PydanticCustomError("words", f"'{name[:64]}' is no name that it may give a value to")
    if len(json.dumps(value)) > WORDS_CHARS_MAX:
        raise PydanticCustomError("words", f"it is longer than {WORDS_CHARS_MAX} characters of JSON")
    return value


def read_tool_choice(value: Any) -> Any:
    """A word, or an object that names a function or several, as a chat or the Responses API has it."""
    if value in ("none", "auto", "required") or isinstance(value, ForcedTool | AllowedTools):
        return value
    if isinstance(value, str):
        raise PydanticCustomError("tool_choice", "it has to be none, auto, required, or name a function")
    if not isinstance(value, dict):
        raise PydanticCustomError("choice_type", "it has to be a text or an object")
    match value:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return ForcedTool(name)
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}} | {
            "type": "allowed_tools",
            "mode": mode,
            "tools": tools,
        } if mode in ("auto", "required") and isinstance(tools, list) and len(tools) <= TOOLS_MAX:
            return AllowedTools(mode, tuple(map(function_named, tools)))
        case {"type": str(kind)} if kind not in ("function", "allowed_tools"):
            raise PydanticCustomError(
                "tool_choice", f"tools of the type '{shown(kind)}' are not served; functions are"
            )
    raise PydanticCustomError("tool_choice", "an object has to name a function, or be OpenAI's allowed_tools")


def function_named(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    raise PydanticCustomError("tool_choice", "one of its tools is no function with a name")


def _nothing(value: Any) -> Any:
    if value not in (None, [], {}):
        raise PydanticCustomError("unsupported", "it is not supported")
    return value


def _schema(value: Any) -> Any:
    """A JSON schema, or one as a text, as an object."""
    if isinstance(value, str):
        try:
            value = read_json(value)
        except TooDeep as error:
            raise PydanticCustomError("schema", f"{error}") from None
        except ValueError:
            raise PydanticCustomError("schema", "it is not valid JSON") from None
    if not isinstance(value, dict):
        raise PydanticCustomError("schema_type", "it has to be a JSON schema, which is an object")
    if OPTIONS in value:
        raise PydanticCustomError("schema", f"it holds '{OPTIONS}', which is not taken")
    return value


def _format_type(value: str) -> str:
    if value == "structural_tag":
        raise PydanticCustomError("unsupported", "it is not supported")
    if value not in FORMATS:
        raise PydanticCustomError("format_type", f"it has to be one of {', '.join(FORMATS)}")
    return value


def _token_id_key(key: str) -> str:
    if not (key.isascii() and key.isdecimal() and len(key) <= 10):
        raise PydanticCustomError("logit_bias", "the key has to be a token id")
    return key


def _few_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > LOGIT_BIAS_MAX:
        raise PydanticCustomError(
            "logit_bias", f"it holds {len(value)} token ids; at most {LOGIT_BIAS_MAX} are taken"
        )
    return value


def _few_messages(value: Any) -> Any:
    """Before any of them is looked at."""
    if isinstance(value, list) and len(value) > MESSAGES_MAX:
        raise PydanticCustomError(
            "messages", f"it holds {len(value)} messages; at most {MESSAGES_MAX} are taken"
        )
    return value


OPTIONS: Final = "x-guidance"
"""The word under which a schema tells the library how it is to be read: ours alone."""


def _unless_false(value: Any) -> Any:
    """Of completions, a number; SGLang's clients say, as in chats, that none are asked for."""
    return None if value is False else value


def _whole(value: Any) -> Any:
    """`4.0` is 4: some languages know one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as(schema: dict[str, Any]) -> WithJsonSchema:
    """How what a function judges is told to who reads `/openapi.json`."""
    return WithJsonSchema(schema, mode="validation")


class TextPart(BaseModel):
    """Of a message's content. What else it says is passed over."""

    type: Literal["text"]
    text: str


class ChosenFunction(BaseModel):
    name: str


class ChosenTool(BaseModel):
    """`tool_choice`: a call of this one."""

    type: Literal["function"]
    function: ChosenFunction


class ToolsAllowed(BaseModel):
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class AllowedToolsChoice(BaseModel):
    """`tool_choice`: some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolsAllowed


Number = Annotated[float, Field(allow_inf_nan=False)]
Whole = Annotated[int, BeforeValidator(_whole)]
RequestId = Annotated[
    str, AfterValidator(_request_id), _as({"type": "string", "pattern": f"^{REQUEST_ID.pattern}$"})
]
TokenId = Annotated[Whole, Field(ge=0)]
Logprobs = Annotated[Whole, Field(ge=-1, le=LOGPROBS_MAX)]
"""How many of the likeliest tokens; -1: all of the vocabulary."""
StopString = Annotated[str, StringConstraints(min_length=1, max_length=STOP_STRING_CHARS_MAX)]
StopStrings = Annotated[list[StopString], Field(max_length=STOP_STRINGS_MAX)]
PromptEncoder = Annotated[list[str], Field(min_length=1, max_length=PROMPTS_MAX)]
TokenIdPrompts = Annotated[
    list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=PROMPTS_MAX)
]
Nothing = Annotated[Any, AfterValidator(_nothing), _as({"enum": [None, [], {}]})]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Words = Annotated[dict[str, Any], AfterValidator(_words)]
"""Of a chat template's own."""


class Shape(BaseModel):
    """Strict: no unknown fields, no conversions between types."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    unserved: ClassVar[UnsupportedFields] = OPENAI_UNSUPPORTED
    """Of the API whose body it is."""

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        """Without nulls, which mean absent."""
        if not isinstance(value, dict):
            return value
        if len(value) > FIELDS_MAX:
            raise PydanticCustomError("fields", f"it has {len(value)} fields, more than any object may have")
        return {name: each for name, each in value.items() if each is not None}


@dataclass(frozen=True, slots=True)
class ForcedTool:
    """The tool that has to be called."""

    name: str


@dataclass(frozen=True, slots=True)
class AllowedTools:
    """Some of the tools, which may be called, or of which one has to be."""

    mode: str
    """auto or required"""
    names: tuple[str, ...]


class CalledFunction(Shape):
    name: Annotated[str, StringConstraints(min_length=1, max_length=CALL_ID_CHARS_MAX)]
    arguments: Annotated[
        str, BeforeValidator(call_arguments, json_schema_input_type=str | dict[str, Any])
    ] = "{}"
    parsed_arguments: Any = None
    """The same, as OpenAI's client has read it and sends it back."""


class ToolCallParam(Shape):
    """Of a turn of the assistant's."""

    id: Annotated[str, StringConstraints(min_length=1, max_length=CALL_ID_CHARS_MAX)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """As a stream told it."""


class Message(Shape):
    """One turn of the conversation. What needs a content, or may have calls, `conversation` judges."""

    role: Annotated[str, AfterValidator(_role), _as({"type": "string", "enum": [*ROLES]})]
    content: (
        Annotated[Content, BeforeValidator(_content, json_schema_input_type=str | list[TextPart])] | None
    ) = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallParam], FailFast(), Field(max_length=CALLS_MAX)] = Field(
        default_factory=list
    )
    tool_call_id: Annotated[str, StringConstraints(max_length=CALL_ID_CHARS_MAX)] | None = None
    """Of a tool's: which call it answers."""
    reasoning_content: str | None = None
    """Of the assistant's: its thoughts."""
    reasoning: str | None = None
    """The same, by another name."""
    parsed: Any = None
    """The content, as OpenAI's client has read it and sends it back."""
    refusal: Nothing = None
    """This and the next: a reply that is sent back as it came carries them, empty."""
    annotations: Nothing = None
    audio: Nothing = None
    function_call: Nothing = None


class StreamOptions(Shape):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """With `include_usage`: in each event, as in vLLM."""
    include_obfuscation: bool = False
    """Padding against traffic analysis; never added here."""


class Function(Shape):
    """That a model may call."""

    name: Annotated[
        str, AfterValidator(function_name), _as({"type": "string", "pattern": f"^{FUNCTION_NAME.pattern}$"})
    ]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Shape):
    type: Literal["function"]
    function: Function
    strict: bool | None = None
    """Of its function, where the Responses API and some clients write it."""

    @model_validator(mode="after")
    def _strict_function(self) -> "Tool":
        if self.strict is None or self.function.strict is not None:
            return self
        function = self.function.model_copy(update={"strict": self.strict})
        return self.model_copy(update={"function": function, "strict": None})


def reasoning_of(message: Message) -> str | None:
    """The reasoning of an assistant's message, by whichever of its names."""
    return message.reasoning_content if message.reasoning is None else message.reasoning


def read_message(value: Any) -> Any:
    """One element of a conversation of any API as a chat message."""
    return chat_message(value, MESSAGE_FIELDS)


MESSAGE_FIELDS: Final = frozenset(Message.model_fields)
AnyMessage = Annotated[Message, BeforeValidator(read_message)]
Messages = Annotated[list[AnyMessage], FailFast(), BeforeValidator(_few_messages), Field(min_length=1)]


Tools = Annotated[list[Annotated[Tool, AfterValidator(_bounded)]], FailFast(), BeforeValidator(_few_tools)]


JsonSchema = Annotated[dict[str, Any], BeforeValidator(_schema, json_schema_input_type=dict[str, Any] | str)]
Choices = Annotated[list[str], FailFast(), Field(min_length=1)]


class NamedSchema(Shape):
    """`response_format.json_schema`. Answers are held to it whether it is `strict` or not."""

    schema_: JsonSchema = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool = False


class ResponseFormat(Shape):
    """OpenAI's."""

    type: Annotated[str, AfterValidator(_format_type), _as({"type": "string", "enum": [*FORMATS]})]
    json_schema: NamedSchema | None = None
    schema_: JsonSchema | None = Field(None, alias="schema")
    """Without a name, beside its type, as SGLang and llama.cpp take it."""


class StructuredOutputs(Shape):
    """vLLM's: one of the first five."""

    json_: JsonSchema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices = Field(default_factory=list)
    """Absent: none."""
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    disable_fallback: bool = False
    """To another library: there is one."""
    disable_additional_properties: bool = False
    """There are none where a schema does not ask for them."""


class RecommendedSampling(Shape):
    """How a token is drawn, of that part which a model's makers may recommend."""

    temperature: Annotated[Number, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[Whole, Field(ge=-1)] = -1
    """-1 and 0: all."""
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] = 1.0


class Sampled(RecommendedSampling):
    """How an answer is drawn and what it is held to, in the words that all APIs share: OpenAI's sampling
    fields, and vLLM's and SGLang's."""

    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[
        list[StopString],
        FailFast(),
        Field(max_length=STOP_STRINGS_MAX),
        BeforeValidator(_one_or_many, json_schema_input_type=StopString | StopStrings),
    ] = Field(default_factory=list)
    logit_bias: Annotated[
        dict[Annotated[str, AfterValidator(_token_id_key)], Annotated[Number, Field(ge=-100, le=100)]],
        BeforeValidator(_few_biases),
        _as(
            {
                "type": "object",
                "propertyNames": {"pattern": "^[0-9]{1,10}$"},
                "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                "maxProperties": LOGIT_BIAS_MAX,
            }
        ),
    ] = Field(default_factory=dict)

    min_tokens: Annotated[Whole, Field(ge=0)] = 0
    stop_token_ids: Annotated[list[TokenId], FailFast(), Field(max_length=STOP_TOKEN_IDS_MAX)] = Field(
        default_factory=list
    )
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    bad_words: Annotated[
        list[Annotated[str, StringConstraints(min_length=1, max_length=BAD_WORD_CHARS_MAX)]],
        FailFast(),
        Field(max_length=BAD_WORDS_MAX),
    ] = Field(default_factory=list)
    """Texts that do not come."""
    allowed_token_ids: Annotated[
        list[TokenId], FailFast(), Field(min_length=1, max_length=ALLOWED_TOKEN_IDS_MAX)
    ] = Field(default_factory=list)
    """Absent: all."""
    priority: Annotated[Whole, Field(ge=-(2**31), lt=2**31)] = 0
    """Its class: of what waits, the lowest is served first."""
    speculate: bool = True
    """Drafts of what comes next may be checked: what is drawn is the same."""
    request_id: RequestId | None = None
    rid: RequestId | None = None
    """The same, SGLang's."""

    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=CACHE_SALT_CHARS_MAX)] | None = None
    """Prompts of two salts share nothing that is computed of them."""
    structured_outputs: StructuredOutputs | None = None
    """This and the next: what the answer is held to (`structures.py`). vLLM's, now and before; and
    SGLang's."""
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: Choices = Field(default_factory=list)
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: JsonSchema | None = None
    regex: str | None = None
    ebnf: str | None = None


class GenerationRequest(Sampled):
    """What the two generating endpoints of OpenAI share beside that."""

    model: str | None = None
    """Absent: the one that is served."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    n: Annotated[Whole, Field(ge=1, le=CHOICES_MAX)] = 1
    """Answers to each prompt."""
    best_of: Annotated[Whole, Field(ge=1, le=CHOICES_MAX)] | None = None
    """So many are drawn, and the best `n` of them are given. Absent: `n`."""
    prompt_logprobs: Logprobs | None = None
    """The prompt's tokens are scored, with so many of the likeliest in the place of each."""
    logprob_token_ids: Annotated[list[TokenId], FailFast(), Field(max_length=LOGPROB_TOKEN_IDS_MAX)] = Field(
        default_factory=list
    )
    """Told beside each drawn token, where log-probabilities are."""
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    """In log-probabilities."""
    truncate_prompt_tokens: Annotated[Whole, Field(ge=-1), AfterValidator(_prompt_length)] | None = None
    """So many at most, of a longer prompt; -1: as many as fit."""
    truncation_side: Literal["left", "right"] = "left"
    """Where a longer prompt loses tokens."""
    response_format: ResponseFormat | None = None
    """What the answer is held to, in OpenAI's words."""


class Conversation(Shape):
    """What becomes a prompt by the model's chat template."""

    messages: Messages
    tools: Tools = Field(default_factory=list)
    documents: Annotated[list[dict[str, Any]], Field(max_length=DOCUMENTS_MAX)] = Field(default_factory=list)
    chat_template_kwargs: Words = Field(default_factory=dict)
    chat_template: Annotated[str, StringConstraints(max_length=CHAT_TEMPLATE_CHARS_MAX)] | None = None
    """Absent: the model's."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    """Absent: no, the chat template writes them."""


class Reasoning(Shape):
    """OpenRouter's and SGLang's."""

    effort: Effort | None = None
    reasoning_effort: Effort | None = None
    """The same, SGLang's."""
    enabled: bool | None = None
    """Whether the model thinks. Absent: as its chat template has it."""
    exclude: bool = False
    """Thoughts are left out of the answer."""


class ChatRequest(GenerationRequest, Conversation):
    """POST /v1/chat/completions"""

    reasoning_effort: Effort | None = None
    reasoning: Reasoning = Field(default_factory=Reasoning)
    include_reasoning: bool = True
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    """Else a stream has a thought once it has ended."""
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Logprobs | None = None
    tool_choice: Annotated[
        str | ForcedTool | AllowedTools,
        BeforeValidator(
            read_tool_choice,
            json_schema_input_type=Literal["none", "auto", "required"] | ChosenTool | AllowedToolsChoice,
        ),
    ] = "auto"
    parallel_tool_calls: bool = True
    echo: bool = False
    """The last message's text comes before the answer, where it is the assistant's."""

    @property
    def effort(self) -> Effort | None:
        """How much is thought, by whichever name it is told."""
        told = self.reasoning_effort or self.reasoning.effort or self.reasoning.reasoning_effort
        return "none" if told is None and self.reasoning.enabled is False else told


class CompletionRequest(GenerationRequest):
    """POST /v1/completions"""

    prompt: Annotated[
        list[str | list[int]],
        BeforeValidator(
            _prompts,
            json_schema_input_type=str
            | PromptEncoder
            | Annotated[list[TokenId], Field(min_length=1)]
            | TokenIdPrompts,
        ),
    ]
    add_special_tokens: bool = True
    max_tokens: Annotated[Whole, Field(ge=0)] | None = COMPLETION_TOKENS_DEFAULT
    """0: with `echo`, for the prompt alone."""
    logprobs: Annotated[Logprobs | None, BeforeValidator(_unless_false)] = None
    echo: bool = False
    """The prompt comes before its answer, with its log-probabilities where `logprobs` asks for some."""


class TokenizeRequest(Conversation):
    """POST /tokenize: exactly one of `prompt` and `messages`. Special tokens are added where nothing is said
    to a prompt, and to messages not."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages = Field(default_factory=list)
    """Absent: none."""
    return_token_strs: bool = False


class DetokenizeRequest(Shape):
    """POST /detokenize"""

    model: str | None = None
    tokens: Annotated[list[TokenId], FailFast()]


@cache
def fields_of(shape: type[Shape]) -> dict[str, tuple[str, ...]]:
    """The names of the fields of each object in a body of that shape, as `field_faults` takes them."""
    known: dict[str, tuple[str, ...]] = {}
    for path, each in _within(shape, ""):
        known[path] = (*known.get(path, ()), *names_of(each))
    return known


def _within(shape: type[Shape], path: str) -> Iterator[tuple[str, type[Shape]]]:
    """It and all shapes of its fields, by the path of each."""
    yield path, shape
    for name, field in shape.model_fields.items():
        here = f"{path}.{field.alias or name}".lstrip(".")
        for steps, each in _shapes_of(field.annotation, here):
            yield from _within(each, steps)


def _shapes_of(annotation: Any, path: str) -> Iterator[tuple[str, type[Shape]]]:
    if isinstance(annotation, type) and issubclass(annotation, Shape):
        yield path, annotation
    for each in get_args(annotation):
        yield from _shapes_of(each, f"{path}.[]" if get_origin(annotation) is list else path)


def names_of(shape: type[Shape]) -> tuple[str, ...]:
    """Its fields, as callers write them."""
    return tuple(field.alias or name for name, field in shape.model_fields.items())
