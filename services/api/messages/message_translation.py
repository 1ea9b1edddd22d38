"""Translation of a request of Anthropic's Messages API into a chat request.

    system                      becomes a system message
    text                        a part of a message's content
    thinking                    the message's reasoning; what only Anthropic can read is left out
    tool_use                    a tool call
    tool_result                 a message of the role tool, before the user's text beside it
    system among the messages   text of the user, once the conversation has begun

A system message within the conversation is written after the user's text. If there is none, it is written
after the last tool result, because a user's message ends the model's reasoning.

Consecutive messages of one role are one turn. `FieldPaths` records from which path of the body each part
came.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from baton.api.errors import ApiError, invalid
from baton.api.messages.message_request import (
    Block,
    CountRequest,
    MessagesRequest,
    OutputConfig,
    RedactedThinking,
    TextBlockParam,
    ThinkingBlockParam,
    ToolResult,
    ToolUse,
)
from baton.api.requests.field_paths import FieldPaths, made
from baton.api.requests.schemas import ChatRequest, Sampled

BETWEEN: Final = "\n\n"
"""Text that separates the texts of two messages that become one message of the chat."""
BILLING: Final = "x-anthropic-billing-header:"
"""Beginning of a system text with which Claude Code tells Anthropic the payer. The text is left out: it comes
first and differs in each request, so that no two prompts would share a prefix."""
WRONG: Final = "Error: "
"""Text that is put before the result of a tool call, in the prompt, if the tool failed."""
UNTHREADED: Final = (
    "'thread' is not supported: no conversation is kept; send the whole of it without 'thread'."
)
"""Error message for a request with `thread`. The error's code makes Anthropic's client library continue
without `thread`."""
SHARED: Final = frozenset(Sampled.model_fields)
OF_THE_ASSISTANT: Final = (ToolUse, ThinkingBlockParam, RedactedThinking)


@dataclass(slots=True)
class _ChatTurn:
    """Consecutive messages of one role, which become one chat message. Tool results in them become messages
    of the role tool before it."""

    role: str
    here: str
    """Path of the turn's first message in the request body, such as `messages[0]`."""
    texts: list[tuple[str, str]] = field(default_factory=list)
    """Texts of the turn, each with its path in the request body, such as `messages[0].content[1].text`."""
    reasoning: list[tuple[str, str]] = field(default_factory=list)
    calls: list[tuple[ToolUse, str]] = field(default_factory=list)
    results: list[tuple[ToolResult, str]] = field(default_factory=list)
    said: bool = False
    """Whether one of the texts is from a message of the turn's own role, and not from a system message."""


def translated(body: CountRequest) -> tuple[ChatRequest, FieldPaths]:
    """Return the chat request for a body, and the body's paths of its fields.

    Raises ApiError, which names fields by the body's paths.
    """
    if body.thread is not None:
        raise ApiError(400, UNTHREADED, param="thread", code="thread_unsupported_request")
    terms = FieldPaths({"tool_calls": "tool_use"})
    messages = [each for turn in _turns(body) for each in _messages_of(turn)]
    for place, message in enumerate(messages):
        for name, path in message.pop("paths").items():
            terms.paths[f"messages[{place}]{name}"] = path
    fields: dict[str, Any] = {"model": body.model, "messages": messages, **_thinking(body)}
    fields |= _tools(body, terms)
    fields |= _answer_constraint(body, terms)
    if messages[-1]["role"] == "assistant":
        _check_continued(messages[-1], terms.own(f"messages[{len(messages) - 1}]"))
        fields["continue_final_message"] = True
    if isinstance(body, MessagesRequest):
        fields |= {name: getattr(body, name) for name in SHARED & body.model_fields_set}
        fields |= {"max_tokens": body.max_tokens, "stream": body.stream}
        if body.stop_sequences and body.stop:
            raise invalid("stop", "Give 'stop_sequences' or 'stop', not both.")
        if body.stop_sequences:
            fields["stop"] = body.stop_sequences
            terms.paths["stop"] = "stop_sequences"
    return made(ChatRequest, fields, terms), terms


def thinks(body: CountRequest) -> bool:
    """Return whether the body asks for reasoning. If not, no reasoning is returned, as in Anthropic's API."""
    return body.thinking is not None and body.thinking.type != "disabled"


def _turns(body: CountRequest) -> Iterator[_ChatTurn]:
    turn = _ChatTurn("system", "system")
    _add(turn, body.system, "system")
    for place, message in enumerate(body.messages):
        here = f"messages[{place}]"
        role = message.role
        if role == "system" and turn.role != "system":
            role = "user"
        if role != turn.role:
            if turn.texts or turn.role != "system":
                yield turn
            turn = _ChatTurn(role, here)
        _check_role(message.role, message.content, here)
        _add(turn, message.content, f"{here}.content", said=message.role == role)
    yield turn


def _check_role(role: str, content: str | Sequence[Block], here: str) -> None:
    for place, block in enumerate(content):
        if isinstance(block, ToolResult) and role != "user":
            raise _misplaced(f"{here}.content[{place}]", "a tool_result belongs to a user's message")
        if isinstance(block, OF_THE_ASSISTANT) and role != "assistant":
            raise _misplaced(f"{here}.content[{place}]", f"a {block.type} belongs to an assistant's message")


def _misplaced(path: str, why: str) -> ApiError:
    return invalid(path, f"Invalid value for '{path}': {why}.")


def _add(turn: _ChatTurn, content: str | Sequence[Block], here: str, *, said: bool = True) -> None:
    """Add the content of one message to the turn that it is part of.

    `here`: path of the content in the request body. `said`: whether the message has the turn's own role.
    """
    first = len(turn.texts)
    if isinstance(content, str):
        _add_text(turn, content, here)
    else:
        for place, block in enumerate(content):
            _add_block(turn, block, f"{here}[{place}]")
    if first < len(turn.texts):
        turn.said = turn.said or said
        if first:
            text, path = turn.texts[first]
            turn.texts[first] = BETWEEN + text, path


def _add_block(turn: _ChatTurn, block: Block, path: str) -> None:
    match block:
        case TextBlockParam(text=text):
            _add_text(turn, text, f"{path}.text")
        case ThinkingBlockParam(thinking=text):
            turn.reasoning.append((text, path))
        case ToolUse():
            turn.calls.append((block, path))
        case ToolResult():
            turn.results.append((block, path))
        case RedactedThinking():
            pass


def _add_text(turn: _ChatTurn, text: str, path: str) -> None:
    if text and not (turn.role == "system" and text.startswith(BILLING)):
        turn.texts.append((text, path))


def _messages_of(turn: _ChatTurn) -> Iterator[dict[str, Any]]:
    """Yield the chat messages of a turn. `paths` in each message maps its fields to the body's paths."""
    if turn.results:
        *results, (last, path) = turn.results
        yield from (_result(result, path) for result, path in results)
        yield _result(last, path, () if turn.said else turn.texts)
        if not turn.said:
            return
    texts = [text for text, _ in turn.texts]
    said: dict[str, Any] = {"role": turn.role, "content": _parts(texts)}
    content = turn.here if turn.here == "system" else f"{turn.here}.content"
    paths = {"": turn.here, ".content": turn.texts[0][1] if len(texts) == 1 else content}
    if len(texts) > 1:
        paths |= _paths(turn.texts)
    if turn.reasoning:
        said["reasoning_content"] = BETWEEN.join(text for text, _ in turn.reasoning)
        paths[".reasoning_content"] = f"{turn.reasoning[0][1]}.thinking"
    if turn.calls:
        said["tool_calls"] = [_call(call) for call, _ in turn.calls]
        said["content"] = said["content"] or None
    for place, (_, path) in enumerate(turn.calls):
        here = f".tool_calls[{place}]"
        paths |= {here: path, f"{here}.function": path, f"{here}.function.arguments": f"{path}.input"}
    yield {**said, "paths": paths}


def _result(result: ToolResult, path: str, behind: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """Return the chat message for a tool result.

    `path`: path of the result in the body. `behind`: texts that follow the result, with their paths.
    """
    content = result.content
    texts = [content] if isinstance(content, str) else [block.text for block in content]
    if result.is_error:
        texts = [WRONG + "".join(texts[:1]), *texts[1:]]
    paths = {"": path, ".tool_call_id": f"{path}.tool_use_id"} | _paths(behind, len(texts))
    if behind and isinstance(content, str):
        paths[".content[0].text"] = f"{path}.content"
    between = BETWEEN if any(texts) else ""
    texts += [(between if place == 0 else "") + text for place, (text, _) in enumerate(behind)]
    told = {"role": "tool", "tool_call_id": result.tool_use_id, "content": _parts(texts)}
    return {**told, "paths": paths}


def _paths(texts: Sequence[tuple[str, str]], first: int = 0) -> dict[str, str]:
    """Return the paths of a message's texts in the request body, by their paths in the chat message.

    `texts`: pairs of text and path. `first`: index of the first text in the chat message.
    """
    return {f".content[{place}].text": path for place, (_, path) in enumerate(texts, first)}


def _parts(texts: Sequence[str]) -> Any:
    return "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]


def _call(call: ToolUse) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}


def _check_continued(message: Mapping[str, Any], path: str) -> None:
    if message.get("tool_calls"):
        raise invalid(path, f"'{path}': behind a tool_use comes its tool_result, and no answer that goes on.")


def _thinking(body: CountRequest) -> dict[str, Any]:
    """Return the fields of the chat request that turn reasoning on or off.

    The variable of the chat template is given under both names that templates know.
    """
    on = thinks(body)
    words = {"enable_thinking": on, "thinking": on} | body.chat_template_kwargs
    return {"chat_template_kwargs": words, "include_reasoning": on}


def _tools(body: CountRequest, terms: FieldPaths) -> dict[str, Any]:
    tools = []
    for place, tool in enumerate(body.tools):
        function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        if tool.strict is not None:
            function["strict"] = tool.strict
        tools.append({"type": "function", "function": function})
        here = f"tools[{place}]"
        terms.paths |= {f"{here}.function": here, f"{here}.function.parameters": f"{here}.input_schema"}
    fields: dict[str, Any] = {"tools": tools}
    choice = body.tool_choice
    if choice is None:
        return fields
    match choice.type:
        case "tool" if choice.name is None:
            raise _missing("tool_choice.name")
        case "tool":
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
            terms.paths["tool_choice"] = "tool_choice.name"
        case "any":
            fields["tool_choice"] = "required"
        case _:
            fields["tool_choice"] = choice.type
    return {**fields, "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _answer_constraint(body: CountRequest, terms: FieldPaths) -> dict[str, Any]:
    """Return the fields of the chat request for the answer's format and the reasoning effort."""
    config = body.output_config or OutputConfig()
    fields: dict[str, Any] = {} if config.effort is None else {"reasoning_effort": config.effort}
    if config.format is not None and body.output_format is not None:
        raise invalid("output_format", "Give 'output_config.format' or 'output_format', not both.")
    form = config.format or body.output_format
    if form is None:
        return fields
    param = "output_format" if config.format is None else "output_config.format"
    terms.paths |= {"response_format": param, "response_format.json_schema.schema": f"{param}.schema"}
    schema = {"name": "answer", "schema": form.schema_, "strict": True}
    return {**fields, "response_format": {"type": "json_schema", "json_schema": schema}}


def _missing(param: str) -> ApiError:
    return invalid(param, f"Missing required parameter: '{param}'.", "missing_required_parameter")
