"""Schemas of request bodies: their fields, and the values that each field may have by itself.

`request_builder` checks what depends on the model or on the running workers. Unknown fields are errors: a
misspelt parameter must not be ignored silently.
"""

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

from baton.api.requests.field_types import (
    ALLOWED_TOKEN_IDS_MAX,
    BAD_WORD_CHARS_MAX,
    BAD_WORDS_MAX,
    CACHE_SALT_CHARS_MAX,
    CALL_ID_CHARS_MAX,
    CALLS_MAX,
    CHAT_TEMPLATE_CHARS_MAX,
    COMPLETION_TOKENS_DEFAULT,
    DOCUMENTS_MAX,
    FIELDS_MAX,
    FORMATS,
    ROLES,
    TOOL_CHARS_MAX,
    Effort,
    FunctionName,
    LogitBias,
    Logprobs,
    Nothing,
    Number,
    Prompts,
    RequestId,
    Stop,
    TokenId,
    ToolChoice,
    Whole,
    Words,
    call_arguments,
    check_message_count,
    check_tool_count,
    format_type,
    none_if_false,
    prompt_length,
    role_name,
    schema_object,
    shown_as,
)
from baton.api.requests.message_history import Content, chat_message
from baton.api.requests.unsupported_fields import OPENAI_UNSUPPORTED, UnsupportedFields
from baton.rooms.request import (
    CHOICES_MAX,
    LOGPROB_TOKEN_IDS_MAX,
    STOP_TOKEN_IDS_MAX,
)


def _bounded(tool: "Tool") -> "Tool":
    if len(tool.model_dump_json()) > TOOL_CHARS_MAX:
        raise PydanticCustomError("tool", f"it is longer than {TOOL_CHARS_MAX} characters of JSON")
    return tool


class Shape(BaseModel):
    """Base class of all schemas of request bodies. Strict: no unknown fields, no conversions between
    types."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    unserved: ClassVar[UnsupportedFields] = OPENAI_UNSUPPORTED
    """Names of fields that Baton ignores or refuses in bodies of this API."""

    @model_validator(mode="before")
    @classmethod
    def _given(cls, value: Any) -> Any:
        """Return the object without its null fields. A null means that the field is absent."""
        if not isinstance(value, dict):
            return value
        if len(value) > FIELDS_MAX:
            raise PydanticCustomError("fields", f"it has {len(value)} fields, more than any object may have")
        return {name: each for name, each in value.items() if each is not None}


class CalledFunction(Shape):
    name: Annotated[str, StringConstraints(min_length=1, max_length=CALL_ID_CHARS_MAX)]
    arguments: Annotated[
        str, BeforeValidator(call_arguments, json_schema_input_type=str | dict[str, Any])
    ] = "{}"
    parsed_arguments: Any = None
    """The arguments as OpenAI's client library parsed them. The library sends them back, and Baton ignores
    them."""


class ToolCallParam(Shape):
    """A tool call of an earlier turn, in a message of the assistant."""

    id: Annotated[str, StringConstraints(min_length=1, max_length=CALL_ID_CHARS_MAX)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Index that the tool call had in the streamed answer from which the client took it."""


class Message(Shape):
    """One message of a chat. `chat_messages` checks which fields its role needs and may have."""

    role: Annotated[str, AfterValidator(role_name), shown_as({"type": "string", "enum": [*ROLES]})]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallParam], FailFast(), Field(max_length=CALLS_MAX)] = Field(
        default_factory=list
    )
    tool_call_id: Annotated[str, StringConstraints(max_length=CALL_ID_CHARS_MAX)] | None = None
    """Id of the tool call whose result this message is, for the role `tool`."""
    reasoning_content: str | None = None
    """The model's reasoning, in a message of the assistant."""
    reasoning: str | None = None
    """The model's reasoning, under another name that clients use for `reasoning_content`."""
    parsed: Any = None
    """The content as OpenAI's client library parsed it. The library sends it back, and Baton ignores it."""
    refusal: Nothing = None
    """Refusal in an answer that the client sends back. It has to be empty, like `annotations` and the fields
    after it."""
    annotations: Nothing = None
    audio: Nothing = None
    function_call: Nothing = None


class StreamOptions(Shape):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Whether each event of a stream reports token usage, as in vLLM. It needs `include_usage`."""
    include_obfuscation: bool = False
    """Whether to add padding against traffic analysis. Baton accepts the field and never adds any."""


class Function(Shape):
    """A function that a model may call."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Shape):
    type: Literal["function"]
    function: Function
    strict: bool | None = None
    """Whether arguments have to match the schema, like `function.strict`. The Responses API and some clients
    write the field outside of `function`."""

    @model_validator(mode="after")
    def _strict_function(self) -> "Tool":
        if self.strict is None or self.function.strict is not None:
            return self
        function = self.function.model_copy(update={"strict": self.strict})
        return self.model_copy(update={"function": function, "strict": None})


def reasoning_of(message: Message) -> str | None:
    """Return the reasoning of an assistant's message, from whichever of its two fields has it."""
    return message.reasoning_content if message.reasoning is None else message.reasoning


def read_message(value: Any) -> Any:
    """Return one element of a conversation, in any API's format, as a chat message."""
    return chat_message(value, MESSAGE_FIELDS)


MESSAGE_FIELDS: Final = frozenset(Message.model_fields)
AnyMessage = Annotated[Message, BeforeValidator(read_message)]
Messages = Annotated[list[AnyMessage], FailFast(), BeforeValidator(check_message_count), Field(min_length=1)]


Tools = Annotated[
    list[Annotated[Tool, AfterValidator(_bounded)]], FailFast(), BeforeValidator(check_tool_count)
]


JsonSchema = Annotated[
    dict[str, Any], BeforeValidator(schema_object, json_schema_input_type=dict[str, Any] | str)
]
Choices = Annotated[list[str], FailFast(), Field(min_length=1)]


class NamedSchema(Shape):
    """Value of `response_format.json_schema`. The answer follows the schema, whether it is `strict` or
    not."""

    schema_: JsonSchema = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool = False


class ResponseFormat(Shape):
    """OpenAI's `response_format`: text, any JSON object, or JSON by a schema."""

    type: Annotated[str, AfterValidator(format_type), shown_as({"type": "string", "enum": [*FORMATS]})]
    json_schema: NamedSchema | None = None
    schema_: JsonSchema | None = Field(None, alias="schema")
    """JSON schema that the answer has to follow, given directly and not within `json_schema`. SGLang and
    llama.cpp accept it in this form."""


class StructuredOutputs(Shape):
    """Value of vLLM's request field `structured_outputs`. One of `json`, `regex`, `choice`, `grammar` and
    `json_object` constrains the answer."""

    json_: JsonSchema | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices = Field(default_factory=list)
    """Texts, one of which the answer has to be. Absent: no such constraint."""
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    disable_fallback: bool = False
    """Accepted and ignored: it forbids a second grammar library, and Baton has only one."""
    disable_additional_properties: bool = False
    """Accepted and ignored: a JSON schema allows no additional properties unless it asks for them."""


class RecommendedSampling(Shape):
    """Sampling parameters for which a model's makers may recommend values."""

    temperature: Annotated[Number, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[Whole, Field(ge=-1)] = -1
    """Number of most likely tokens from which the next token is sampled; -1 and 0: all tokens."""
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] = 1.0


class Sampled(RecommendedSampling):
    """Sampling parameters and constraints that the requests of all APIs share, by OpenAI's, vLLM's and
    SGLang's names."""

    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    seed: Annotated[Whole, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop = Field(default_factory=list)
    logit_bias: LogitBias = Field(default_factory=dict)

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
    """Texts that may not appear in the answer."""
    allowed_token_ids: Annotated[
        list[TokenId], FailFast(), Field(min_length=1, max_length=ALLOWED_TOKEN_IDS_MAX)
    ] = Field(default_factory=list)
    """Ids of the only tokens that may be sampled. Absent: all tokens."""
    priority: Annotated[Whole, Field(ge=-(2**31), lt=2**31)] = 0
    """Priority class of the request. Among waiting requests, those of the lowest class are served first."""
    speculate: bool = True
    """Whether speculative decoding may be used. It changes no output token."""
    request_id: RequestId | None = None
    rid: RequestId | None = None
    """Id of the request, under SGLang's name for the field `request_id`."""

    cache_salt: Annotated[str, StringConstraints(min_length=1, max_length=CACHE_SALT_CHARS_MAX)] | None = None
    """Salt of the prefix cache. Prompts with different salts share no cached KV."""
    structured_outputs: StructuredOutputs | None = None
    """vLLM's constraints on the answer. vLLM's older `guided_…` fields and SGLang's fields, which follow,
    constrain it as well (`constraints.py`)."""
    guided_json: JsonSchema | None = None
    guided_regex: str | None = None
    guided_choice: Choices = Field(default_factory=list)
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: JsonSchema | None = None
    regex: str | None = None
    ebnf: str | None = None


class GenerationRequest(Sampled):
    """Fields that OpenAI's chats and text completions share, in addition to those of `Sampled`."""

    model: str | None = None
    """Name of the model. Absent: the served model."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    event_ids: bool | None = None
    """Whether each event of a stream has an id, behind which the stream can be continued. Absent: yes, unless
    the client is one that ids would break."""
    max_tokens: Annotated[Whole, Field(ge=1)] | None = None
    n: Annotated[Whole, Field(ge=1, le=CHOICES_MAX)] = 1
    """Number of choices to return for each prompt."""
    best_of: Annotated[Whole, Field(ge=1, le=CHOICES_MAX)] | None = None
    """Number of choices to generate for each prompt, of which the best `n` are returned. Absent: `n`."""
    prompt_logprobs: Logprobs | None = None
    """Number of alternatives to return for each prompt token, with its log-probability. Absent: none."""
    logprob_token_ids: Annotated[list[TokenId], FailFast(), Field(max_length=LOGPROB_TOKEN_IDS_MAX)] = Field(
        default_factory=list
    )
    """Ids of tokens whose log-probabilities are returned for each output token, if log-probabilities are
    asked for."""
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    """Whether log-probabilities name a token by its id (`token_id:42`) instead of its text."""
    truncate_prompt_tokens: Annotated[Whole, Field(ge=-1), AfterValidator(prompt_length)] | None = None
    """Most tokens of a prompt. A longer prompt is cut to this length; -1: to as many tokens as fit."""
    truncation_side: Literal["left", "right"] = "left"
    """Side from which tokens of a too long prompt are removed."""
    response_format: ResponseFormat | None = None
    """OpenAI's constraint on the format of the answer."""


class Conversation(Shape):
    """Fields from which the chat template makes a prompt."""

    messages: Messages
    tools: Tools = Field(default_factory=list)
    documents: Annotated[list[dict[str, Any]], Field(max_length=DOCUMENTS_MAX)] = Field(default_factory=list)
    chat_template_kwargs: Words = Field(default_factory=dict)
    chat_template: Annotated[str, StringConstraints(max_length=CHAT_TEMPLATE_CHARS_MAX)] | None = None
    """Source of the chat template to use. Absent: the model's own template."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds special tokens to the rendered prompt. Absent: no, the chat template writes
    them."""


class Reasoning(Shape):
    """Value of the field `reasoning`, as OpenRouter and SGLang define it."""

    effort: Effort | None = None
    reasoning_effort: Effort | None = None
    """Reasoning effort, under SGLang's name for the field `effort`."""
    enabled: bool | None = None
    """Whether the model reasons before it answers. Absent: the chat template's default."""
    exclude: bool = False
    """Whether the model's reasoning is left out of the response. The model still reasons."""


class ChatRequest(GenerationRequest, Conversation):
    """Body of POST /v1/chat/completions."""

    reasoning_effort: Effort | None = None
    reasoning: Reasoning = Field(default_factory=Reasoning)
    include_reasoning: bool = True
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    """Whether a stream sends reasoning while it is generated. Otherwise it is sent when it has ended."""
    max_completion_tokens: Annotated[Whole, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Logprobs | None = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    echo: bool = False
    """Whether the answer is returned with the text of the last message before it, if that message is the
    assistant's."""

    @property
    def effort(self) -> Effort | None:
        """Reasoning effort, from whichever field gives it. None: no field does."""
        effort = self.reasoning_effort or self.reasoning.effort or self.reasoning.reasoning_effort
        return "none" if effort is None and self.reasoning.enabled is False else effort


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Prompts
    add_special_tokens: bool = True
    max_tokens: Annotated[Whole, Field(ge=0)] | None = COMPLETION_TOKENS_DEFAULT
    """Most output tokens of each choice. 0 is allowed with `echo`: the response then has only the prompt."""
    logprobs: Annotated[Logprobs | None, BeforeValidator(none_if_false)] = None
    echo: bool = False
    """Whether the answer begins with the prompt. If `logprobs` is set, it includes the prompt's
    log-probabilities."""
