"""/tokenize, /detokenize, /version, added routes, and what is counted."""

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, Query
from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.api.backend import Limits, RoomFailed
from baton.api.generation import prompt_encoder
from baton.rooms.errors import Reason
from tests.api import tiny
from tests.api.requests.test_bad_input import CHAT, chat, check
from tests.api.scripted import LENGTH, ScriptedBackend, batch
from tests.patience import PATIENCE_S


async def test_what_can_be_read_can_be_asked_for_without_its_body(url: str) -> None:
    """Load balancers send HEAD unless they are configured otherwise."""
    async with httpx.AsyncClient(base_url=url) as client:
        for path in ("/version", "/v1/models", f"/v1/models/{tiny.MODEL}", "/openapi.json"):
            head, whole = await client.head(path), await client.get(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-length"] == whole.headers["content-length"]
            assert head.headers["x-request-id"]
        assert (await client.head("/v1/models/other")).status_code == 404
        assert (await client.head("/v1/chat/completions")).status_code == 405


async def test_tokenize_a_prompt(http: httpx.AsyncClient) -> None:
    reply = (await http.post("/tokenize", json={"prompt": "The fox", "return_token_strs": True})).json()
    ids = tiny.ids("The fox")
    pieces = tiny.byte_level().convert_ids_to_tokens(ids)
    assert reply == {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": pieces}


async def test_tokenize_messages(http: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {"model": tiny.MODEL, "messages": [{"role": "user", "content": "hi"}]}
    reply = (await http.post("/tokenize", json=body)).json()
    assert reply["tokens"] == tiny.ids("<|start|>user\nhi<|end|>\n<|start|>assistant\n")
    assert reply["token_strs"] is None
    reply = (await http.post("/tokenize", json={**body, "add_generation_prompt": False})).json()
    assert reply["tokens"] == tiny.ids("<|start|>user\nhi<|end|>\n")


async def test_tokenize_takes_one_of_both(http: httpx.AsyncClient) -> None:
    both = {"prompt": "x", "messages": [{"role": "user", "content": "hi"}]}
    check(await http.post("/tokenize", json=both), 400, "prompt")
    check(await http.post("/tokenize", json={}), 400, "prompt", "missing_required_parameter")


async def test_detokenize(http: httpx.AsyncClient) -> None:
    text = "<|start|>The fox 😀"
    assert (await http.post("/detokenize", json={"tokens": tiny.ids(text)})).json() == {"prompt": text}
    check(await http.post("/detokenize", json={"tokens": [1, 10**6]}), 400, "tokens[1]")


async def test_more_tokens_than_the_context_has_are_neither_spelled_nor_made_text(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    most = backend.limits().context_tokens
    many = [tiny.ids("a")[0]] * most
    assert (await http.post("/detokenize", json={"tokens": many})).json() == {"prompt": "a" * most}
    too_many = await http.post("/detokenize", json={"tokens": [*many, 10**6]})
    check(too_many, 400, "tokens", "context_length_exceeded")
    text = " the" * most
    for prompt, spelled in ((text, most), (text + "!", None)):
        assert (await http.post("/tokenize", json={"prompt": prompt})).json()["token_strs"] is None
        reply = await http.post("/tokenize", json={"prompt": prompt, "return_token_strs": True})
        if spelled is None:
            check(reply, 400, "return_token_strs", "context_length_exceeded")
        else:
            assert len(reply.json()["token_strs"]) == spelled


async def test_many_tokens_are_spelled_beside_the_event_loop(
    http: httpx.AsyncClient, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    threads: set[str] = set()

    def watched(*_: object) -> str:
        threads.add(threading.current_thread().name)
        return "x"

    monkeypatch.setattr("baton.api.text.tokenizer.Tokenizer.piece", watched)
    monkeypatch.setattr(prompt_encoder, "INLINE_CHARS_MAX", 100)
    reply = await http.post("/tokenize", json={"prompt": " the" * 101, "return_token_strs": True})
    assert set(reply.json()["token_strs"]) == {"x"}
    assert threads
    assert all(name.startswith("tokenise") for name in threads)


async def test_long_texts_are_tokenised_beside_the_event_loop(
    http: httpx.AsyncClient, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    threads: list[str] = []
    encode = tiny.model().tokenizer.encode

    def watched(self: object, text: str, **how: Any) -> list[int]:
        threads.append(threading.current_thread().name)
        return encode(text, **how)

    monkeypatch.setattr("baton.api.text.tokenizer.Tokenizer.encode", watched)
    backend.known_limits = Limits(2000, 0, 0)
    long = "a" * (prompt_encoder.INLINE_CHARS_MAX + 1)
    for text in ("short", long):
        reply = await http.post("/tokenize", json={"prompt": text})
        assert reply.json()["count"] > 0
    assert threads[0] == threading.main_thread().name
    assert threads[1].startswith("tokenise")


async def test_version(http: httpx.AsyncClient) -> None:
    assert (await http.get("/version")).json().keys() == {"version"}


async def test_an_id_in_a_path_keeps_its_slashes(backend: ScriptedBackend) -> None:
    router = APIRouter()

    @router.get("/requests/{id:path}")
    async def one(id: str) -> dict[str, str]:  # noqa: A002
        return {"id": id}

    app = create_app(backend, tiny.model(), CollectorRegistry(), routers=[router])
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for path in ("/requests/a//b", "//requests///a//b/"):
            reply = await http.request("GET", httpx.URL("http://test").copy_with(raw_path=path.encode()))
            assert reply.json()["id"] == "a//b", path


async def test_added_routes_get_ids_errors_and_counting(backend: ScriptedBackend) -> None:
    router = APIRouter()

    @router.get("/extra/{name}")
    async def extra(name: str, size: int = Query(1, ge=1)) -> dict[str, int]:
        return {name: 10 // (size - 7)}

    registry = CollectorRegistry()
    app = create_app(backend, tiny.model(), registry, routers=[router])
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        reply = await client.get("/extra/x?size=2", headers={"X-Request-Id": "e1"})
        assert (reply.json(), reply.headers["x-request-id"]) == ({"x": -2}, "e1")
        check(await client.get("/extra/x?size=0"), 400, "size")
        check(await client.get("/extra/x?size=7"), 500, None, "internal_error")
    for status in ("200", "400", "500"):
        assert requests(registry, "/extra/{name}", status) == 1


async def test_requests_and_latencies_are_counted(
    http: httpx.AsyncClient, backend: ScriptedBackend, registry: CollectorRegistry
) -> None:
    backend.script = lambda _: [batch(tiny.ids("a")), batch(tiny.ids("bc")), batch(tiny.ids("d"), LENGTH)]
    for stream in (False, True):
        assert (await http.post(CHAT, json=chat(stream=stream))).status_code == 200
    await http.post(CHAT, json={})
    await http.get("/nowhere")
    assert requests(registry, CHAT, "200") == 2
    assert requests(registry, CHAT, "400") == 1
    assert requests(registry, "none", "404") == 1
    after_first = 2 * (len(tiny.ids("bc")) + len(tiny.ids("d")))
    assert registry.get_sample_value("baton_time_to_first_token_seconds_count") == 2
    assert registry.get_sample_value("baton_inter_token_latency_seconds_count") == after_first


@pytest.mark.parametrize(
    ("failure", "status"),
    [(RoomFailed("decode-0 is gone", Reason.DECODE_LOST), "503"), (ZeroDivisionError("oops"), "500")],
)
async def test_a_stream_that_broke_off_is_counted_as_the_error_that_it_told(
    http: httpx.AsyncClient,
    backend: ScriptedBackend,
    registry: CollectorRegistry,
    failure: Exception,
    status: str,
) -> None:
    backend.script = lambda _: [batch(tiny.ids("The")), failure]
    assert (await http.post(CHAT, json=chat(stream=True))).status_code == 200
    assert (requests(registry, CHAT, "200"), requests(registry, CHAT, status)) == (0, 1)


async def test_a_client_gone_before_the_answer_is_counted_as_499(
    url: str, backend: ScriptedBackend, registry: CollectorRegistry
) -> None:
    backend.script = lambda _: [asyncio.Event()]
    async with httpx.AsyncClient(base_url=url) as client:
        request = asyncio.create_task(client.post(CHAT, json=chat()))
        async with asyncio.timeout(PATIENCE_S):
            while not backend.streams:
                await asyncio.sleep(0.001)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
            while not requests(registry, CHAT, "499"):
                await asyncio.sleep(0.001)
    assert requests(registry, CHAT, "499") == 1


def requests(registry: CollectorRegistry, route: str, status: str) -> float | None:
    return registry.get_sample_value("baton_http_requests_total", {"route": route, "status": status})


async def test_every_path_is_in_the_openapi_document(http: httpx.AsyncClient) -> None:
    assert set((await http.get("/openapi.json")).json()["paths"]) >= {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/version",
    }
