"""Tests of requests by pages of other origins."""

from typing import Final

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from baton.api.app import create_app
from baton.api.http.authentication import AccessControl
from baton.api.http.cors import open_to
from baton.api.http.rate_limit import RateLimit
from baton.api.settings import ApiSettings
from baton.bootstrap.settings import BootstrapSettings
from baton.runtime.errors import SettingsError
from baton.runtime.settings import load
from baton.web.api_keys import ApiKeys
from tests.api import tiny
from tests.api.scripted import ScriptedBackend

KEY: Final = "sk-of-a-page-0123456789"
HERE, OTHER = "https://app.example", "https://other.example"
CHAT: Final = "/v1/chat/completions"
BODY: Final = {"messages": [{"role": "user", "content": "Hi"}]}
READABLE: Final = "access-control-allow-origin"


def application(*origins: str) -> ASGIApp:
    """Return an application that requires a key, with a rate of two requests and bodies of at most 1,000
    bytes."""
    access_control = AccessControl(ApiKeys([KEY], None), RateLimit(2, lambda: 100.0))
    settings = ApiSettings(body_bytes_max=1000)
    return open_to(
        create_app(
            ScriptedBackend(), tiny.model(), CollectorRegistry(), settings, access_control=access_control
        ),
        origins,
    )


def asking(app: ASGIApp, origin: str = HERE) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test", headers={"Origin": origin}
    )


async def preflight(http: httpx.AsyncClient, method: str = "POST") -> httpx.Response:
    wanted = {
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    return await http.options(CHAT, headers=wanted)


async def test_a_preflight_is_answered_without_a_key_for_the_origins_that_are_let_in() -> None:
    app = application(HERE)
    async with asking(app) as ours, asking(app, OTHER) as theirs:
        allowed = await preflight(ours)
        assert (allowed.status_code, allowed.headers[READABLE]) == (200, HERE)
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        assert "POST" in allowed.headers["access-control-allow-methods"]
        assert "access-control-allow-credentials" not in allowed.headers
        refused = await preflight(theirs)
        assert (refused.status_code, READABLE in refused.headers) == (400, False)


async def test_an_answer_and_each_refusal_of_the_door_can_be_read() -> None:
    key = {"Authorization": f"Bearer {KEY}"}
    async with asking(application(HERE)) as http:
        replies = [
            await http.post(CHAT, json=BODY),
            await http.post(CHAT, content=b"x" * 2000, headers=key | {"Content-Type": "application/json"}),
            await http.post(CHAT, json=BODY, headers=key),
            await http.post(CHAT, json=BODY, headers=key),
            await http.get("/nowhere", headers=key),
        ]
    assert [each.status_code for each in replies] == [401, 413, 200, 429, 404]
    for each in replies:
        assert each.headers[READABLE] == HERE
        assert each.headers["access-control-expose-headers"] == "x-request-id, request-id, retry-after"
        assert "Origin" in each.headers["vary"]
        assert "x-request-id" in each.headers
    assert "retry-after" in replies[3].headers


async def test_a_stream_can_be_read_too() -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with asking(application(HERE)) as http:
        reply = await http.post(CHAT, json=BODY | {"stream": True}, headers=headers)
    assert reply.headers[READABLE] == HERE
    assert reply.text.endswith("data: [DONE]\n\n")


async def test_any_page_may_ask_where_that_is_said_and_none_where_nothing_is() -> None:
    async with asking(application("*"), OTHER) as http:
        assert (await preflight(http)).headers[READABLE] == "*"
        assert (await http.post(CHAT, json=BODY)).headers[READABLE] == "*"
    async with asking(application()) as http:
        assert (await preflight(http)).status_code == 401
        assert READABLE not in (await http.post(CHAT, json=BODY)).headers


@pytest.mark.parametrize(
    "wrong",
    [
        "app.example",
        "https://app.example/",
        "https://App.example",
        "https://a b",
        "https://a:443",
        "null",
        "http://a:80",
    ],
)
def test_what_no_browser_sends_as_an_origin_ends_the_start(wrong: str) -> None:
    with pytest.raises(
        SettingsError, match=r"--cors-origins: .* is not allowed: use origins as browsers send"
    ):
        load(BootstrapSettings, {"cors_origins": f"{HERE},{wrong}"}, {})


def test_origins_of_pages_apps_and_extensions_are_taken() -> None:
    given = (
        "https://app.example,http://localhost:3000,http://[::1]:5173,tauri://localhost,chrome-extension://abc"
    )
    assert load(BootstrapSettings, {"cors_origins": given}, {}).cors_origins == tuple(given.split(","))
    assert load(BootstrapSettings, {"cors_origins": "*"}, {}).cors_origins == ("*",)
