"""Expected work of open rooms, in tokens, and how much of it is done.

A request's work is its prompt and the tokens that it is expected to draw. The prompt counts as done with the
first token. When the request ends, the rest of the work counts as done, since its space is free then.
"""

from dataclasses import dataclass, field
from typing import Final

from baton.ids import RoomId

OUTPUT_TOKENS: Final = 256
"""Expected output of a request in tokens, before any request has ended. It is that of chats in published
traces. A request with a lower limit is expected to reach the limit."""
MEMORY: Final = 16
"""Weight of the past in the expected output: each ended request moves the expectation by 1/MEMORY of the
difference."""


@dataclass(slots=True)
class _Left:
    prompt_tokens: int
    output_tokens: int
    is_open_ended: bool
    """Whether the request allows more than OUTPUT_TOKENS output tokens, so that its length is unknown."""
    drawn: int = 0
    is_computed: bool = False
    """Whether the prompt of the request already counts as done."""


@dataclass(slots=True)
class RunningWork:
    """Work of all open rooms. Bounded by their number: `ended` is called once for each."""

    _rooms: dict[RoomId, _Left] = field(default_factory=dict)
    _expected: float = float(OUTPUT_TOKENS)
    _prompts: int = 0
    """Number of prompts that are being computed now."""
    _prompt_tokens: int = 0
    """Total length of the prompts that are being computed now, in tokens."""

    @property
    def running_prompt_tokens(self) -> int:
        """Mean length of the prompts that are being computed now, in tokens; 0 without any."""
        return self._prompt_tokens // max(self._prompts, 1)

    def output_tokens(self, longest: int, choices: int) -> int:
        """Return the expected output of a request, in tokens, over all `choices`. `longest`: most tokens that
        each choice may draw."""
        may_be = longest if longest <= OUTPUT_TOKENS else min(longest, round(self._expected))
        return choices * max(may_be, 1)

    def opened(self, room: RoomId, prompt_tokens: int, longest: int, choices: int) -> None:
        """Add the expected work of a request that got this room."""
        output = self.output_tokens(longest, choices)
        self._rooms[room] = _Left(prompt_tokens, output, choices == 1 and longest > OUTPUT_TOKENS)
        self._prompts, self._prompt_tokens = self._prompts + 1, self._prompt_tokens + prompt_tokens

    def progressed(self, room: RoomId, tokens: int) -> int:
        """Record `tokens` new output tokens of a room. Return the work done with them, in tokens."""
        left = self._rooms.get(room)
        if left is None:
            return 0
        left.drawn += tokens
        left.output_tokens = left.output_tokens - tokens if tokens < left.output_tokens else 0
        return tokens if left.is_computed else self._computed(left) + tokens

    def ended(self, room: RoomId, *, is_over: bool) -> int:
        """Remove a room that has ended. Return the work in tokens that thereby counts as done.

        `is_over`: whether no other room continues the request. If one does, the rest of the work is done
        there.
        """
        left = self._rooms.pop(room, None)
        if left is None:
            return 0
        prompt_tokens = self._computed(left)
        if not is_over:
            return 0
        if left.is_open_ended and left.drawn:
            self._expected += (left.drawn - self._expected) / MEMORY
        return prompt_tokens + left.output_tokens

    def _computed(self, left: _Left) -> int:
        """Count a room's prompt as done. Return its length in tokens, or 0 if it was counted before."""
        if left.is_computed:
            return 0
        left.is_computed = True
        self._prompts, self._prompt_tokens = self._prompts - 1, self._prompt_tokens - left.prompt_tokens
        return left.prompt_tokens
