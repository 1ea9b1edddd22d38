"""Types of request fields, with their bounds and the functions that validate them."""

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    FailFast,
    Field,
    StringConstraints,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from baton.api.errors import shown
from baton.api.http.request_headers import REQUEST_ID
from baton.api.requests.call_arguments import arguments_text
from baton.api.requests.json_reader import TooDeep, read_json
from baton.rooms.request import (
    LOGIT_BIAS_MAX,
    LOGPROBS_MAX,
)

STOP_STRINGS_MAX: Final = 32
STOP_STRING_CHARS_MAX: Final = 1024
PROMPTS_MAX: Final = 64
"""Most prompts in one /v1/completions request. Each prompt is served as a request of its own."""
ANSWERS_MAX: Final = 512
"""Most choices that one request may generate, counted over all its prompts."""
MESSAGES_MAX: Final = 8192
COMPLETION_TOKENS_DEFAULT: Final = 16
"""Default of `max_tokens` for /v1/completions only, as in OpenAI's API."""
ROLES: Final = ("system", "developer", "user", "assistant", "tool")
FORMATS: Final = ("text", "json_object", "json_schema")
FUNCTION_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,128}")
"""Pattern of a function's name, as Anthropic allows it. OpenAI allows half as many characters."""
BAD_WORDS_MAX: Final = 64
BAD_WORD_CHARS_MAX: Final = 128
ALLOWED_TOKEN_IDS_MAX: Final = 4096
CHAT_TEMPLATE_CHARS_MAX: Final = 256 * 2**10
TOOLS_MAX: Final = 1024
"""Most tools in one request. OpenAI allows 128, Anthropic any number: agents with several MCP servers send
hundreds."""
TOOL_CHARS_MAX: Final = 64 * 2**10
"""Most characters of one tool definition as JSON."""
CALLS_MAX: Final = 4096
"""Most tool calls in one message, the same as the limit on blocks in an Anthropic message."""
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
"""Names of template variables that `chat_template_kwargs` may not set. Other fields of the request set them,
or they are built in."""
FIELDS_MAX: Final = 128
"""Most fields of any JSON object in a body. Each invalid field costs time and memory, although only one is
reported."""


def one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _is_token_ids(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return not value or ({*map(type, value)} == {int} and min(value) >= 0)


def prompt_list(value: Any) -> Any:
    """Return the value of `prompt` as a list of prompts, each a text or a list of token ids. The value may be
    a single prompt or a list of them."""
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


def role_name(value: str) -> str:
    if value == "function":
        raise PydanticCustomError("role", "role 'function' is not supported; use 'tool'")
    if value not in ROLES:
        raise PydanticCustomError("role", f"the role has to be one of {', '.join(ROLES)}")
    return value


def call_arguments(value: Any) -> Any:
    """Return the arguments of a tool call as JSON text. They may be an object or JSON text, complete or cut
    off."""
    if not isinstance(value, str | dict):
        raise PydanticCustomError("arguments_type", "it has to be a text that holds a JSON object")
    try:
        return arguments_text(value)
    except ValueError:
        raise PydanticCustomError("arguments", "it is no JSON object") from None


def function_name(value: str) -> str:
    if FUNCTION_NAME.fullmatch(value) is None:
        raise PydanticCustomError("name", "it has to be 1 to 128 letters, digits, '_' and '-'")
    return value


def _request_id(value: str) -> str:
    if REQUEST_ID.fullmatch(value) is None:
        raise PydanticCustomError("name", "it has to be 1 to 128 letters, digits and any of ._:/+=@-")
    return value


def prompt_length(value: int) -> int:
    if value == 0:
        raise PydanticCustomError("prompt_length", "it has to be above 0, or -1")
    return value


def check_tool_count(value: Any) -> Any:
    if isinstance(value, list) and len(value) > TOOLS_MAX:
        raise PydanticCustomError("tools", f"it holds {len(value)} tools; at most {TOOLS_MAX} are taken")
    return value


def _words(value: dict[str, Any]) -> dict[str, Any]:
    """Return the variables for a chat template, after checking their number, names and size."""
    if len(value) > WORDS_MAX:
        raise PydanticCustomError("words", f"it holds {len(value)} names; at most {WORDS_MAX} are taken")
    for name in value:
        if name in RESERVED or name.endswith("_token") or not name.isidentifier() or name.startswith("_"):
            raise PydanticCustomError("words", f"'{name[:64]}' is no name that it may give a value to")
    if len(json.dumps(value)) > WORDS_CHARS_MAX:
        raise PydanticCustomError("words", f"it is longer than {WORDS_CHARS_MAX} characters of JSON")
    return value


def read_tool_choice(value: Any) -> Any:
    """Return the parsed value of `tool_choice`: a word, or an object that names functions. Objects may have
    the format of a chat or of the Responses API."""
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


def schema_object(value: Any) -> Any:
    """Return a JSON schema as an object. The value may also be JSON text."""
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


def format_type(value: str) -> str:
    if value == "structural_tag":
        raise PydanticCustomError("unsupported", "it is not supported")
    if value not in FORMATS:
        raise PydanticCustomError("format_type", f"it has to be one of {', '.join(FORMATS)}")
    return value


def token_id_key(key: str) -> str:
    if not (key.isascii() and key.isdecimal() and len(key) <= 10):
        raise PydanticCustomError("logit_bias", "the key has to be a token id")
    return key


def check_bias_count(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > LOGIT_BIAS_MAX:
        raise PydanticCustomError(
            "logit_bias", f"it holds {len(value)} token ids; at most {LOGIT_BIAS_MAX} are taken"
        )
    return value


def check_message_count(value: Any) -> Any:
    """Return the messages, after checking their number. It runs before any message is validated."""
    if isinstance(value, list) and len(value) > MESSAGES_MAX:
        raise PydanticCustomError(
            "messages", f"it holds {len(value)} messages; at most {MESSAGES_MAX} are taken"
        )
    return value


OPTIONS: Final = "x-guidance"
"""Keyword in a JSON schema that holds options of the grammar library (llguidance). Only Baton may set it."""


def none_if_false(value: Any) -> Any:
    """Return None for the value `false`, which SGLang's clients send in a number field if they want no
    log-probabilities. Return any other value unchanged."""
    return None if value is False else value


def _whole(value: Any) -> Any:
    """Return a number without a fraction as an integer, such as `4.0` as 4. Some languages have only one kind
    of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def shown_as(schema: dict[str, Any]) -> WithJsonSchema:
    """Return an annotation with the JSON schema that `/openapi.json` shows for a field validated by a
    function."""
    return WithJsonSchema(schema, mode="validation")


class ChosenFunction(BaseModel):
    name: str


class ChosenTool(BaseModel):
    """Value of `tool_choice` that forces a call of one tool."""

    type: Literal["function"]
    function: ChosenFunction


class ToolsAllowed(BaseModel):
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class AllowedToolsChoice(BaseModel):
    """Value of `tool_choice` that allows some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolsAllowed


Number = Annotated[float, Field(allow_inf_nan=False)]
Whole = Annotated[int, BeforeValidator(_whole)]
RequestId = Annotated[
    str, AfterValidator(_request_id), shown_as({"type": "string", "pattern": f"^{REQUEST_ID.pattern}$"})
]
TokenId = Annotated[Whole, Field(ge=0)]
Logprobs = Annotated[Whole, Field(ge=-1, le=LOGPROBS_MAX)]
"""Type of a field with the number of alternative tokens to return; -1: all tokens of the vocabulary."""
StopString = Annotated[str, StringConstraints(min_length=1, max_length=STOP_STRING_CHARS_MAX)]
StopStrings = Annotated[list[StopString], Field(max_length=STOP_STRINGS_MAX)]
Stop = Annotated[
    list[StopString],
    FailFast(),
    Field(max_length=STOP_STRINGS_MAX),
    BeforeValidator(one_or_many, json_schema_input_type=StopString | StopStrings),
]
LogitBias = Annotated[
    dict[Annotated[str, AfterValidator(token_id_key)], Annotated[Number, Field(ge=-100, le=100)]],
    BeforeValidator(check_bias_count),
    shown_as(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": LOGIT_BIAS_MAX,
        }
    ),
]
FunctionName = Annotated[
    str,
    AfterValidator(function_name),
    shown_as({"type": "string", "pattern": f"^{FUNCTION_NAME.pattern}$"}),
]
TextPrompts = Annotated[list[str], Field(min_length=1, max_length=PROMPTS_MAX)]
TokenIdPrompts = Annotated[
    list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=PROMPTS_MAX)
]
Prompts = Annotated[
    list[str | list[int]],
    BeforeValidator(
        prompt_list,
        json_schema_input_type=str
        | TextPrompts
        | Annotated[list[TokenId], Field(min_length=1)]
        | TokenIdPrompts,
    ),
]
Nothing = Annotated[Any, AfterValidator(_nothing), shown_as({"enum": [None, [], {}]})]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Words = Annotated[dict[str, Any], AfterValidator(_words)]
"""Type of `chat_template_kwargs`: further variables for the chat template, by name."""


@dataclass(frozen=True, slots=True)
class ForcedTool:
    """Parsed value of `tool_choice` that forces a call of one tool."""

    name: str


@dataclass(frozen=True, slots=True)
class AllowedTools:
    """Parsed value of `tool_choice` that lists the tools which may be called. Its `mode` says whether a call
    is required."""

    mode: str
    """`auto`: a tool call is optional. `required`: the answer has to call one of the tools."""
    names: tuple[str, ...]


ToolChoice = Annotated[
    str | ForcedTool | AllowedTools,
    BeforeValidator(
        read_tool_choice,
        json_schema_input_type=Literal["none", "auto", "required"] | ChosenTool | AllowedToolsChoice,
    ),
]
