"""Schema of a request of the Responses API.

It has OpenAI's fields for texts and functions, and the sampling fields that all routes share.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    Tag,
)
from pydantic_core import PydanticCustomError

from baton.api.errors import shown
from baton.api.requests.field_types import (
    TOOLS_MAX,
    AllowedTools,
    ForcedTool,
    Logprobs,
    Nothing,
    Whole,
    Words,
    read_tool_choice,
)
from baton.api.requests.schemas import Function, JsonSchema, Sampled, Shape
from baton.api.requests.unsupported_fields import UnsupportedFields
from baton.api.responses.input_items import ChatItem, Id, Item, few_items, kind_of_input, with_type
from baton.api.responses.response_unsupported import RESPONSES_UNSUPPORTED

LOGPROBS: Final = "message.output_text.logprobs"
ENCRYPTED_REASONING: Final = "reasoning.encrypted_content"
METADATA_MAX: Final = 16
METADATA_NAME_CHARS_MAX: Final = 64
METADATA_CHARS_MAX: Final = 512
"""Most characters of one value in `metadata`. The three limits on `metadata` are OpenAI's."""


def _included(value: str) -> str:
    if value not in (LOGPROBS, ENCRYPTED_REASONING):
        raise PydanticCustomError(
            "include", f"'{shown(value)}' is not served; {LOGPROBS} and {ENCRYPTED_REASONING} are"
        )
    return value


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


def _tool_kind(value: Any) -> str:
    """Return the tag that selects the schema of a tool, by the tool's type."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return kind if kind in ("function", "namespace") else "other" if isinstance(kind, str) else "function"


def _inner_kind(value: Any) -> str:
    """Return the tag that selects the schema of a tool in a namespace."""
    kind = _tool_kind(value)
    return "other" if kind == "namespace" else kind


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]
    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    output_schema: Nothing = None


class OtherTool(BaseModel):
    """A tool of a type that is not supported: one that a server runs, or one without a schema.

    It is left out if the request marks it as optional, or if the client is an agent that always sends it.
    Otherwise it is refused.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)
    type: str
    name: str | None = None
    optional: bool = False

    @property
    def title(self) -> str:
        """Type and name of the tool, as printable text for a response header."""
        text = self.type if self.name is None else f"{self.type} {self.name}"
        return re.sub(r"[^!-+\--~ ]", "?", text)


class NamespaceTool(Shape):
    """A group of functions under the name of a namespace."""

    type: Literal["namespace"]
    name: Id
    description: str = ""
    tools: Annotated[
        list[
            Annotated[
                Annotated[FunctionTool, Tag("function")] | Annotated[OtherTool, Tag("other")],
                Discriminator(_inner_kind),
            ]
        ],
        FailFast(),
        BeforeValidator(_few_tools),
        Field(min_length=1),
    ]


CHOICES: Final = Literal["none", "auto", "required"] | dict[str, Any]
AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[OtherTool, Tag("other")],
    Discriminator(_tool_kind),
]
Tools = Annotated[list[AnyTool], FailFast(), BeforeValidator(_few_tools)]


class AdditionalTools(Shape):
    """A conversation item that adds tools, as Codex sends it."""

    type: Literal["additional_tools"]
    role: str = "developer"
    id: Id | None = None
    tools: Tools = Field(default_factory=list)


def _item_kind(value: Any) -> str:
    return "chat" if isinstance(value, ChatItem) else "item"


OneItem = Annotated[
    Annotated[ChatItem, Tag("chat")]
    | Annotated[Annotated[Item | AdditionalTools, Field(discriminator="type")], Tag("item")],
    Discriminator(_item_kind),
    BeforeValidator(with_type),
]
Input = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[OneItem], Field(fail_fast=True), BeforeValidator(few_items), Tag("items")],
    Discriminator(kind_of_input),
]


class TextFormat(Shape):
    """Format of the answer: `text`, `json_object`, or `json_schema` with a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
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
    """Older name of the field `summary`, which asks for a summary of the reasoning."""
    context: Literal["auto", "all_turns"] | None = None
    """Which reasoning of earlier turns the model sees. Here it sees all that is sent and that its chat
    template shows."""
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(Shape):
    include_usage: bool = False
    """Whether a stream has the usage. The field is ignored, because the last event always has it."""
    include_obfuscation: bool = False
    """Whether events are padded against traffic analysis. The field is accepted, and Baton never
    pads them."""


class ResponsesRequest(Sampled):
    """Body of POST /v1/responses."""

    unserved: ClassVar[UnsupportedFields] = RESPONSES_UNSUPPORTED

    input: Input
    instructions: str | None = None
    """System instructions for this response alone. A later response with this one as `previous_response_id`
    does not inherit them."""
    previous_response_id: Id | None = None
    model: str | None = None
    max_output_tokens: Annotated[Whole, Field(ge=1)] | None = None
    max_tool_calls: Annotated[Whole, Field(ge=1)] | None = None
    """Most calls of tools that the server itself would run. Baton runs no tools and ignores the field."""
    top_logprobs: Logprobs | None = None
    include: Annotated[list[Annotated[str, AfterValidator(_included)]], FailFast(), Field(max_length=64)] = (
        Field(default_factory=list)
    )
    tools: Tools = Field(default_factory=list)
    tool_choice: Annotated[
        str | ForcedTool | AllowedTools,
        BeforeValidator(read_tool_choice, json_schema_input_type=CHOICES),
    ] = "auto"
    parallel_tool_calls: bool = True
    text: TextConfig = Field(default_factory=TextConfig)
    reasoning: ReasoningConfig = Field(default_factory=ReasoningConfig)
    metadata: Annotated[dict[str, str], AfterValidator(_metadata)] = Field(default_factory=dict)
    truncation: Literal["auto", "disabled"] = "disabled"
    """Whether a conversation is cut to fit the context. Here nothing is cut, and with `auto` the error says
    so."""
    store: bool = True
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: Words = Field(default_factory=dict)
    user: str | None = None
    """Identifier of the client's end user. It is ignored and repeated in the response, like the three fields
    after it."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None

    @property
    def summary(self) -> str | None:
        """Kind of summary of the reasoning that the request asks for (auto, concise, detailed). None if it
        asks for none."""
        return self.reasoning.summary or self.reasoning.generate_summary

    def tool_lists(self) -> Iterator[tuple[str, Sequence["FunctionTool | NamespaceTool | OtherTool"]]]:
        """Yield all lists of tools in the request, each with its path in the body."""
        yield "tools", self.tools
        for place, item in enumerate(() if isinstance(self.input, str) else self.input):
            if isinstance(item, AdditionalTools):
                yield f"input[{place}].tools", item.tools

    def functions(self) -> Iterator[tuple[FunctionTool, NamespaceTool | None, str]]:
        """Yield each function of the request, its namespace or None, and the path of its list of tools. A
        function that several lists repeat is yielded once."""
        seen: list[tuple[FunctionTool, str | None]] = []
        for path, tools in self.tool_lists():
            for function, namespace, where in _functions(tools, path):
                known = (function, None if namespace is None else namespace.name)
                if path != "tools" and known in seen:
                    continue
                seen.append(known)
                yield function, namespace, where

    def other_tools(self) -> Iterator[tuple[OtherTool, str]]:
        """Yield the tools of the request whose type Baton does not support, each with its path in
        the body."""
        for path, tools in self.tool_lists():
            for place, tool in enumerate(tools):
                if isinstance(tool, OtherTool):
                    yield tool, f"{path}[{place}]"
                for inner, each in enumerate(tool.tools if isinstance(tool, NamespaceTool) else ()):
                    if isinstance(each, OtherTool):
                        yield each, f"{path}[{place}].tools[{inner}]"


def _functions(
    tools: Sequence[FunctionTool | NamespaceTool | OtherTool], path: str
) -> Iterator[tuple[FunctionTool, NamespaceTool | None, str]]:
    for place, tool in enumerate(tools):
        if isinstance(tool, FunctionTool):
            yield tool, None, f"{path}[{place}]"
        for inner, function in enumerate(tool.tools if isinstance(tool, NamespaceTool) else ()):
            if isinstance(function, FunctionTool) and isinstance(tool, NamespaceTool):
                yield function, tool, f"{path}[{place}].tools[{inner}]"
