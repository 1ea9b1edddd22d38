"""Routes of chat completions and text completions."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from baton.api.chat.chat_rendering import ChatAnswer, ChatChunk, ChatRendering
from baton.api.completions.completion_rendering import (
    CompletionAnswer,
    CompletionChunk,
    CompletionRendering,
)
from baton.api.generation.generation_service import GenerationService
from baton.api.generation.rendering import Rendering
from baton.api.http.openapi_document import GENERATING, describe
from baton.api.http.request_bodies import RequestBodies
from baton.api.model_interface import Model
from baton.api.requests.meaning import Meaning
from baton.api.requests.schemas import ChatRequest, CompletionRequest, GenerationRequest
from baton.api.resuming.answer_start import AnswerStart
from baton.api.resuming.drawn_values import DrawnValues


def _invoked(fields: Mapping[str, Any]) -> type[GenerationRequest]:
    """Return the schema for the body of a SageMaker request: a completion if it has a `prompt` and no
    `messages`, otherwise a chat."""
    return CompletionRequest if "prompt" in fields and "messages" not in fields else ChatRequest


def generate_routes(generating: GenerationService, model: Model, bodies: RequestBodies) -> APIRouter:
    """Return the routes `/v1/chat/completions` and `/v1/completions`, and SageMaker's `/invocations`, which
    accepts the body of either."""
    router = APIRouter()

    @router.post(
        "/v1/chat/completions", **describe(ChatRequest, ChatAnswer, events=ChatChunk, statuses=GENERATING)
    )
    async def chat_completions(request: Request) -> Response:
        async with bodies.of(request, ChatRequest) as body:
            return await generating.chat(request, body, partial(chat_rendering, body))

    @router.post(
        "/v1/completions",
        **describe(CompletionRequest, CompletionAnswer, events=CompletionChunk, statuses=GENERATING),
    )
    async def completions(request: Request) -> Response:
        async with bodies.of(request, CompletionRequest) as body:
            return await generating.completion(request, body, partial(completion_rendering, body))

    @router.post("/invocations", include_in_schema=False)
    async def invocations(request: Request) -> Response:
        async with bodies.of(request, _invoked) as body:
            if isinstance(body, ChatRequest):
                return await generating.chat(request, body, partial(chat_rendering, body))
            assert isinstance(body, CompletionRequest)
            return await generating.completion(request, body, partial(completion_rendering, body))

    def chat_rendering(body: ChatRequest, start: AnswerStart, meaning: Meaning, _: DrawnValues) -> Rendering:
        return ChatRendering(body, meaning, model, start.request_id, start.created_s)

    def completion_rendering(
        body: CompletionRequest, start: AnswerStart, meaning: Meaning, _: DrawnValues
    ) -> Rendering:
        return CompletionRendering(body, meaning, model, start.request_id, start.created_s)

    return router
