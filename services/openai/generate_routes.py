"""How is a generating request served, from its body to its reply?"""

from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.openai.api_settings import ApiSettings
from services.openai.backend import Backend
from services.openai.body import read_body
from services.openai.chat_rendering import ChatRendering
from services.openai.choice import Choice
from services.openai.completion_rendering import CompletionRendering
from services.openai.edge import received_s_of, request_id_of
from services.openai.intake import Asked, admit, asked_in_chat, asked_in_completion, check_model
from services.openai.metrics import HttpMetrics
from services.openai.model import ServedModel
from services.openai.prompts import Prompts
from services.openai.rendering import Rendering
from services.openai.reply import Answering, StreamedReply, WholeReply
from services.openai.schemas import ChatRequest, CompletionRequest, GenerationRequest
from services.runtime.clock import Clock

B = TypeVar("B", bound=GenerationRequest)


def generate_routes(
    backend: Backend,
    model: ServedModel,
    prompts: Prompts,
    metrics: HttpMetrics,
    settings: ApiSettings,
    clock: Clock,
) -> APIRouter:
    """`/v1/chat/completions` and `/v1/completions`."""
    router = APIRouter()

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await read(request, ChatRequest)
        asked = asked_in_chat(body)
        prompt = await prompts.of_messages(body.messages)
        rendering = ChatRendering(body, model.tokenizer, request_id_of(request), clock.wall_ms() // 1000)
        return reply(request, body, asked, [prompt], rendering)

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read(request, CompletionRequest)
        asked = asked_in_completion(body)
        tokens = await prompts.of_texts(body.prompt)
        rendering = CompletionRendering(
            body, model.tokenizer, request_id_of(request), clock.wall_ms() // 1000
        )
        return reply(request, body, asked, tokens, rendering)

    async def read(request: Request, shape: type[B]) -> B:
        body = await read_body(
            request, shape, limit=settings.body_bytes_max, timeout_s=settings.body_timeout_s
        )
        check_model(body.model, model)
        return body

    def reply(
        request: Request, body: GenerationRequest, asked: Asked, tokens: list[list[int]], rendering: Rendering
    ) -> Response:
        admitted = admit(body, asked, tokens, model, backend.limits(), request_id_of(request))
        answering = Answering(
            backend=backend,
            choices=[Choice(index, each, body, model.tokenizer) for index, each in enumerate(admitted)],
            rendering=rendering,
            metrics=metrics,
            request_id=request_id_of(request),
            received_s=received_s_of(request),
            stalled_client_s=settings.stalled_client_s,
        )
        return StreamedReply(answering) if body.stream else WholeReply(answering)

    return router
