"""Routes that describe the served model and Baton's version.

The description of a model has OpenAI's and Anthropic's fields at once. Each client reads the fields that it
knows.
"""

from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import APIRouter
from typing_extensions import TypedDict

from baton.api.backend import Backend
from baton.api.http.openapi_document import NAMING, describe
from baton.api.model_interface import Model
from baton.api.requests.meaning_reader import check_model
from baton.api.requests.sampling_defaults import differing
from baton.rooms.worker_facts import ServedEngine


class EnginePromises(TypedDict):
    engine: str | None
    """Name of the inference engine. `engine`, `dtype` and `batch_invariant` are null while no
    worker is known."""
    dtype: str | None
    """Data type of the keys and values in the KV cache."""
    batch_invariant: bool | None
    """Whether a request's tokens are independent of the other requests in a batch and of how prompts are
    divided into chunks."""


class ModelCard(EnginePromises):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    default_sampling_params: dict[str, Any]
    quantize: str | None
    """Quantization format in which workers hold the weights. Null while no worker is known."""
    type: Literal["model"]
    """Type of the object, always `model`. This field and those after it are the model's description in
    Anthropic's API. Those before it are OpenAI's and Baton's."""
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int
    lifecycle: str


class ModelCards(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]
    has_more: bool
    first_id: str
    last_id: str


class Release(TypedDict):
    version: str


def root_answer(release: str) -> dict[str, str]:
    """Return the body of `GET /`: Baton's name and version, and the paths of its API and OpenAPI document."""
    return {"name": "Baton", "version": release, "api": "/v1", "documents": "/openapi.json"}


def model_routes(backend: Backend, model: Model, release: str, created_s: int) -> APIRouter:
    """Return the routes `/v1/models`, `/v1/models/{id}`, `/tokenizer_info` and `/version`."""
    router = APIRouter()
    created_at = datetime.fromtimestamp(created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def card(name: str) -> ModelCard:
        return {
            "id": name,
            "object": "model",
            "created": created_s,
            "owned_by": "baton",
            "root": name,
            "parent": None,
            "max_model_len": backend.limits().context_tokens,
            "default_sampling_params": differing(model.recommended_sampling),
            "quantize": backend.limits().quantize,
            **_promises(backend.limits().engine),
            "type": "model",
            "display_name": name,
            "created_at": created_at,
            "max_input_tokens": backend.limits().context_tokens,
            "max_tokens": backend.limits().context_tokens,
            "lifecycle": "active",
        }

    @router.get("/v1/models", **describe(answers=ModelCards))
    async def models() -> ModelCards:
        names = model.names
        cards = [card(name) for name in names]
        return {
            "object": "list",
            "data": cards,
            "has_more": False,
            "first_id": names[0],
            "last_id": names[-1],
        }

    @router.get("/v1/models/{name:path}", **describe(answers=ModelCard, statuses=NAMING))
    async def one_model(name: str) -> ModelCard:
        check_model(name, model.names)
        return card(name)

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        return model.tokenizer.info

    @router.get("/version", **describe(answers=Release))
    async def version() -> Release:
        return {"version": release}

    return router


def _promises(engine: ServedEngine | None) -> EnginePromises:
    """Return the fields of a model's description that describe the workers' engine: name, number format,
    batch invariance. All are null if no engine is known."""
    if engine is None:
        return {"engine": None, "dtype": None, "batch_invariant": None}
    return {
        "engine": engine.name or None,
        "dtype": engine.dtype,
        "batch_invariant": engine.batch_invariant,
    }


def root_route(release: str) -> APIRouter:
    """Return the route `/`, which agents and load balancers request to see whether a server is there."""
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def root() -> dict[str, str]:
        return root_answer(release)

    return router
