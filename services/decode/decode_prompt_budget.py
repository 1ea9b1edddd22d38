"""What do a decode worker's sequences leave to prefill, on a thread that both have their steps made on?"""

from baton.decode.decode_room import DecodeRoom
from baton.rooms.local_prefill import PromptTiming
from baton.rooms.roster import Roster


class DecodePromptBudget:
    """Of a worker of one rank. A `baton.worker.prompt_budget.PromptBudget`."""

    def __init__(self, roster: Roster[DecodeRoom], pace: PromptTiming) -> None:
        self._roster = roster
        self._pace = pace

    def chunk_tokens(self, most: int) -> int:
        holds_up = any(room.needs_short_steps for room in self._roster)
        return max(min(most, self._pace.tokens_within(self._pace.gap_ms)), 1) if holds_up else most

    def stepped(self, tokens: int, ms: float) -> None:
        """It tells of prompts here, too, how long they take."""
        self._pace.stepped(tokens, 0, ms)
