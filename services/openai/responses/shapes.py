"""Which fields does a request of the Responses API have?

Those that OpenAI's has for texts and functions, and beside them the sampling fields of the other routes.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BeforeValidator, FailFast, Field, StringConstraints
from pydantic_core import PydanticCustomError

from services.openai.errors import shown
from services.openai.responses.items import Id, Input
from services.openai.responses.unserved import OF_RESPONSES
from services.openai.schemas import (
    TOOLS_MAX,
    AllowedTools,
    Function,
    JsonSchema,
    Logprobs,
    NamedTool,
    Nothing,
    Sampled,
    Shape,
    Whole,
    Words,
)
from services.openai.unsupported import Unserved

LOGPROBS: Final = "message.output_text.logprobs"
THOUGHTS: Final = "reasoning.encrypted_content"
METADATA_MAX: Final = 16
METADATA_NAME_CHARS_MAX: Final = 64
METADATA_CHARS_MAX: Final = 512
"""OpenAI's three."""
LABEL_CHARS_MAX: Final = 512
FORMAT_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def _included(value: str) -> str:
    if value not in (LOGPROBS, THOUGHTS):
        raise PydanticCustomError("include", f"'{shown(value)}' is not served; {LOGPROBS} and {THOUGHTS} are")
    return value


def _format_name(value: str) -> str:
    if FORMAT_NAME.fullmatch(value) is None:
        raise PydanticCustomError("name", "it has to be 1 to 64 letters, digits, '_' and '-'")
    return value


def _choice(value: Any) -> Any:
    """A word, or an object that names one function, or several."""
    if value in ("none", "auto", "required"):
        return value
    if isinstance(value, str):
        raise PydanticCustomError("tool_choice", "it has to be none, auto, required, or name a function")
    match value:
        case {"type": "function", "name": str(name)}:
            return NamedTool(name)
        case {"type": "allowed_tools", "mode": ("auto" | "required") as mode, "tools": list(tools)} if (
            len(tools) <= TOOLS_MAX
        ):
            return AllowedTools(mode, tuple(map(_allowed, tools)))
        case {"type": str(kind)} if kind not in ("function", "allowed_tools"):
            raise PydanticCustomError(
                "tool_choice", f"tools of the type '{shown(kind)}' are not served; functions are"
            )
        case dict():
            raise PydanticCustomError(
                "tool_choice", "an object has to name a function, or be OpenAI's allowed_tools"
            )
    raise PydanticCustomError("choice_type", "it has to be a text or an object")


def _allowed(tool: Any) -> str:
    match tool:
        case {"type": "function", "name": str(name)}:
            return name
    raise PydanticCustomError("tool_choice", "one of its tools is no function with a name")


def _metadata(value: dict[str, str]) -> dict[str, str]:
    if len(value) > METADATA_MAX:
        raise PydanticCustomError(
            "metadata", f"it holds {len(value)} names; at most {METADATA_MAX} are taken"
        )
    for name, text in value.items():
        if len(name) > METADATA_NAME_CHARS_MAX or len(text) > METADATA_CHARS_MAX:
            most = f"{METADATA_NAME_CHARS_MAX} and {METADATA_CHARS_MAX} characters"
            raise PydanticCustomError("metadata", f"a name or a value of it is longer than {most}")
    return value


def _few_tools(value: Any) -> Any:
    if isinstance(value, list) and len(value) > TOOLS_MAX:
        raise PydanticCustomError("tools", f"it holds {len(value)} tools; at most {TOOLS_MAX} are taken")
    return value


Label = Annotated[str, StringConstraints(max_length=LABEL_CHARS_MAX)]


class FunctionTool(Function):
    """That a model may call."""

    type: Literal["function"]
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    output_schema: Nothing = None


class NamespaceTool(Shape):
    """Functions under one name."""

    type: Literal["namespace"]
    name: Id
    description: str = ""
    tools: Annotated[
        list[FunctionTool],
        FailFast(),
        BeforeValidator(_few_tools),
        Field(min_length=1),
    ]


AnyTool = Annotated[FunctionTool | NamespaceTool, Field(discriminator="type")]


class TextFormat(Shape):
    """`text`, `json_object`, or `json_schema` with a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, AfterValidator(_format_name)] | None = None
    schema_: JsonSchema | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(Shape):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningConfig(Shape):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """The same, by its old name."""
    context: Literal["auto", "all_turns"] | None = None
    """Which thoughts of earlier turns the model is told: all that are sent, as far as its chat template shows
    them."""
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(Shape):
    include_usage: bool = False
    """The last event has it, whether it is asked for or not."""
    include_obfuscation: bool = False
    """Padding against traffic analysis; never added here."""


class ResponsesRequest(Sampled):
    """POST /v1/responses"""

    unserved: ClassVar[Unserved] = OF_RESPONSES

    input: Input
    instructions: str | None = None
    """Of this answer alone: an answer that goes on from it does not have them."""
    previous_response_id: Id | None = None
    model: str | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1)] | None = None
    max_tool_calls: Annotated[Whole, Field(ge=1)] | None = None
    """Of tools that a server runs. None are run here, so it is kept to."""
    top_logprobs: Logprobs | None = None
    include: Annotated[list[Annotated[str, AfterValidator(_included)]], FailFast(), Field(max_length=64)] = (
        Field(default_factory=list)
    )
    tools: Annotated[list[AnyTool], FailFast(), BeforeValidator(_few_tools)] = Field(default_factory=list)
    tool_choice: Annotated[
        str | NamedTool | AllowedTools,
        BeforeValidator(_choice, json_schema_input_type=Literal["none", "auto", "required"] | dict[str, Any]),
    ] = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = Field(default_factory=TextConfig)
    reasoning: ReasoningConfig = Field(default_factory=ReasoningConfig)
    metadata: Annotated[dict[str, str], AfterValidator(_metadata)] = Field(default_factory=dict)
    store: bool = True
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: Words = Field(default_factory=dict)
    user: Label | None = None
    """This and the next three: of the platform, and said again in the answer."""
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    service_tier: Label | None = None

    @property
    def summary(self) -> str | None:
        """As what thoughts are shown."""
        return self.reasoning.summary or self.reasoning.generate_summary

    def functions(self) -> Iterator[tuple[FunctionTool, NamespaceTool | None, str]]:
        """Each with the namespace that it is in, and the path by which it was sent."""
        for place, tool in enumerate(self.tools):
            if isinstance(tool, FunctionTool):
                yield tool, None, f"tools[{place}]"
                continue
            for inner, function in enumerate(tool.tools):
                yield function, tool, f"tools[{place}].tools[{inner}]"
