"""Functions that read the options of a generation request from its body, and check for contradicting
fields."""

from collections.abc import Sequence
from dataclasses import replace

from baton.api.errors import ApiError, invalid, shown, unknown_model
from baton.api.requests.field_types import COMPLETION_TOKENS_DEFAULT, AllowedTools, ForcedTool
from baton.api.requests.meaning import Meaning, OfferedTool, ReasoningOptions, ToolOptions
from baton.api.requests.schemas import ChatRequest, CompletionRequest, GenerationRequest, Tool


def check_model(name: str | None, names: Sequence[str]) -> None:
    """Raise ApiError (404) if `name` is given and is not one of the served model's `names`."""
    if name is not None and name not in names:
        raise unknown_model(name)


def request_id_of(body: GenerationRequest) -> str | None:
    """Return the request id that the body gives, or None. Raises ApiError if its two fields for it differ."""
    if body.rid is not None and body.request_id is not None and body.rid != body.request_id:
        raise invalid("rid", "'rid' and 'request_id' differ; give one of them.")
    return body.request_id or body.rid


def chat_meaning(body: ChatRequest, *, clips: bool = False) -> Meaning:
    """Return the parsed options of a chat. `clips`: lower `max_tokens` to what fits. Raises ApiError if
    fields contradict each other."""
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "'top_logprobs' needs 'logprobs' to be true.")
    both = body.max_tokens, body.max_completion_tokens
    if None not in both and both[0] != both[1]:
        raise invalid("max_tokens", "'max_tokens' and 'max_completion_tokens' differ; give one of them.")
    _check_reasoning(body)
    tools = chat_tools(body)
    newer = body.max_completion_tokens is not None
    meaning = Meaning(
        prompt_param="messages",
        max_tokens=body.max_completion_tokens if newer else body.max_tokens,
        max_tokens_param="max_completion_tokens" if newer else "max_tokens",
        default_tokens=None,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        top_logprobs_param="top_logprobs",
        clips=clips,
        tools=tools,
        reasoning=ReasoningOptions(
            body.separate_reasoning,
            body.include_reasoning and not body.reasoning.exclude,
            body.stream_reasoning,
        ),
        continued=_continued(body) if body.continue_final_message else None,
    )
    return _with_shared_fields(meaning, body)


def completion_meaning(body: CompletionRequest) -> Meaning:
    """Return the parsed options of a text completion. Raises ApiError if fields contradict each other."""
    given = "max_tokens" in body.model_fields_set
    if body.max_tokens == 0 and not body.echo:
        raise invalid("max_tokens", "'max_tokens' is 0, which only 'echo' leaves anything to answer.")
    if body.max_tokens == 0 and body.min_tokens:
        raise invalid("min_tokens", "'min_tokens' is more than the 0 tokens that may come.")
    meaning = Meaning(
        prompt_param="prompt",
        # With 0, a worker still draws one token after the prompt. It is not shown.
        max_tokens=(body.max_tokens or 1) if given else None,
        max_tokens_param="max_tokens",
        default_tokens=COMPLETION_TOKENS_DEFAULT,
        top_logprobs=body.logprobs,
        top_logprobs_param="logprobs",
    )
    return _with_shared_fields(meaning, body)


def _with_shared_fields(meaning: Meaning, body: ChatRequest | CompletionRequest) -> Meaning:
    """Return `meaning` with the request options that chat and text completions have in common, read from
    `body`."""
    options = body.stream_options
    return replace(
        meaning,
        choices=body.n,
        drawn=body.n if body.best_of is None else body.best_of,
        shows_prompt=body.echo or body.prompt_logprobs is not None,
        stop=body.stop,
        includes_stop=body.include_stop_str_in_output,
        has_stop_ids=bool(body.stop_token_ids),
        skips_special=body.skip_special_tokens,
        usage_at_end=options is not None and options.include_usage,
        usage_so_far=options is not None and options.include_usage and options.continuous_usage_stats,
    )


def chat_tools(body: ChatRequest) -> ToolOptions:
    """Return the tools that a chat offers, and how the model may call them.

    Raises ApiError if two tools have the same name, or if `tool_choice` names a tool that is not offered.
    """
    choice = body.tool_choice
    names = check_tools(body.tools)
    if isinstance(choice, ForcedTool) and choice.name not in names:
        raise _no_such_tool(choice.name)
    if isinstance(choice, AllowedTools):
        for name in choice.names:
            if name not in names:
                raise _no_such_tool(name)
        if not choice.names:
            raise invalid("tool_choice", "'tool_choice' allows no tools; say \"none\" for that.")
    if choice == "required" and not body.tools:
        raise invalid("tool_choice", "'tool_choice' is required, and there are no 'tools'.")
    if not body.tools:
        return ToolOptions(are_parallel=body.parallel_tool_calls)
    offered = offered_tools(body.tools)
    if isinstance(choice, AllowedTools):
        offered = tuple(tool for tool in offered if tool.name in choice.names)
    elif choice == "none":
        offered = ()
    mode = choice.mode if isinstance(choice, AllowedTools) else choice
    forced_name = choice.name if isinstance(choice, ForcedTool) else None
    return ToolOptions(
        offered=offered,
        is_forced=forced_name is not None or mode == "required",
        forced_name=forced_name,
        are_parallel=body.parallel_tool_calls and forced_name is None,
    )


def check_tools(tools: Sequence[Tool]) -> set[str]:
    """Return the names of the tools. Raises ApiError if two tools have the same name."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool.function.name
        if name in names:
            param = f"tools[{index}].function.name"
            raise invalid(param, f"'{param}': there is another tool named \"{name}\".")
        names.add(name)
    return names


def offered_tools(tools: Sequence[Tool]) -> tuple[OfferedTool, ...]:
    """Return all tools that a request offers, including those that its `tool_choice` does not allow."""
    return tuple(
        OfferedTool(
            param=f"tools[{index}]",
            name=tool.function.name,
            parameters=tool.function.parameters or {},
            is_strict=bool(tool.function.strict),
            template={
                "type": "function",
                "function": tool.function.model_dump(exclude_unset=True, exclude={"strict"}),
            },
        )
        for index, tool in enumerate(tools)
    )


def _no_such_tool(name: str) -> ApiError:
    return invalid("tool_choice", f"'tool_choice': 'tools' has none named \"{shown(name)}\".")


def _check_reasoning(body: ChatRequest) -> None:
    """Raise ApiError if the request gives two different reasoning efforts, or an effort that contradicts
    whether reasoning is enabled."""
    if body.reasoning_effort is None and "reasoning" not in body.model_fields_set:
        return
    efforts = {body.reasoning_effort, body.reasoning.effort, body.reasoning.reasoning_effort} - {None}
    off = body.reasoning.enabled is False and efforts - {"none"}
    if len(efforts) > 1 or off or (body.reasoning.enabled and "none" in efforts):
        raise invalid("reasoning", "'reasoning' contradicts itself, or 'reasoning_effort'.")


def _continued(body: ChatRequest) -> str:
    text = body.messages[-1].content or ""
    return text if isinstance(text, str) else "".join(text)
