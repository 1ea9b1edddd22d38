"""Which behaviours are there, by group?"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from tests.openai.behaviours.asking import CHAT, COMPLETIONS, Behaviour, Refused
from tests.openai.behaviours.drawing import DRAWING, LOGPROBS, SEVERAL
from tests.openai.behaviours.forms import CALLS, REASONING, STRUCTURED
from tests.openai.behaviours.routes import KINDS, MESSAGED, RESPONDED, SCORED, SERVER, TOKENS
from tests.openai.behaviours.texts import CHATS, COMPLETION, STREAMS

NOT_YET: Final = frozenset(
    {"several answers", "prompts that are scored", "`/v1/responses`", "`/v1/messages`"}
)
"""Groups of which all is refused, whatever the rows say."""
FIELDS: Final = ("n", "best_of", "echo", "prompt_logprobs", "logprob_token_ids")


def _refused(row: Behaviour) -> Behaviour:
    if row.path not in (CHAT, COMPLETIONS):
        return replace(row, expected=Refused(None, 404, "a route that is not there yet"))
    named = [
        name for name in FIELDS if row.fields.get(name, 1) not in (False, 1) or row.fields.get(name) is True
    ]
    return replace(row, expected=Refused(named[0], why="not served yet")) if named else row


_ALL: Final[Mapping[str, Sequence[Behaviour]]] = {
    "completions": COMPLETION,
    "chats": CHATS,
    "streams and usage": STREAMS,
    "drawing and ends": DRAWING,
    "log-probabilities": LOGPROBS,
    "several answers": SEVERAL,
    "prompts that are scored": SCORED,
    "structured output": STRUCTURED,
    "tools": CALLS,
    "thoughts": REASONING,
    "tokens": TOKENS,
    "`/v1/responses`": RESPONDED,
    "`/v1/messages`": MESSAGED,
    "models, versions, errors": SERVER,
    "other kinds of service": KINDS,
}
GROUPS: Final = {
    name: [_refused(row) for row in rows] if name in NOT_YET else rows for name, rows in _ALL.items()
}
FAULT: Final = "a fault of the request"


def is_fault(row: Behaviour) -> bool:
    """Whether the peer's test, too, asserts that the request is refused."""
    return isinstance(row.expected, Refused) and row.expected.why == FAULT


def is_right(row: Behaviour) -> bool:
    """Whether it is as the peer's test has it."""
    return not isinstance(row.expected, Refused) or is_fault(row)
