"""Limit on the prompt tokens of prefill steps that share a thread with a decode worker's steps."""

from baton.decode.decode_room import DecodeRoom
from baton.rooms.roster import Roster
from baton.rooms.steps.local_prefill import PromptTiming


class DecodePromptBudget:
    """Limit that the decode side of a process sets on the prefill steps of the same thread. It implements
    `baton.worker.prompt_budget.PromptBudget`."""

    def __init__(self, roster: Roster[DecodeRoom], pace: PromptTiming) -> None:
        self._roster = roster
        self._pace = pace

    def chunk_tokens(self, most: int) -> int:
        holds_up = any(room.needs_short_steps for room in self._roster)
        return max(min(most, self._pace.tokens_within(self._pace.gap_ms)), 1) if holds_up else most

    def stepped(self, tokens: int, ms: float) -> None:
        """Record that a prefill step on the shared thread took `ms` milliseconds. It also measures how fast
        this process computes prompts."""
        self._pace.stepped(tokens, 0, ms)
