"""The HTTP APIs as one ASGI application, and the functions that build it.

    POST /v1/chat/completions   /v1/completions   /v1/responses
    POST /v1/messages           /v1/messages/count_tokens
    GET  /v1/models             /v1/models/{id}
    POST /tokenize              /detokenize                 also under /v1
    GET  /tokenizer_info
    GET  /version               /
    POST /invocations           a chat or a completion, depending on the fields of the body

All dependencies are injected. The process that runs the application may add its own routes (`routers`). They
get the same request ids, error formats and request counts. Do not wrap the application in a middleware that
wraps `receive`, such as Starlette's BaseHTTPMiddleware: it would hide client disconnects.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, cast

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from baton.api.backend import Backend, BackendError
from baton.api.errors import ApiError
from baton.api.generation.generation_service import GenerationService
from baton.api.generation.prompt_encoder import PromptEncoder
from baton.api.generation_routes import generate_routes
from baton.api.http.authentication import AccessControl
from baton.api.http.http_exchange import exchange_of
from baton.api.http.metrics import HttpMetrics
from baton.api.http.middleware import ApiMiddleware, api_error, backend_error, bug, routing_error
from baton.api.http.openapi_document import document
from baton.api.http.request_bodies import RequestBodies
from baton.api.messages.anthropic_errors import error_format_of
from baton.api.messages.routes import messages_routes
from baton.api.model_routes import model_routes, root_route
from baton.api.requests.validation_errors import first_fault
from baton.api.responses.response_store import ResponseStore
from baton.api.responses.routes import response_routes, stored_response_routes
from baton.api.responses.signed_reasoning import KEY_BYTES, ReasoningSigner
from baton.api.resuming.answer_start import AnswerStarts
from baton.api.served_model import ServedModel
from baton.api.settings import ApiSettings
from baton.api.token_routes import token_routes
from baton.api.tools.constraints.constraints import ConstraintCompiler
from baton.grammars.grammar_check import CheckGrammar, GrammarChecker
from baton.runtime.clock import Clock, SystemClock
from baton.telemetry.process_metrics import release
from baton.telemetry.tracing import OFF, Tracer


def create_app(
    backend: Backend,
    model: ServedModel,
    registry: CollectorRegistry,
    settings: ApiSettings | None = None,
    clock: Clock | None = None,
    routers: Sequence[APIRouter] = (),
    access_control: AccessControl | None = None,
    tracer: Tracer = OFF,
    check: CheckGrammar | None = None,
) -> ApiMiddleware:
    """Return the complete HTTP application. `registry`: Prometheus registry that gets its metrics. `routers`:
    served in addition to the API's own routes. `access_control`: checks API keys and rate limits. By default
    every caller is admitted. `check`: compiles a grammar. By default a separate process does that, which is
    started on first use."""
    settings = settings or ApiSettings()
    clock = clock or SystemClock()
    metrics = HttpMetrics(registry)
    prompts, bodies = (
        PromptEncoder(
            model,
            backend,
            takes_templates=settings.trust_request_chat_template,
            writes_tools=model.formats.describes_tools,
        ),
        RequestBodies(settings, backend),
    )
    version = release()
    check = check or GrammarChecker(model.tokenizer.codec, model.vocabulary, model.eos_token_ids).check
    constraints = ConstraintCompiler(model, model.formats, check, metrics)
    key = settings.reasoning_key or secrets.token_bytes(KEY_BYTES)
    starts = AnswerStarts(key, model.digest)
    generating = GenerationService(backend, model, prompts, metrics, settings, constraints, starts, clock)
    kept = ResponseStore(settings.responses_kept, settings.responses_kept_bytes)
    carrier = ReasoningSigner(key)
    answered = [
        generate_routes(generating, model, bodies),
        messages_routes(generating, bodies),
        response_routes(generating, model, bodies, clock, kept, carrier),
    ]
    direct = {
        ("POST", route.path): route
        for router in answered
        for route in router.routes
        if isinstance(route, APIRoute)
    }
    own = [
        *answered,
        model_routes(backend, model, version, created_s=clock.wall_ms() // 1000),
        token_routes(backend, model, prompts, bodies),
        stored_response_routes(kept),
    ]
    return _application([*own, *routers, root_route(version)], metrics, direct, access_control, tracer)


def create_pages(
    api: ApiMiddleware, routers: Sequence[APIRouter], access_control: AccessControl | None = None
) -> ApiMiddleware:
    """Return a second ASGI application that serves `routers` on another port, such as the operators' port. It
    shares the metrics of `api`, and has the same error formats and request ids."""
    return _application(routers, api.metrics, {}, access_control)


def _application(
    routers: Sequence[APIRouter],
    metrics: HttpMetrics,
    direct: Mapping[tuple[str, str], APIRoute],
    access_control: AccessControl | None,
    tracer: Tracer = OFF,
) -> ApiMiddleware:
    """Return a FastAPI application with the given routes, wrapped in `ApiMiddleware`. `direct`: routes, by
    method and path, that the middleware calls itself, without FastAPI's routing."""
    app = FastAPI(
        title="Baton",
        version=release(),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        telemetry={"tracing": False, "metrics": False, "logs": False},  # Baton has its own
        exception_handlers={
            ApiError: api_error,
            BackendError: backend_error,
            HTTPException: routing_error,
            RequestValidationError: _validation_error,
            Exception: bug,
        },
    )
    app.openapi = lambda: _documented(app)  # type: ignore[method-assign]
    templates: list[str] = []
    for router in routers:
        app.include_router(router)
        # FastAPI's application keeps the routers and does not list their routes itself.
        templates += [route.path for route in router.routes if isinstance(route, APIRoute)]
    metrics.expect(templates)
    return ApiMiddleware(
        app, metrics, direct, access_control or AccessControl(), tracer, error_format_of, templates
    )


def _documented(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document of `app` for `/openapi.json`. It is built on first use."""
    if app.openapi_schema is None:
        app.openapi_schema = document(app)
    return app.openapi_schema


async def _validation_error(request: Request, error: Exception) -> Response:
    """Answer a validation error of FastAPI (status 422) with a 400 in the API's error format. Only routes
    whose parameters FastAPI parses raise it."""
    if not isinstance(error, RequestValidationError):
        raise error
    given = {**request.query_params, **request.path_params}
    faults = [cast(ErrorDetails, {**each, "loc": tuple(each["loc"][1:])}) for each in error.errors()]
    return exchange_of(request).answer(first_fault(faults, given, {}))
