"""Types of a response in the Responses API, of its items, and of the events that build it."""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypeAliasType, TypedDict

from baton.api.generation.logprob_objects import ChosenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[dict[str, Any]]
    logprobs: list[ChosenLogprob]


class OutputReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputSummaryText(TypedDict):
    type: Literal["summary_text"]
    text: str


class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class OutputReasoning(TypedDict):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[OutputSummaryText]
    content: list[OutputReasoningText]
    encrypted_content: str | None


class CalledName(TypedDict):
    call_id: str
    name: str
    namespace: NotRequired[str]


class OutputCall(CalledName):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    arguments: str
    """Arguments of the tool call, as the text of a JSON object."""


OutputItem = OutputMessage | OutputReasoning | OutputCall


class CachedTokens(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class ReasoningTokens(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseError(TypedDict):
    code: Literal["rate_limit_exceeded", "server_error"]
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ReasoningInUse(TypedDict):
    effort: str | None
    summary: str | None


class TextInUse(TypedDict):
    format: dict[str, Any]
    verbosity: str


class ResponseHead(TypedDict):
    """Fields of a response that are known before its output. Most of them repeat the request's fields."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    model: str
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    metadata: dict[str, str]
    background: bool
    max_output_tokens: int | None
    max_tool_calls: int | None
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningInUse
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: TextInUse
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None


class ResponseAnswer(ResponseHead):
    status: ResponseStatus
    output: list[OutputItem]


class Numbered(TypedDict):
    sequence_number: NotRequired[int]
    """Number of the event in its stream, from 0. Every event that is sent has one."""


class InItem(Numbered):
    item_id: str
    output_index: int


class InMessage(InItem):
    content_index: int


class InSummary(InItem):
    summary_index: int


class ResponseEvent(Numbered):
    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseAnswer


class ItemEvent(Numbered):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class ContentPartEvent(InMessage):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText | OutputReasoningText


class SummaryPartEvent(InSummary):
    type: Literal["response.reasoning_summary_part.added", "response.reasoning_summary_part.done"]
    part: OutputSummaryText


class OutputTextDelta(InMessage):
    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[ChosenLogprob]


class OutputTextDone(InMessage):
    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[ChosenLogprob]


class ReasoningTextDelta(InMessage):
    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningTextDone(InMessage):
    type: Literal["response.reasoning_text.done"]
    text: str


class SummaryTextDelta(InSummary):
    type: Literal["response.reasoning_summary_text.delta"]
    delta: str


class SummaryTextDone(InSummary):
    type: Literal["response.reasoning_summary_text.done"]
    text: str


class ArgumentsDelta(InItem):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(InItem):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str
    """Arguments of the whole tool call, as the text of a JSON object."""


class ErrorEvent(Numbered):
    type: Literal["error"]
    code: str | None
    message: str
    param: str | None


ResponsesEvent = TypeAliasType(
    "ResponsesEvent",
    Annotated[
        ResponseEvent
        | ItemEvent
        | ContentPartEvent
        | SummaryPartEvent
        | OutputTextDelta
        | OutputTextDone
        | ReasoningTextDelta
        | ReasoningTextDone
        | SummaryTextDelta
        | SummaryTextDone
        | ArgumentsDelta
        | ArgumentsDone
        | ErrorEvent,
        Field(description="An event of the Responses API. Its name is its `type`."),
    ],
)


class ResponseTokenCount(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: bool


class InputItems(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
