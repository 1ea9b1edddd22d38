"""Expected work of requests that run, in tokens, and how much of it was done.

A request's work is its prompt and the tokens that it is expected to draw. The prompt counts as done with the
first token. What is left of it counts as done when the request ends, since its place is free then.
"""

from dataclasses import dataclass, field
from typing import Final

from services.ids import RoomId

OUTPUT_TOKENS: Final = 256
"""Expected output of a request that may draw more, before any ended: that of chats in published traces."""
MEMORY: Final = 16
"""One more output of this kind changes what is expected by this part of the difference."""


@dataclass(slots=True)
class _Left:
    prompt_tokens: int
    output_tokens: int
    is_open_ended: bool
    """Whether the request may draw more than OUTPUT_TOKENS, so that its length is not known."""
    drawn: int = 0


@dataclass(slots=True)
class RunningWork:
    """Bounded by the open rooms: each is `ended` once."""

    _rooms: dict[RoomId, _Left] = field(default_factory=dict)
    _expected: float = float(OUTPUT_TOKENS)

    def output_tokens(self, longest: int, choices: int) -> int:
        """Return the expected output of a request, in tokens. `longest`: what each of `choices` may draw."""
        may_be = longest if longest <= OUTPUT_TOKENS else min(longest, round(self._expected))
        return choices * max(may_be, 1)

    def opened(self, room: RoomId, prompt_tokens: int, longest: int, choices: int) -> None:
        """Add the work of a request that got a room."""
        output = self.output_tokens(longest, choices)
        self._rooms[room] = _Left(prompt_tokens, output, choices == 1 and longest > OUTPUT_TOKENS)

    def progressed(self, room: RoomId, tokens: int) -> int:
        """Return the work that was done when `tokens` came of a room."""
        left = self._rooms.get(room)
        if left is None:
            return 0
        prompt_tokens, left.prompt_tokens = left.prompt_tokens, 0
        left.drawn += tokens
        left.output_tokens = max(left.output_tokens - tokens, 0)
        return prompt_tokens + tokens

    def ended(self, room: RoomId, *, is_over: bool) -> int:
        """Remove a room. Return the work that is done by that.

        `is_over`: its request goes on in no other room, where the rest would be done.
        """
        left = self._rooms.pop(room, None)
        if left is None or not is_over:
            return 0
        if left.is_open_ended and left.drawn:
            self._expected += (left.drawn - self._expected) / MEMORY
        return left.prompt_tokens + left.output_tokens
