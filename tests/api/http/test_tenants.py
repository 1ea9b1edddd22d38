"""Tests of the priority class and the tenant under which a request waits."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.api.http.authentication import AccessControl
from baton.api.settings import ApiSettings
from baton.web.api_keys import ApiKeys
from tests.api import tiny
from tests.api.requests.test_bad_input import CHAT, COMPLETIONS, chat, check, completion
from tests.api.requests.test_cache_salt import KEYS
from tests.api.scripted import ScriptedBackend

MESSAGES: Final = {"model": chat()["model"], "max_tokens": 3, "messages": chat()["messages"]}
BODIES: Final[Mapping[str, dict[str, Any]]] = {
    CHAT: chat(),
    COMPLETIONS: completion(),
    "/v1/responses": {"input": "hi"},
    "/v1/messages": MESSAGES,
}


class Asking:
    """A client of one application, and the requests that its backend got."""

    def __init__(self, http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
        self.http = http
        self.backend = backend

    async def tenant(self, **headers: str) -> bytes:
        reply = await self.http.post(CHAT, json=chat(), headers=headers)
        assert reply.status_code == 200, reply.text
        return self.backend.asked[-1].tenant


@asynccontextmanager
async def asking(settings: ApiSettings, *, keys: bool = True) -> AsyncIterator[Asking]:
    backend = ScriptedBackend()
    access_control = AccessControl(ApiKeys(KEYS, None)) if keys else AccessControl()
    app = create_app(backend, tiny.model(), CollectorRegistry(), settings, access_control=access_control)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        yield Asking(http, backend)


@pytest.mark.parametrize("path", BODIES)
async def test_the_class_that_a_body_asks_for_is_its_requests(
    http: httpx.AsyncClient, backend: ScriptedBackend, path: str
) -> None:
    for given, priority in (({}, 0), ({"priority": 7}, 7), ({"priority": None}, 0)):
        reply = await http.post(path, json=BODIES[path] | given)
        assert reply.status_code == 200, reply.text
        assert backend.asked[-1].priority == priority


@pytest.mark.parametrize("path", BODIES)
async def test_rejected_stays_out_nobody_comes_before_others_by_asking(
    http: httpx.AsyncClient, backend: ScriptedBackend, path: str
) -> None:
    for wrong in (-1, 2**31, 0.5, "first"):
        reply = await http.post(path, json=BODIES[path] | {"priority": wrong})
        assert (reply.status_code, "priority" in reply.text) == (400, True)
    assert backend.asked == []


async def test_where_a_lower_class_is_allowed_it_is_taken_and_no_lower_one() -> None:
    async with asking(ApiSettings(min_priority=-2), keys=False) as at:
        assert (await at.http.post(CHAT, json=chat(priority=-2))).status_code == 200
        assert at.backend.asked[-1].priority == -2
        refused = await at.http.post(CHAT, json=chat(priority=-3))
        check(refused, 400, "priority")
        assert "the lowest that is taken here is -2" in refused.text


async def test_a_tenant_is_a_key_and_is_not_told_by_it() -> None:
    one, two = (f"Bearer {key}" for key in KEYS)
    async with asking(ApiSettings()) as at:
        first = await at.tenant(authorization=one)
        assert first == await at.tenant(authorization=one, **{"x-tenant": "a"}), "no header was named"
        assert first != await at.tenant(authorization=two)
    assert not any(key.encode() in first for key in KEYS)


async def test_a_header_tells_the_tenants_of_one_caller_apart_where_it_is_named() -> None:
    one, two = (f"Bearer {key}" for key in KEYS)
    async with asking(ApiSettings(tenant_header="x-tenant")) as at:
        asked = [(one, "a"), (one, "b"), (two, "a"), (one, ""), (two, "")]
        tenants = [await at.tenant(authorization=key, **{"X-Tenant": name}) for key, name in asked]
        assert len({*tenants}) == len(asked)
        assert tenants[3] == await at.tenant(authorization=one)
        long = await at.tenant(authorization=one, **{"X-Tenant": "x" * 4_000})
        assert len(long) <= 32, "what is kept of it does not grow with it"
