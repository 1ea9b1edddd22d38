"""Fields of a request of the Responses API that its response repeats."""

from collections.abc import Sequence
from typing import Any

from baton.api.requests.field_types import AllowedTools, ForcedTool
from baton.api.requests.schemas import RecommendedSampling
from baton.api.responses.response_objects import ResponseHead
from baton.api.responses.response_request import (
    FunctionTool,
    NamespaceTool,
    OtherTool,
    ResponsesRequest,
    TextFormat,
)


def head_of(
    body: ResponsesRequest,
    id_: str,
    model: str,
    recommended: RecommendedSampling,
    created_s: int,
    *,
    kept: bool,
) -> ResponseHead:
    """Return the fields of a `response` object that are known before its output.

    `recommended`: sampling parameters in use. `created_s`: time of the request, seconds since the epoch.
    `kept`: whether the response will be stored.
    """
    reasoning = body.reasoning
    return {
        "id": id_,
        "object": "response",
        "created_at": created_s,
        "completed_at": None,
        "model": model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "metadata": dict(body.metadata),
        "background": False,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": reasoning.effort, "summary": body.summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": kept,
        "temperature": recommended.temperature,
        "text": {"format": _format(body.text.format), "verbosity": body.text.verbosity or "medium"},
        "tool_choice": _choice(body.tool_choice),
        "tools": _tools(body.tools),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": recommended.top_p,
        "truncation": body.truncation,
        "usage": None,
        "user": body.user,
    }


def _format(chosen: TextFormat | None) -> dict[str, Any]:
    if chosen is None:
        return {"type": "text"}
    return chosen.model_dump(by_alias=True, exclude_none=True)


def _choice(choice: str | ForcedTool | AllowedTools) -> str | dict[str, Any]:
    match choice:
        case ForcedTool(name):
            return {"type": "function", "name": name}
        case AllowedTools(mode, names):
            tools = [{"type": "function", "name": name} for name in names]
            return {"type": "allowed_tools", "mode": mode, "tools": tools}
        case _:
            return choice


def _tools(tools: Sequence[FunctionTool | NamespaceTool | OtherTool]) -> list[dict[str, Any]]:
    """Return the supported tools of a request, in the form in which its response repeats them."""
    return [_tool(tool) for tool in tools if not isinstance(tool, OtherTool)]


def _tool(tool: FunctionTool | NamespaceTool) -> dict[str, Any]:
    if isinstance(tool, NamespaceTool):
        inner = _tools(tool.tools)
        return {"type": tool.type, "name": tool.name, "description": tool.description, "tools": inner}
    return {
        "type": tool.type,
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }
