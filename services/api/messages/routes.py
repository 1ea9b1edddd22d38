"""Routes of Anthropic's Messages API."""

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from baton.api.generation.generation_service import GenerationService
from baton.api.generation.rendering import Rendering
from baton.api.http.openapi_document import GENERATING, TAKING, describe
from baton.api.http.request_bodies import RequestBodies
from baton.api.messages.anthropic_errors import ROUTE, MessagesError
from baton.api.messages.message_objects import MessagesAnswer, MessagesEvent, TokenCount
from baton.api.messages.message_rendering import MessagesRendering
from baton.api.messages.message_request import CountRequest, MessagesRequest
from baton.api.messages.message_translation import translated
from baton.api.requests.meaning import Meaning
from baton.api.resuming.answer_start import AnswerStart
from baton.api.resuming.drawn_values import DrawnValues


def messages_routes(generating: GenerationService, bodies: RequestBodies) -> APIRouter:
    """Return the routes `/v1/messages` and `/v1/messages/count_tokens`."""
    router = APIRouter()

    @router.post(
        ROUTE,
        **describe(
            MessagesRequest, MessagesAnswer, events=MessagesEvent, statuses=GENERATING, errors=MessagesError
        ),
    )
    async def messages(request: Request) -> Response:
        async with bodies.of(request, MessagesRequest) as body:
            chat, terms = translated(body)
            with terms.translating():
                return await generating.chat(request, chat, partial(rendering, body), clips=True)

    @router.post(
        f"{ROUTE}/count_tokens", **describe(CountRequest, TokenCount, statuses=TAKING, errors=MessagesError)
    )
    async def count_tokens(request: Request) -> Response:
        async with bodies.of(request, CountRequest) as body:
            chat, terms = translated(body)
            with terms.translating():
                count: TokenCount = {"input_tokens": await generating.count(request, chat)}
        return JSONResponse(count)

    def rendering(body: MessagesRequest, start: AnswerStart, _: Meaning, __: DrawnValues) -> Rendering:
        return MessagesRendering(body, start.request_id)

    return router
