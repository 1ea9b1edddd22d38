"""Routes of OpenAI's Responses API.

POST   /v1/responses        /v1/responses/input_tokens
GET    /v1/responses/{id}   /v1/responses/{id}/input_items   of a stored response
DELETE /v1/responses/{id}
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Literal, cast

from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from baton.api.errors import ApiError, invalid, shown
from baton.api.generation.generation_service import GenerationService
from baton.api.http.authentication import owner_in
from baton.api.http.event_stream import NAMED
from baton.api.http.http_exchange import exchange_of
from baton.api.http.openapi_document import GENERATING, NAMING, TAKING, describe
from baton.api.http.request_bodies import RequestBodies
from baton.api.http.request_headers import is_codex
from baton.api.model_interface import Model
from baton.api.requests.field_paths import FieldPaths
from baton.api.requests.meaning import Meaning
from baton.api.requests.sampling_defaults import sampling_fields_of
from baton.api.responses.echoed_fields import head_of
from baton.api.responses.input_items import plain
from baton.api.responses.input_messages import Placed
from baton.api.responses.response_builder import ItemPieces, ResponseBuilder
from baton.api.responses.response_ids import ResponseIds
from baton.api.responses.response_objects import (
    DeletedResponse,
    InputItems,
    ResponseAnswer,
    ResponsesEvent,
    ResponseTokenCount,
)
from baton.api.responses.response_rendering import ResponsesRendering
from baton.api.responses.response_request import ENCRYPTED_REASONING, LOGPROBS, ResponsesRequest
from baton.api.responses.response_store import ResponseStore, StoredResponse
from baton.api.responses.response_translation import (
    chat_of,
    dropped_tools,
    functions_of,
    looked_up,
    nothing_dropped,
)
from baton.api.responses.signed_reasoning import ReasoningSigner
from baton.api.responses.stored_events import stored_events
from baton.api.resuming.answer_start import AnswerStart
from baton.api.resuming.drawn_values import DrawnValues
from baton.runtime.clock import Clock

LIST_DEFAULT: Final = 20
LIST_MAX: Final = 100
"""Most items of one page of a response's input items, as in OpenAI's API."""


def response_routes(
    generating: GenerationService,
    model: Model,
    bodies: RequestBodies,
    clock: Clock,
    kept: ResponseStore,
    carrier: ReasoningSigner,
) -> APIRouter:
    """Return the routes that generate a response or count the tokens of its prompt.

    `kept`: store of responses. `carrier`: signer of the reasoning that clients store and send back.
    """
    router = APIRouter()
    renderings = _Renderings(model, clock, kept, carrier)

    @router.post(
        "/v1/responses",
        **describe(ResponsesRequest, ResponseAnswer, events=ResponsesEvent, statuses=GENERATING),
    )
    async def responses(request: Request) -> Response:
        terms = FieldPaths()
        async with bodies.of(request, ResponsesRequest) as body:
            with nothing_dropped(body), terms.translating():
                note_dropped(request, body)
                items = looked_up(body, kept, owner_in(request.scope))
                chat = chat_of(body, items, carrier, terms)
                return await generating.chat(request, chat, partial(renderings.of, request, body, items))

    @router.post(
        "/v1/responses/input_tokens",
        **describe(ResponsesRequest, ResponseTokenCount, statuses=TAKING),
    )
    async def input_tokens(request: Request) -> Response:
        terms = FieldPaths()
        async with bodies.of(request, ResponsesRequest) as body:
            with terms.translating():
                note_dropped(request, body)
                items = looked_up(body, kept, owner_in(request.scope))
                count = await generating.count(request, chat_of(body, items, carrier, terms))
        answer: ResponseTokenCount = {"object": "response.input_tokens", "input_tokens": count}
        return JSONResponse(answer)

    def note_dropped(request: Request, body: ResponsesRequest) -> None:
        exchange_of(request).drop_tools(dropped_tools(body, is_codex=is_codex(exchange_of(request).headers)))

    return router


@dataclass(frozen=True, slots=True)
class _Renderings:
    """Factory of the renderers of responses, with what all responses of one application share."""

    model: Model
    clock: Clock
    kept: ResponseStore
    carrier: ReasoningSigner

    def of(
        self,
        request: Request,
        body: ResponsesRequest,
        items: Sequence[Placed],
        start: AnswerStart,
        _: Meaning,
        draws: DrawnValues,
    ) -> ResponsesRendering:
        """Return the object that renders one response.

        `items`: items of the conversation that the response answers.
        """
        kept, model, owner = self.kept, self.model, owner_in(request.scope)
        number = start.request_id if start.has_drawn_id else draws.response_digits()
        names, keeps = ResponseIds(number), body.store and kept.takes
        read = (
            [plain(item, f"in_{number}_{place}") for place, (item, *_) in enumerate(items)] if keeps else []
        )

        def keep(answer: Mapping[str, Any], pieces: Sequence[ItemPieces]) -> bool:
            return keeps and kept.keep(answer, read, owner, pieces)

        def now_s() -> int:
            return self.clock.wall_ms() // 1000

        sampling = sampling_fields_of(body, model.recommended_sampling)
        head = head_of(body, names.answer, body.model or model.name, sampling, start.created_s, kept=keeps)
        making = ResponseBuilder(
            names,
            functions_of(body),
            self.carrier if ENCRYPTED_REASONING in body.include else None,
            summarised=body.summary is not None,
        )
        return ResponsesRendering(head, making, model, keep, now_s, logprobs=LOGPROBS in body.include)


def _events(one: StoredResponse, starting_after: int) -> bytes:
    """Return the events of a stored response as bytes. `starting_after`: number of the last event to leave
    out."""
    response = cast(ResponseAnswer, one.whole())
    events = stored_events(response, one.sizes())
    return NAMED.events(event for event in events if event["sequence_number"] > starting_after)


def _items_after(items: list[dict[str, Any]], after: str | None) -> list[dict[str, Any]]:
    """Return the items behind the one with the id `after`, or all if it is None. Raises ApiError."""
    if after is None:
        return items
    for place, item in enumerate(items):
        if item["id"] == after:
            return items[place + 1 :]
    raise invalid("after", f"'after': the answer has no item '{shown(after)}'.")


def stored_response_routes(kept: ResponseStore) -> APIRouter:
    """Return the routes that read or delete stored responses."""
    router = APIRouter()

    @router.get(
        "/v1/responses/{id}", **describe(answers=ResponseAnswer, events=ResponsesEvent, statuses=NAMING)
    )
    async def response(
        request: Request,
        id: str,  # noqa: A002
        stream: bool = False,
        starting_after: Annotated[int | None, Query(ge=0)] = None,
    ) -> Response:
        one = found(request, id)
        if stream:
            work = partial(_events, one, -1 if starting_after is None else starting_after)
            events = await asyncio.get_running_loop().run_in_executor(None, work)
            return Response(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        if starting_after is not None:
            raise invalid("starting_after", "'starting_after' needs 'stream' to be true.")
        return JSONResponse(one.whole())

    @router.delete("/v1/responses/{id}", **describe(answers=DeletedResponse, statuses=NAMING))
    async def forget(request: Request, id: str) -> Response:  # noqa: A002
        if not kept.forget(id, owner_in(request.scope)):
            raise not_stored(id)
        deleted: DeletedResponse = {"id": id, "object": "response", "deleted": True}
        return JSONResponse(deleted)

    @router.get("/v1/responses/{id}/input_items", **describe(answers=InputItems, statuses=NAMING))
    async def input_items(
        request: Request,
        id: str,  # noqa: A002
        limit: Annotated[int, Query(ge=1, le=LIST_MAX)] = LIST_DEFAULT,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        items = found(request, id).read()
        if order == "desc":
            items.reverse()
        items = _items_after(items, after)
        page = items[:limit]
        body: InputItems = {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > len(page),
        }
        return JSONResponse(body)

    def found(request: Request, id_: str) -> StoredResponse:
        if (one := kept.find(id_, owner_in(request.scope))) is None:
            raise not_stored(id_)
        return one

    def not_stored(id_: str) -> ApiError:
        return ApiError(404, f"The answer '{shown(id_)}' is not kept.", param="id", code="response_not_found")

    return router
