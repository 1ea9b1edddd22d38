"""The parsed options of a generation request, read from its body once and used by all later steps.

No I/O, clock or threads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that a request offers and that the model may call."""

    param: str
    """Path of the tool's definition in the request, such as `tools[0]`, for errors."""
    name: str
    parameters: Mapping[str, Any]
    """JSON schema of the tool's arguments. It is empty if the request gives no schema."""
    is_strict: bool
    """Whether the arguments of a call have to match the tool's JSON schema (`strict`)."""
    template: Mapping[str, Any]
    """Definition of the tool as the chat template gets it."""


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """Tools that a request offers, and how the model may call them."""

    offered: tuple[OfferedTool, ...] = ()
    is_forced: bool = False
    """Whether the answer has to contain a tool call."""
    forced_name: str | None = None
    """Name of the only tool that the answer may call. None if the request forces no single tool."""
    are_parallel: bool = True
    """Whether one answer may contain several tool calls."""

    @property
    def callable(self) -> Sequence[OfferedTool]:
        """Tools that the answer may call: the forced one, or all offered ones."""
        if self.forced_name is None:
            return self.offered
        return [tool for tool in self.offered if tool.name == self.forced_name]

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """JSON schemas of the tools' arguments, by tool name."""
        return {tool.name: tool.parameters for tool in self.offered}

    def are_constrained(self, *, with_format: bool) -> bool:
        """Return whether a grammar constrains the tool calls. `with_format`: whether the text of the answer
        is constrained, too."""
        return self.is_forced or (
            bool(self.offered) and (with_format or any(tool.is_strict for tool in self.offered))
        )


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """Options of a request for how the model's reasoning is returned."""

    is_parsed: bool = True
    """Whether reasoning is separated from the text of the answer."""
    is_shown: bool = True
    """Whether the response includes the reasoning."""
    is_streamed: bool = True
    """Whether a stream sends reasoning while it is generated. Otherwise it is sent in one piece when it has
    ended."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """Parsed options of a generation request, with the names of the fields that set them, for error messages.

    They depend neither on the model nor on the running workers. The request builder resolves the rest.
    """

    prompt_param: str
    max_tokens: int | None
    """Most output tokens of each choice. None: the client sets no limit."""
    max_tokens_param: str
    default_tokens: int | None
    """Most output tokens of each choice if the client sets no limit. None: as many as fit."""
    top_logprobs: int | None
    """Number of alternative tokens returned with each output token. None: no log-probabilities; -1: all
    tokens."""
    top_logprobs_param: str
    clips: bool = False
    """Whether a `max_tokens` that does not fit is lowered to what fits, instead of refused."""
    choices: int = 1
    """Number of choices that are returned for each prompt."""
    drawn: int = 1
    """Number of choices that are generated for each prompt. If it exceeds `choices`, the best of them are
    returned."""
    tools: ToolOptions = field(default_factory=ToolOptions)
    reasoning: ReasoningOptions = field(default_factory=ReasoningOptions)
    continued: str | None = None
    """Text of the last message, if the model continues that message. Otherwise None."""
    shows_prompt: bool = False
    """Whether the response includes the prompt: its text, or the log-probabilities of its tokens."""
    stop: Sequence[str] = ()
    """Stop strings. Each of them ends the answer."""
    includes_stop: bool = False
    """Whether the text of the answer includes the stop string that ended it."""
    has_stop_ids: bool = False
    """Whether the client set `stop_token_ids`."""
    skips_special: bool = True
    """Whether special tokens are left out of the text of the answer."""
    usage_at_end: bool = False
    """Whether a stream ends with a chunk that reports token usage."""
    usage_so_far: bool = False
    """Whether each chunk of a stream reports the token usage so far."""
