"""What a generation request means: one value, read from its body once, which all later steps take.

Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that the model may call."""

    param: str
    """Path of the tool in the request, such as `tools[0]`."""
    name: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments. Empty: the tool has none."""
    is_strict: bool
    """Whether its arguments have to match the schema."""
    template: Mapping[str, Any]
    """The tool as chat templates take it."""


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """Which tools a request offers, and how they may be called."""

    offered: tuple[OfferedTool, ...] = ()
    is_forced: bool = False
    """Whether the answer has to call a tool."""
    forced_name: str | None = None
    """The only tool that may be called, if the request names one."""
    are_parallel: bool = True
    """Whether one answer may hold several calls."""

    @property
    def callable(self) -> Sequence[OfferedTool]:
        """The tools that an answer may call."""
        if self.forced_name is None:
            return self.offered
        return [tool for tool in self.offered if tool.name == self.forced_name]

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """JSON schemas of the arguments, by the name of the tool."""
        return {tool.name: tool.parameters for tool in self.offered}

    def are_constrained(self, *, with_format: bool) -> bool:
        """Whether a grammar describes the calls. `with_format`: the answer's text is constrained, too."""
        return self.is_forced or (
            bool(self.offered) and (with_format or any(tool.is_strict for tool in self.offered))
        )


@dataclass(frozen=True, slots=True)
class ReasoningOptions:
    """How a request wants the model's reasoning."""

    is_parsed: bool = True
    """Whether it is separated from the answer's text."""
    is_shown: bool = True
    """Whether the answer has it."""
    is_streamed: bool = True
    """Whether a stream has it as it grows. Else it comes at once, when it has ended."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a generation request asks for, with the names of the parameters to blame.

    Only what depends on neither the model nor the running stack is here. The request builder resolves the
    rest.
    """

    prompt_param: str
    max_tokens: int | None
    """Most output tokens, or None if the caller names no number."""
    max_tokens_param: str
    default_tokens: int | None
    """Output tokens if the caller names no number. None: as many as fit."""
    top_logprobs: int | None
    """Alternatives shown with each output token. None: no log-probabilities; -1: all tokens."""
    top_logprobs_param: str
    clips: bool = False
    """Whether `max_tokens` is lowered to what fits, instead of an error."""
    choices: int = 1
    """Choices that are returned for each prompt."""
    drawn: int = 1
    """Choices that are drawn for each prompt."""
    tools: ToolOptions = field(default_factory=ToolOptions)
    reasoning: ReasoningOptions = field(default_factory=ReasoningOptions)
    continued: str | None = None
    """Text of the last message, if the answer continues it."""
    shows_prompt: bool = False
    """Whether answers show the prompt: its text, or the log-probabilities of its tokens."""
    stop: Sequence[str] = ()
    """Strings that end the answer."""
    includes_stop: bool = False
    """Whether the text includes the stop string that ended it."""
    has_stop_ids: bool = False
    """Whether the caller gave token ids that end the answer."""
    skips_special: bool = True
    """Whether special tokens are left out of the text."""
    usage_at_end: bool = False
    """Whether a stream ends with the usage."""
    usage_so_far: bool = False
    """Whether each chunk of a stream has the usage so far."""
