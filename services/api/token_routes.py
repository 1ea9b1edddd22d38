"""Routes `/tokenize` and `/detokenize`, with vLLM's request and response formats."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from baton.api.backend import Backend
from baton.api.errors import invalid, too_long
from baton.api.generation.prompt_encoder import PromptEncoder
from baton.api.http.openapi_document import TAKING, describe
from baton.api.http.request_bodies import RequestBodies
from baton.api.model_interface import Model
from baton.api.requests.meaning_reader import check_model, check_tools, offered_tools
from baton.api.requests.token_ids import check_ids
from baton.api.requests.token_requests import DetokenizeRequest, TokenizeRequest


class TokensOfText(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TextOfTokens(TypedDict):
    prompt: str


def token_routes(backend: Backend, model: Model, prompts: PromptEncoder, bodies: RequestBodies) -> APIRouter:
    """Return the routes `/tokenize` and `/detokenize`, which are also served under `/v1`."""
    router = APIRouter()

    @router.post("/v1/tokenize", include_in_schema=False)
    @router.post("/tokenize", **describe(TokenizeRequest, TokensOfText, statuses=TAKING))
    async def tokenize(request: Request) -> Response:
        async with bodies.of(request, TokenizeRequest) as body:
            check_model(body.model, model.names)
            tokens = await _tokens(request, body, prompts)
        if body.return_token_strs:
            _check_count(tokens, "return_token_strs", backend.limits().context_tokens)
        spellings = await prompts.spellings_of(request, tokens) if body.return_token_strs else None
        answer: TokensOfText = {
            "count": len(tokens),
            "max_model_len": backend.limits().context_tokens,
            "tokens": tokens,
            "token_strs": spellings,
        }
        return _json(answer)

    @router.post("/v1/detokenize", include_in_schema=False)
    @router.post("/detokenize", **describe(DetokenizeRequest, TextOfTokens, statuses=TAKING))
    async def detokenize(request: Request) -> Response:
        async with bodies.of(request, DetokenizeRequest) as body:
            check_model(body.model, model.names)
            _check_count(body.tokens, "tokens", backend.limits().context_tokens)
            check_ids(body.tokens, "tokens", model.vocabulary)
        answer: TextOfTokens = {"prompt": await prompts.text_of(request, body.tokens)}
        return _json(answer)

    return router


def _check_count(tokens: Sequence[int], param: str, most: int) -> None:
    """Raise ApiError for more than `most` tokens, the length of the context. Converting more tokens to text
    would block all other requests for too long."""
    if len(tokens) > most:
        raise too_long(param, most, f"'{param}': these are {len(tokens)} tokens")


def _json(body: Mapping[str, Any]) -> Response:
    """Return `body` as a JSON response. FastAPI's own encoder would inspect each of a hundred thousand
    numbers."""
    return Response(to_json(body), media_type="application/json")


async def _tokens(request: Request, body: TokenizeRequest, prompts: PromptEncoder) -> list[int]:
    if body.prompt is not None and body.messages:
        raise invalid("prompt", "Give 'prompt' or 'messages', not both.")
    if body.messages:
        check_tools(body.tools)
        return await prompts.of_messages(request, body, offered_tools(body.tools), fit=False)
    if body.prompt is None:
        raise invalid("prompt", "Give 'prompt' or 'messages'.", "missing_required_parameter")
    add = body.add_special_tokens is not False
    (tokens,) = await prompts.of_texts(request, [body.prompt], "prompt", add_special_tokens=add, fit=False)
    return tokens
