"""Where is Anthropic's API served?"""

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from baton.openai.answers import MessagesAnswer, MessagesError, MessagesEvent, TokenCount
from baton.openai.bodies import Bodies
from baton.openai.document import GENERATING, TAKING, told
from baton.openai.edge import exchange_of
from baton.openai.generating import Generating
from baton.openai.messages.body import CountRequest, MessagesRequest
from baton.openai.messages.manners import ROUTE
from baton.openai.messages.rendering import MessagesRendering
from baton.openai.messages.translation import translated
from baton.openai.rendering import Rendering


def messages_routes(generating: Generating, bodies: Bodies) -> APIRouter:
    """`/v1/messages` and `/v1/messages/count_tokens`."""
    router = APIRouter()

    @router.post(
        ROUTE,
        **told(MessagesRequest, MessagesAnswer, events=MessagesEvent, of=GENERATING, errors=MessagesError),
    )
    async def messages(request: Request) -> Response:
        async with bodies.of(request, MessagesRequest) as body:
            chat, terms = translated(body)
            with terms.spoken():
                return await generating.chat(request, chat, partial(rendering, request, body), clips=True)

    @router.post(f"{ROUTE}/count_tokens", **told(CountRequest, TokenCount, of=TAKING, errors=MessagesError))
    async def count_tokens(request: Request) -> Response:
        async with bodies.of(request, CountRequest) as body:
            chat, terms = translated(body)
            with terms.spoken():
                return JSONResponse({"input_tokens": await generating.count(request, chat)})

    def rendering(request: Request, body: MessagesRequest) -> Rendering:
        return MessagesRendering(body, exchange_of(request).request_id)

    return router
