"""Translation of a request of the Responses API into a chat request.

Later errors of the chat request name the fields of the original body.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter, ValidationError

from baton.api.errors import ApiError, invalid, shown
from baton.api.requests.field_paths import FieldPaths
from baton.api.requests.field_types import MESSAGES_MAX, TOOLS_MAX, AllowedTools, ForcedTool
from baton.api.requests.schemas import ChatRequest, Sampled
from baton.api.requests.tool_names import namespaced_name
from baton.api.requests.validation_errors import first_fault
from baton.api.responses.input_items import ChatItem, CompleteItem, MessageItem, ReferenceItem, items_of
from baton.api.responses.input_messages import MessageBuilder, Placed
from baton.api.responses.response_ids import item_of
from baton.api.responses.response_request import (
    LOGPROBS,
    AdditionalTools,
    FunctionTool,
    NamespaceTool,
    ResponsesRequest,
    TextFormat,
)
from baton.api.responses.response_store import ResponseStore
from baton.api.responses.signed_reasoning import ReasoningSigner

TOLD: Final[TypeAdapter[CompleteItem]] = TypeAdapter(Annotated[CompleteItem, Field(discriminator="type")])
TOO_LONG: Final = "context_length_exceeded"
PREVIOUS: Final = "previous_response_id"
SAME: Final[Mapping[str, str]] = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "tool_calls": "function_call",
}
"""Field of the Responses API, by the field of the chat request into which it is translated. Error messages
about the chat request are rewritten by this table."""


def looked_up(body: ResponsesRequest, kept: ResponseStore, owner: bytes) -> list[Placed]:
    """Return all items of the conversation, stored ones first. Raises ApiError.

    `kept`: store of responses. `owner`: identifier of the caller, whose stored responses are found.
    """
    items = [*_before(body, kept, owner), *_own(body, kept, owner)]
    if not items:
        raise invalid("input", "'input' is empty, and there is nothing before it.")
    if len(items) > MESSAGES_MAX:
        raise invalid(
            PREVIOUS,
            f"'{PREVIOUS}': with it there are {len(items)} items; at most {MESSAGES_MAX} are taken.",
        )
    return items


def _before(body: ResponsesRequest, kept: ResponseStore, owner: bytes) -> Iterator[Placed]:
    if (id_ := body.previous_response_id) is None:
        return
    if (found := kept.find(id_, owner)) is None:
        why = f"'{PREVIOUS}': the answer '{shown(id_)}' is not kept{_why_not(kept)}; send all items."
        raise invalid(PREVIOUS, why, "previous_response_not_found")
    for item in (*found.read(), *found.whole()["output"]):
        yield Placed(_read(item), PREVIOUS)


def _own(body: ResponsesRequest, kept: ResponseStore, owner: bytes) -> Iterator[Placed]:
    if isinstance(body.input, str):
        yield Placed(MessageItem(type="message", role="user", content=body.input), "input", "input")
        return
    for place, item in enumerate(body.input):
        path = f"input[{place}]"
        if isinstance(item, AdditionalTools):
            continue
        if isinstance(item, ChatItem):
            yield from (Placed(each, path + step) for each, step in items_of(item.message))
            continue
        if not isinstance(item, ReferenceItem):
            yield Placed(item, path)
            continue
        if (found := item_of(kept, item.id, owner)) is None:
            why = f"'{path}.id': the item '{shown(item.id)}' is not kept{_why_not(kept)}; send it whole."
            raise invalid(f"{path}.id", why, "item_not_found")
        yield Placed(_read(found), path)


def _why_not(kept: ResponseStore) -> str:
    return " or not yours" if kept.takes else " (--responses-kept is 0)"


def _read(item: Mapping[str, Any]) -> CompleteItem:
    """Return an item of a stored conversation, read from JSON and validated. Raises ApiError."""
    try:
        return TOLD.validate_python(item)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        raise first_fault(faults, item, {}) from None


def functions_of(body: ResponsesRequest) -> dict[str, tuple[str, str | None]]:
    """Return the name and the namespace of each function, by the name that the model knows."""
    told = {}
    for function, namespace, _ in body.functions():
        space = None if namespace is None else namespace.name
        told[namespaced_name(function.name, space)] = function.name, space
    return told


def chat_of(
    body: ResponsesRequest, items: Sequence[Placed], carrier: ReasoningSigner, terms: FieldPaths
) -> ChatRequest:
    """Return the chat request for a body and the items of its conversation.

    Fields that only affect the form of the response are left out. Raises ApiError with the chat request's
    field names, which `terms` translates.
    """
    terms.paths |= SAME
    logprobs = LOGPROBS in body.include
    if body.top_logprobs and not logprobs:
        raise invalid("top_logprobs", f"'top_logprobs' needs '{LOGPROBS}' in 'include'.")
    told: dict[str, Any] = {
        name: getattr(body, name) for name in Sampled.model_fields if name in body.model_fields_set
    }
    told |= {
        "model": body.model,
        "stream": body.stream,
        "messages": MessageBuilder(carrier, terms).of(body.instructions, items),
        "tools": [*_tools(body, terms)],
        "tool_choice": _choice(body),
        "parallel_tool_calls": body.parallel_tool_calls,
        "max_completion_tokens": body.max_output_tokens,
        "logprobs": logprobs,
        "top_logprobs": body.top_logprobs if logprobs else None,
        "reasoning_effort": body.reasoning.effort,
        "response_format": _format(body.text.format),
        "chat_template_kwargs": _words(body),
    }
    try:
        return ChatRequest(**told)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        raise first_fault(faults, told, {}) from None


def _tools(body: ResponsesRequest, terms: FieldPaths) -> Iterator[dict[str, Any]]:
    for place, (function, namespace, path) in enumerate(body.functions()):
        if place >= TOOLS_MAX:
            raise invalid("tools", f"'tools' holds more than {TOOLS_MAX} functions.")
        terms.paths[f"tools[{place}]"] = path
        terms.paths[f"tools[{place}].function"] = path
        yield {"type": "function", "function": _function(function, namespace)}


def dropped_tools(body: ResponsesRequest, *, is_codex: bool) -> list[str]:
    """Return the names of the tools that are left out of the chat request, for a response header.

    `is_codex`: whether the client is Codex, which sends tools of OpenAI's servers to every server. Raises
    ApiError for a tool that may not be left out.
    """
    dropped = []
    for tool, path in body.other_tools():
        if not (tool.optional or is_codex):
            kinds = "'function' or 'namespace', unless the tool has 'optional' as true"
            why = f"'{shown(tool.type)}' is not served; it has to be {kinds}"
            raise invalid(f"{path}.type", f"Invalid value for '{path}.type': {why}.")
        dropped.append(tool.title)
    return dropped


@contextmanager
def nothing_dropped(body: ResponsesRequest) -> Iterator[None]:
    """If the block raises an error for a too long conversation, add to its message that `truncation: "auto"`
    drops nothing here."""
    try:
        yield
    except ApiError as error:
        if body.truncation != "auto" or error.code != TOO_LONG:
            raise
        why = f"{error} 'truncation' \"auto\" drops nothing here; send a shorter conversation."
        raise ApiError(error.status, why, param=error.param, code=error.code) from None


def _function(function: FunctionTool, namespace: NamespaceTool | None) -> dict[str, Any]:
    told: dict[str, Any] = {
        name: getattr(function, name)
        for name in ("name", "description", "parameters", "strict")
        if name in function.model_fields_set
    }
    if namespace is not None:
        told["name"] = namespaced_name(function.name, namespace.name)
        told["description"] = "\n".join(filter(None, (namespace.description, function.description)))
    return told


def _choice(body: ResponsesRequest) -> str | ForcedTool | AllowedTools:
    """Return the request's tool choice for the chat request. A function is named as the model knows it, with
    its namespace.

    The request may leave the namespace out if the function's name is unique.
    """
    choice = body.tool_choice
    match choice:
        case ForcedTool(name):
            return ForcedTool(_named(body, name))
        case AllowedTools(mode, names):
            return AllowedTools(mode, tuple(_named(body, name) for name in names))
    return choice


def _named(body: ResponsesRequest, name: str) -> str:
    functions = functions_of(body)
    if name in functions:
        return name
    meant = [told for told, (own, _) in functions.items() if own == name]
    return meant[0] if len(meant) == 1 else name


def _format(asked: TextFormat | None) -> dict[str, Any] | None:
    """Return the `response_format` of the chat request, or None. Raises ApiError."""
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return {"type": "json_object"}
    if asked.schema_ is None:
        param = "text.format.schema"
        raise invalid(param, f"Missing required parameter: '{param}'.", "missing_required_parameter")
    named = {"name": asked.name, "schema": asked.schema_, "strict": bool(asked.strict)}
    return {"type": "json_schema", "json_schema": named}


def _words(body: ResponsesRequest) -> dict[str, Any]:
    """Return the variables for the chat template that the request sets, including the verbosity of
    the text."""
    verbosity = body.text.verbosity
    return ({} if verbosity is None else {"verbosity": verbosity}) | body.chat_template_kwargs
