"""Which behaviours are there, by group?"""

from collections.abc import Mapping, Sequence
from typing import Final

from tests.api.behaviours.asking import Behaviour, Refused
from tests.api.behaviours.drawing import DRAWING, LOGPROBS, SCORED, SEVERAL
from tests.api.behaviours.forms import CALLS, REASONING, STRUCTURED
from tests.api.behaviours.routes import KINDS, MESSAGED, RESPONDED, SERVER, TOKENS
from tests.api.behaviours.texts import CHATS, COMPLETION, STREAMS

GROUPS: Final[Mapping[str, Sequence[Behaviour]]] = {
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
FAULT: Final = "a fault of the request"


def is_fault(row: Behaviour) -> bool:
    """Whether the peer's test, too, asserts that the request is refused."""
    return isinstance(row.expected, Refused) and row.expected.why == FAULT


def is_right(row: Behaviour) -> bool:
    """Whether it is as the peer's test has it."""
    return not isinstance(row.expected, Refused) or is_fault(row)
