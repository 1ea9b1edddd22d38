"""Tests of sampling parameters that the model recommends and that a request sets."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.api.backend import Limits
from baton.api.errors import ApiError
from baton.api.requests.meaning_reader import chat_meaning, completion_meaning
from baton.api.requests.request_builder import admit
from baton.api.requests.sampling_defaults import differing, recommended
from baton.api.requests.schemas import ChatRequest, CompletionRequest, RecommendedSampling
from baton.models.model_facts import ModelUnreadable
from baton.rooms.request import Sampling
from baton.rooms.worker_facts import ServedEngine
from tests.api import tiny
from tests.api.scripted import ScriptedBackend

QWEN3 = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
"""Qwen 3's recommendation, with a penalty that other models have."""
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def drawn(recommendation: RecommendedSampling, chat: bool = False, **fields: Any) -> dict[str, float]:
    """Return the sampling settings that a worker is sent for a request with these fields."""
    model = replace(tiny.model(), recommended_sampling=recommendation)
    limits = Limits(512, 0, 0)
    if chat:
        body = ChatRequest(model=model.name, messages=[{"role": "user", "content": "x"}], **fields)  # type: ignore[list-item]
        (request,) = admit(body, chat_meaning(body), [[1]], model, limits, "r", salt=0)
    else:
        whole = CompletionRequest(model=model.name, prompt=["x"], **fields)
        (request,) = admit(whole, completion_meaning(whole), [[1]], model, limits, "r", salt=0)
    return {name: getattr(request.sampling, name) for name in NAMES}


def in_a_file(directory: Path, **words: Any) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(words))
    return directory


PLAIN = {name: getattr(Sampling(), name) for name in NAMES}


@pytest.mark.parametrize("chat", [True, False])
def test_what_a_request_does_not_say_is_as_recommended(chat: bool, tmp_path: Path) -> None:
    words = {**QWEN3, "repetition_penalty": 1.05, "do_sample": True, "max_new_tokens": 7, "eos_token_id": 3}
    told = recommended(in_a_file(tmp_path, **words))
    assert drawn(told, chat) == PLAIN | QWEN3 | {"repetition_penalty": 1.05}
    assert differing(told) == QWEN3 | {"repetition_penalty": 1.05}


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"top_k": 0},
        {"top_p": 1.0, "min_p": 0.2},
        {"repetition_penalty": 1.0},
    ],
    ids=str,
)
def test_a_field_that_is_given_wins_also_where_it_says_the_default(
    given: dict[str, Any], tmp_path: Path
) -> None:
    told = recommended(in_a_file(tmp_path, **QWEN3, repetition_penalty=1.3))
    assert drawn(told, **given) == PLAIN | QWEN3 | {"repetition_penalty": 1.3} | given


def test_null_is_not_given(tmp_path: Path) -> None:
    told = recommended(in_a_file(tmp_path, **QWEN3, min_p=None))
    assert drawn(told, temperature=None) == PLAIN | QWEN3


def test_nothing_is_recommended_without_a_file_or_by_one_that_is_silent(tmp_path: Path) -> None:
    assert recommended(tmp_path) == RecommendedSampling()
    assert recommended(in_a_file(tmp_path, do_sample=False, _from_model_config=True)) == RecommendedSampling()
    assert drawn(RecommendedSampling()) == PLAIN
    assert differing(recommended(in_a_file(tmp_path, temperature=1.0))) == {}


@pytest.mark.parametrize(
    ("words", "field"),
    [({"temperature": "hot"}, "temperature"), ({"top_p": 0}, "top_p"), ({"top_k": 1.5}, "top_k")],
    ids=str,
)
def test_a_recommendation_that_no_request_could_have_is_said_with_what_helps(
    words: dict[str, Any], field: str, tmp_path: Path
) -> None:
    with pytest.raises(
        ModelUnreadable, match=rf"generation_config.json: {field}: .* --generation-config none"
    ):
        recommended(in_a_file(tmp_path, **words))


async def test_clients_are_told_what_is_recommended() -> None:
    model = replace(tiny.model(), recommended_sampling=RecommendedSampling(**QWEN3))  # type: ignore[arg-type]
    for each, told in ((model, QWEN3), (tiny.model(), {})):
        app = create_app(ScriptedBackend(), each, CollectorRegistry())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
            card = (await client.get(f"/v1/models/{tiny.MODEL}")).json()
        assert card["default_sampling_params"] == told


async def test_clients_are_told_what_the_workers_quantise_once_there_are_any() -> None:
    backend = ScriptedBackend()
    app = create_app(backend, tiny.model(), CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
        for told in (None, "int8"):
            backend.known_limits = replace(backend.known_limits, quantize=told)
            (card,) = (await client.get("/v1/models")).json()["data"]
            assert card["quantize"] == told


async def test_clients_are_told_what_the_engine_promises_once_there_is_one() -> None:
    backend = ScriptedBackend()
    app = create_app(backend, tiny.model(), CollectorRegistry())
    vllm = ServedEngine("vllm", "bfloat16", batch_invariant=False, whole_prompts=True)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as client:
        for engine, told in ((None, (None, None, None)), (vllm, ("vllm", "bfloat16", False))):
            backend.known_limits = replace(backend.known_limits, engine=engine)
            (card,) = (await client.get("/v1/models")).json()["data"]
            assert (card["engine"], card["dtype"], card["batch_invariant"]) == told


@pytest.mark.parametrize(("field", "value"), [("n", 2), ("prompt_logprobs", 1)])
def test_what_needs_a_prompt_in_parts_is_refused_by_name_where_the_engine_computes_it_whole(
    field: str, value: int
) -> None:
    model, limits = tiny.model(), Limits(100, 100, 100)
    whole = ServedEngine("vllm", "float32", batch_invariant=True, whole_prompts=True)
    body = CompletionRequest.model_validate({"model": tiny.MODEL, "prompt": "a", field: value})
    meaning = completion_meaning(body)
    for engine in (None, replace(whole, whole_prompts=False)):
        assert admit(body, meaning, [(1, 2)], model, replace(limits, engine=engine), "r", salt=0)
    with pytest.raises(ApiError, match="computes a prompt as a whole") as caught:
        admit(body, meaning, [(1, 2)], model, replace(limits, engine=whole), "r", salt=0)
    assert caught.value.param == field
