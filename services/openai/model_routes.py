"""What is served here, and by which release?"""

from typing import Any

from fastapi import APIRouter

from services.openai.backend import Backend
from services.openai.drawing import differing
from services.openai.intake import check_model
from services.openai.model import ServedModel


def model_routes(backend: Backend, model: ServedModel, release: str, created_s: int) -> APIRouter:
    """`/v1/models`, `/v1/models/{id}`, `/tokenizer_info` and `/version`."""
    router = APIRouter()

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created_s,
            "owned_by": "baton",
            "max_model_len": backend.limits().context_tokens,
            "default_sampling_params": differing(model.drawing),
        }

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in model.names]}

    @router.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        check_model(name, model)
        return card(name)

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        return model.tokenizer.info

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": release}

    return router
