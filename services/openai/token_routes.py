"""Which tokens is a text, and which text are tokens? In vLLM's shapes."""

from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import APIRouter
from starlette.requests import Request

from services.openai.api_settings import ApiSettings
from services.openai.backend import Backend
from services.openai.body import read_body
from services.openai.errors import invalid, too_long
from services.openai.intake import check_ids, check_model
from services.openai.model import ServedModel
from services.openai.prompts import Prompts
from services.openai.schemas import DetokenizeRequest, TokenizeRequest

B = TypeVar("B", TokenizeRequest, DetokenizeRequest)


def token_routes(backend: Backend, model: ServedModel, prompts: Prompts, settings: ApiSettings) -> APIRouter:
    """`/tokenize` and `/detokenize`."""
    router = APIRouter()

    async def read(request: Request, shape: type[B]) -> B:
        body = await read_body(
            request, shape, limit=settings.body_bytes_max, timeout_s=settings.body_timeout_s
        )
        check_model(body.model, model)
        return body

    @router.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await read(request, TokenizeRequest)
        tokens = await _tokens(body, prompts)
        most = backend.limits().context_tokens
        if body.return_token_strs:
            _check_count(tokens, "return_token_strs", most)
        return {
            "count": len(tokens),
            "max_model_len": most,
            "tokens": tokens,
            "token_strs": await prompts.spellings_of(tokens) if body.return_token_strs else None,
        }

    @router.post("/detokenize")
    async def detokenize(request: Request) -> dict[str, str]:
        body = await read(request, DetokenizeRequest)
        _check_count(body.tokens, "tokens", backend.limits().context_tokens)
        check_ids(body.tokens, "tokens", model.vocabulary)
        return {"prompt": await prompts.text_of(body.tokens)}

    return router


def _check_count(tokens: Sequence[int], param: str, most: int) -> None:
    """Raise ApiError for more tokens than any request has: what is done with each holds up all others."""
    if len(tokens) > most:
        raise too_long(param, most, f"'{param}': these are {len(tokens)} tokens")


async def _tokens(body: TokenizeRequest, prompts: Prompts) -> list[int]:
    if body.prompt is not None and body.messages:
        raise invalid("prompt", "Give 'prompt' or 'messages', not both.")
    if body.messages:
        return await prompts.of_messages(
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            add_special_tokens=bool(body.add_special_tokens),
        )
    if body.prompt is None:
        raise invalid("prompt", "Give 'prompt' or 'messages'.", "missing_required_parameter")
    add = body.add_special_tokens is not False
    (tokens,) = await prompts.of_texts([body.prompt], add_special_tokens=add)
    return tokens
