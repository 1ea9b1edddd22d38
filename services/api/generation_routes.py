"""Where are OpenAI's two generating routes served?"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from baton.api.answers import ChatAnswer, ChatChunk, CompletionAnswer, CompletionChunk
from baton.api.chat.chat_rendering import ChatRendering
from baton.api.completions.completion_rendering import CompletionRendering
from baton.api.generation.generation_service import GenerationService
from baton.api.generation.rendering import Rendering
from baton.api.http.middleware import exchange_of
from baton.api.http.openapi_document import GENERATING, told
from baton.api.http.request_bodies import RequestBodies
from baton.api.requests.schemas import ChatRequest, CompletionRequest, GenerationRequest
from baton.api.served_model import ServedModel
from baton.runtime.clock import Clock


def _invoked(fields: Mapping[str, Any]) -> type[GenerationRequest]:
    """A body without a prompt is a chat."""
    return CompletionRequest if "prompt" in fields and "messages" not in fields else ChatRequest


def generate_routes(
    generating: GenerationService, model: ServedModel, bodies: RequestBodies, clock: Clock
) -> APIRouter:
    """`/v1/chat/completions`, `/v1/completions`, and SageMaker's `/invocations`, which is one of both."""
    router = APIRouter()

    @router.post("/v1/chat/completions", **told(ChatRequest, ChatAnswer, events=ChatChunk, of=GENERATING))
    async def chat_completions(request: Request) -> Response:
        async with bodies.of(request, ChatRequest) as body:
            return await generating.chat(request, body, partial(chat_rendering, request, body))

    @router.post(
        "/v1/completions", **told(CompletionRequest, CompletionAnswer, events=CompletionChunk, of=GENERATING)
    )
    async def completions(request: Request) -> Response:
        async with bodies.of(request, CompletionRequest) as body:
            return await generating.completion(request, body, partial(completion_rendering, request, body))

    @router.post("/invocations", include_in_schema=False)
    async def invocations(request: Request) -> Response:
        async with bodies.of(request, _invoked) as body:
            if isinstance(body, ChatRequest):
                return await generating.chat(request, body, partial(chat_rendering, request, body))
            assert isinstance(body, CompletionRequest)
            return await generating.completion(request, body, partial(completion_rendering, request, body))

    def chat_rendering(request: Request, body: ChatRequest) -> Rendering:
        return ChatRendering(body, model, exchange_of(request).request_id, clock.wall_ms() // 1000)

    def completion_rendering(request: Request, body: CompletionRequest) -> Rendering:
        return CompletionRendering(body, model, exchange_of(request).request_id, clock.wall_ms() // 1000)

    return router
