"""Events of a stored response, made again from the response and from the sizes of its pieces.

The events and their numbers are those of the stream by which the response was first sent. A response that was
not streamed has pieces as its tokens came.

No I/O, clock or threads.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from baton.api.responses.response_builder import COMPLETED, IN_PROGRESS, ItemPieces, item_events
from baton.api.responses.response_objects import ResponseAnswer, ResponsesEvent

BEFORE_OUTPUT: Mapping[str, Any] = {
    "status": IN_PROGRESS,
    "completed_at": None,
    "incomplete_details": None,
    "usage": None,
    "output": [],
}
"""Fields of a response, and their values before there is any output."""


def stored_events(
    response: ResponseAnswer, pieces: Sequence[Sequence[Sequence[int]]]
) -> list[ResponsesEvent]:
    """Return all events that stream a stored response, with their sequence numbers.

    `pieces`: for each item of the response's output, the fields of its `ItemPieces`.
    """
    begun: ResponseAnswer = {**response, **BEFORE_OUTPUT}  # type: ignore[typeddict-item]
    events: list[ResponsesEvent] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for place, (item, (chars, logprobs)) in enumerate(zip(response["output"], pieces, strict=True)):
        events += item_events(item, place, ItemPieces([*chars], [*logprobs]))
    if response["status"] == COMPLETED:
        events.append({"type": "response.completed", "response": response})
    else:
        events.append({"type": "response.incomplete", "response": response})
    for number, event in enumerate(events):
        event["sequence_number"] = number
    return events
