"""Tests of authentication and rate limits at the HTTP port."""

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, Depends, Request
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from baton.api.app import create_app, create_pages
from baton.api.http.authentication import AccessControl, operators_only
from baton.api.http.rate_limit import CALLERS_MAX, RateLimit
from baton.web.api_keys import ApiKeys
from tests.api import tiny
from tests.api.scripted import ScriptedBackend

KEY, OTHER = "sk-one-0123456789", "sk-two-0123456789"
CHAT = "/v1/chat/completions"
BODY = {"model": tiny.model().name, "messages": [{"role": "user", "content": "a"}]}
BEARER = {"Authorization": f"Bearer {KEY}"}


def basic(password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"me:{password}".encode()).decode()}


def router() -> APIRouter:
    routes = APIRouter()

    @routes.get("/ready")
    async def ready(request: Request) -> bool:
        return bool(getattr(request.state, "operator", True))

    @routes.get("/rooms", dependencies=[Depends(operators_only)])
    async def rooms() -> str:
        return "timelines"

    return routes


class DoorClock:
    now_s = 100.0


def application(keys: ApiKeys | None, rate: RateLimit | None = None) -> Any:
    access_control = AccessControl(keys, rate)
    return create_app(
        ScriptedBackend(),
        tiny.model(),
        CollectorRegistry(),
        routers=[router()],
        access_control=access_control,
    )


@asynccontextmanager
async def asking(
    keys: ApiKeys | None, rate: RateLimit | None = None, at: str = "10.0.0.1"
) -> AsyncIterator[httpx.AsyncClient]:
    async with asking_app(application(keys, rate), at) as client:
        yield client


@asynccontextmanager
async def asking_app(app: Any, at: str = "10.0.0.1") -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(at, 4321))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def test_a_tiny_model_has_a_name() -> None:
    assert BODY["model"]


async def test_a_wrong_key_gets_401_in_openais_shape_and_the_right_one_an_answer() -> None:
    async with asking(ApiKeys([KEY], None)) as http:
        for headers in ({}, {"Authorization": f"Bearer {OTHER}"}, {"Authorization": KEY}):
            for reply in (
                await http.post(CHAT, json=BODY, headers=headers),
                await http.get("/v1/models", headers=headers),
                await http.get("/rooms", headers=headers),
                await http.get("/nowhere", headers=headers),
                await http.get("/openapi.json", headers=headers),
            ):
                assert reply.status_code == 401
                assert reply.headers["www-authenticate"] == "Bearer"
                assert reply.headers["x-request-id"]
                error = reply.json()["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
                assert OTHER not in reply.text
        assert (await http.post(CHAT, json=BODY, headers=BEARER)).status_code == 200
        assert (await http.get("/rooms", headers=BEARER)).json() == "timelines"
        lower = {"authorization": f"bearer   {KEY} "}
        assert (await http.get("/v1/models", headers=lower)).status_code == 200


async def test_the_platform_asks_without_a_key_and_is_told_less() -> None:
    async with asking(ApiKeys([KEY], None)) as http:
        assert (await http.get("/ready")).json() is False
        assert (await http.get("/ready", headers=BEARER)).json() is True
    async with asking(None) as http:
        assert (await http.get("/ready")).json() is True, "without keys everybody is known"
        assert (await http.post(CHAT, json=BODY)).status_code == 200


async def test_a_browser_reads_by_its_own_dialogue_and_cannot_be_made_to_compute() -> None:
    page = {"Accept": "text/html,*/*"}
    async with asking(ApiKeys([KEY], None)) as http:
        asked = await http.get("/rooms", headers=page)
        assert asked.status_code == 401
        assert asked.headers["www-authenticate"].startswith('Basic realm="Baton: any name, and an API key')
        assert "any name, and the key as the password" in asked.json()["error"]["message"]
        assert (await http.get("/rooms", headers=page | basic(KEY))).status_code == 200
        assert (await http.get("/rooms", headers=page | basic(OTHER))).status_code == 401
        assert (await http.post(CHAT, json=BODY, headers=basic(KEY))).status_code == 401


async def test_pages_that_are_served_apart_need_no_key_and_are_counted_with_the_api() -> None:
    registry = CollectorRegistry()
    access_control = AccessControl(ApiKeys([KEY], None))
    api = create_app(ScriptedBackend(), tiny.model(), registry, access_control=access_control)
    async with asking_app(create_pages(api, [router()])) as pages, asking_app(api) as http:
        assert (await pages.get("/rooms")).json() == "timelines"
        assert (await pages.get("/v1/models")).status_code == 404
        assert (await http.get("/rooms", headers=BEARER)).status_code == 404
    labels = {"route": "/rooms", "status": "200"}
    assert registry.get_sample_value("baton_http_requests_total", labels) == 1


@given(
    st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.sampled_from([b"Bearer", b"Bearer ", b"Basic", b"Basic =", b"Basic AAAA", b"\xff" * 9, b""]),
            st.binary(max_size=40).map(lambda raw: b"Basic " + base64.b64encode(raw)),
            st.binary(max_size=40).map(lambda raw: b"Bearer " + raw),
            st.binary(max_size=40).map(lambda raw: b"Digest " + raw),
        ),
        max_size=3,
    ),
    st.sampled_from(["GET", "POST", "HEAD", "OPTIONS", "PUT", "BREW"]),
)
async def test_odd_authorization_headers_are_401_and_never_more(given_: list[bytes], method: str) -> None:
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "path": "/v1/models",
        "raw_path": b"/v1/models",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "headers": [(b"authorization", value) for value in given_],
        "client": None,
        "server": ("test", 80),
    }
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    await APPLICATION(scope, receive, send)
    assert sent[0]["status"] == 401


APPLICATION = application(ApiKeys([KEY], None))


async def test_a_key_comes_as_anthropics_clients_send_it_too() -> None:
    """One good key in either header is enough. A wrong key counts as wrong."""
    good, wrong = {"x-api-key": KEY}, {"x-api-key": OTHER}
    async with asking(ApiKeys([KEY], None), RateLimit(1)) as http:
        for headers in (good, good | {"Authorization": f"Bearer {OTHER}"}, wrong | BEARER):
            assert (await http.get("/v1/models", headers=headers)).status_code == 200
        refused = await http.get("/v1/models", headers=wrong)
        assert refused.status_code == 401
        assert (await http.get("/v1/models", headers=wrong)).status_code == 429
        twice = await http.get("/v1/models", headers=[("x-api-key", KEY), ("x-api-key", KEY)])
        assert twice.status_code != 200


async def test_a_refusal_of_the_door_has_the_shape_of_the_api_that_is_asked() -> None:
    async with asking(ApiKeys([KEY], None), RateLimit(1)) as http:
        kinds = []
        for headers in ({}, {"x-api-key": KEY}, {"x-api-key": KEY}):
            reply = await http.post("/v1/messages", json={}, headers=headers)
            kinds.append(reply.json()["error"]["type"])
            assert reply.json()["request_id"] == reply.headers["request-id"]
    assert kinds == ["authentication_error", "invalid_request_error", "rate_limit_error"]


async def test_two_authorizations_are_none() -> None:
    async with asking(ApiKeys([KEY], None)) as http:
        twice = [("Authorization", f"Bearer {KEY}"), ("Authorization", f"Bearer {OTHER}")]
        assert (await http.get("/v1/models", headers=twice)).status_code == 401


async def test_a_websocket_does_not_pass_the_door() -> None:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    await APPLICATION({"type": "websocket", "path": "/rooms", "headers": []}, receive, send)
    assert sent == [{"type": "websocket.close"}]


async def test_each_key_has_a_rate_of_its_own_and_is_told_when_to_come_back() -> None:
    clock = DoorClock()
    async with asking(ApiKeys([KEY, OTHER], None), RateLimit(2, lambda: clock.now_s)) as http:
        mine, theirs = BEARER, {"Authorization": f"Bearer {OTHER}"}
        statuses = [(await http.post(CHAT, json=BODY, headers=mine)).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        refused = await http.post(CHAT, json=BODY, headers=mine)
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert (await http.post(CHAT, json=BODY, headers=theirs)).status_code == 200
        assert (await http.get("/v1/models", headers=mine)).status_code == 200, "reading is free"
        clock.now_s += 0.5
        statuses = [(await http.post(CHAT, json=BODY, headers=mine)).status_code for _ in range(2)]
        assert statuses == [200, 429]


async def test_guessing_keys_has_the_rate_of_an_address() -> None:
    clock = DoorClock()
    app = application(ApiKeys([KEY], None), RateLimit(2, lambda: clock.now_s))
    async with asking_app(app) as http, asking_app(app, "10.0.0.2") as elsewhere:
        guesses = [
            (await http.get("/v1/models", headers={"Authorization": f"Bearer {OTHER}{at}"})).status_code
            for at in range(4)
        ]
        assert guesses == [401, 401, 429, 429]
        guess = {"Authorization": f"Bearer {OTHER}"}
        assert (await http.get("/ready", headers=guess)).status_code == 429, "it would tell who is known"
        assert (await http.get("/ready")).status_code == 200
        assert (await http.get("/v1/models", headers=BEARER)).status_code == 200
        assert (await elsewhere.get("/v1/models")).status_code == 401


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
    ],
)
async def test_without_keys_the_rate_is_an_addresss(first: str, second: str, same: bool) -> None:
    clock = DoorClock()
    app = application(None, RateLimit(1, lambda: clock.now_s))
    async with asking_app(app, first) as one, asking_app(app, second) as two:
        assert (await one.post(CHAT, json=BODY)).status_code == 200
        assert (await two.post(CHAT, json=BODY)).status_code == (429 if same else 200)


def test_a_rate_is_kept_over_time_and_its_table_is_bounded() -> None:
    clock = DoorClock()
    rate = RateLimit(10, lambda: clock.now_s)
    let_in = 0
    for _ in range(1_000):
        let_in += rate.take(b"busy") == 0
        clock.now_s += 0.01
    assert 100 <= let_in <= 110, "ten a second for ten seconds, and one second's worth at once"
    for at in range(CALLERS_MAX + 5):
        assert rate.take(at.to_bytes(4)) == 0
    assert len(rate) == CALLERS_MAX


@pytest.mark.parametrize("headers", [{}, BEARER], ids=["no key", "a key that means nothing"])
async def test_a_request_without_api_keys_counts_once(headers: dict[str, str]) -> None:
    """Clients send any key to a server without keys. Admin keys alone do not make it a wrong one."""
    clock = DoorClock()
    access_control = AccessControl(None, RateLimit(2, lambda: clock.now_s), admin_keys=ApiKeys([OTHER], None))
    app = create_app(
        ScriptedBackend(),
        tiny.model(),
        CollectorRegistry(),
        routers=[router()],
        access_control=access_control,
    )
    async with asking_app(app) as http:
        statuses = [(await http.post(CHAT, json=BODY, headers=headers)).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
