"""How is a generating request served, from its body to its reply?"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.grammars.judge import Ask
from services.openai.api_settings import ApiSettings
from services.openai.backend import Backend
from services.openai.bodies import Bodies
from services.openai.chat_rendering import ChatRendering
from services.openai.choice import Choice, Heard
from services.openai.completion_rendering import CompletionRendering
from services.openai.conversation import check_tools, offered
from services.openai.edge import exchange_of
from services.openai.hearing import heard
from services.openai.intake import (
    Asked,
    admit,
    asked_in_chat,
    asked_in_completion,
    check_model,
    request_id_of,
    truncated,
)
from services.openai.metrics import HttpMetrics
from services.openai.model import ServedModel
from services.openai.prompts import Prompts
from services.openai.rendering import Rendering
from services.openai.reply import Answering, StreamedReply, WholeReply
from services.openai.schemas import ChatRequest, CompletionRequest, GenerationRequest
from services.openai.structures import Structures
from services.openai.transcript import Transcript
from services.rooms.request import Grammar, GrammarKind
from services.rooms.request import Request as Admitted
from services.runtime.clock import Clock
from services.runtime.tracing import Attribute


def generate_routes(
    backend: Backend,
    model: ServedModel,
    prompts: Prompts,
    bodies: Bodies,
    metrics: HttpMetrics,
    settings: ApiSettings,
    clock: Clock,
    ask: Ask,
) -> APIRouter:
    """`/v1/chat/completions` and `/v1/completions`."""
    router, structures = APIRouter(), Structures(model, ask, metrics)

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        async with bodies.of(request, ChatRequest) as body:
            check_model(body.model, model)
            exchange_of(request).name(request_id_of(body))
            asked = asked_in_chat(body)
            check_tools(body.tools, body.tool_choice)
            tools = offered(body)
            fit = body.truncate_prompt_tokens is None
            prompt = await prompts.of_messages(request, body, tools, fit=fit)
            prompt = truncated(prompt, body, asked, backend.limits())
            await prompts.check_messages(request, body, tools, prompt)
            grammar, calls = await structures.of_chat(request, body, prompt)
        rendering = ChatRendering(body, model, exchange_of(request).request_id, clock.wall_ms() // 1000)
        told_apart = partial(heard, body, prompt, model.forms, model.tokenizer, calls)
        return reply(request, body, asked, [prompt], rendering, grammar, told_apart)

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        async with bodies.of(request, CompletionRequest) as body:
            check_model(body.model, model)
            exchange_of(request).name(request_id_of(body))
            asked = asked_in_completion(body)
            grammar = await structures.grammar(request, body)
            tokens = await prompts.of_texts(
                request,
                body.prompt,
                asked.prompt_param,
                add_special_tokens=body.add_special_tokens,
                fit=body.truncate_prompt_tokens is None,
            )
            tokens = [truncated(each, body, asked, backend.limits()) for each in tokens]
            prompts.check_texts(body.prompt, tokens, asked.prompt_param)
        rendering = CompletionRendering(body, model, exchange_of(request).request_id, clock.wall_ms() // 1000)
        return reply(request, body, asked, tokens, rendering, grammar)

    def reply(
        request: Request,
        body: GenerationRequest,
        asked: Asked,
        tokens: list[list[int]],
        rendering: Rendering,
        grammar: Grammar | None,
        told_apart: Callable[[], Heard | None] = lambda: None,
    ) -> Response:
        exchange, limits = exchange_of(request), backend.limits()
        asked = replace(asked, clips=settings.clip_max_tokens)
        admitted = admit(body, asked, tokens, model, limits, exchange.request_id, exchange.trace, grammar)
        exchange.describe(lambda: _described(body, model, admitted))
        choices = [
            Choice(index, each, body, model.tokenizer, told_apart()) for index, each in enumerate(admitted)
        ]
        answering = Answering(
            backend=backend,
            choices=choices,
            rendering=rendering,
            metrics=metrics,
            exchange=exchange,
            transcript=Transcript(choices, model.tokenizer, exchange.names) if settings.log_prompts else None,
        )
        return StreamedReply(answering) if body.stream else WholeReply(answering)

    return router


def _described(
    body: GenerationRequest, model: ServedModel, admitted: Sequence[Admitted]
) -> dict[str, Attribute]:
    """What is asked for, in the words of OpenTelemetry's conventions for generative AI."""
    first = admitted[0]
    sampling = first.sampling
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": "chat" if isinstance(body, ChatRequest) else "text_completion",
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": model.name,
        "gen_ai.response.model": model.name,
        "gen_ai.request.max_tokens": first.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.output.type": "json" if _wants_json(first.grammar) else "text",
    }
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = float(sampling.top_k)
    if body.seed is not None:
        attributes["gen_ai.request.seed"] = body.seed
    if len(admitted) > 1:
        attributes["gen_ai.request.choice.count"] = len(admitted)
    return attributes


def _wants_json(grammar: Grammar | None) -> bool:
    return grammar is not None and grammar.kind is GrammarKind.JSON_SCHEMA
