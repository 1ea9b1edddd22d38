"""Tests of the rights of callers: every route of the bootstrap, without a key and with each kind of key."""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any, Final

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.api.app import create_app, create_pages
from baton.api.http.authentication import AccessControl
from baton.api.http.middleware import ApiMiddleware
from baton.bootstrap.admin_routes import probe_router
from baton.bootstrap.wiring import operator_routers
from baton.web.api_keys import ApiKeys
from tests.api import tiny
from tests.api.scripted import ScriptedBackend
from tests.bootstrap.scripted import House, house

KEY, OTHER, ADMIN = "sk-one-0123456789", "sk-two-0123456789", "sk-admin-0123456789"
CALLERS: Final[Mapping[str, str | None]] = {"no key": None, "a key": KEY, "another": OTHER, "admin": ADMIN}

PROBE, API, OPERATORS, METRICS, PAGE, ROOT = "probe", "api", "operators", "metrics", "page", "root"
ROUTES: Final[Mapping[tuple[str, str], str]] = {
    ("GET", "/health"): PROBE,
    ("GET", "/ready"): PROBE,
    ("GET", "/ping"): PROBE,
    ("GET", "/openapi.json"): API,
    ("POST", "/v1/chat/completions"): API,
    ("POST", "/v1/completions"): API,
    ("POST", "/v1/messages"): API,
    ("POST", "/v1/messages/count_tokens"): API,
    ("POST", "/v1/responses"): API,
    ("POST", "/v1/responses/input_tokens"): API,
    ("GET", "/v1/responses/{id}"): API,
    ("DELETE", "/v1/responses/{id}"): API,
    ("GET", "/v1/responses/{id}/input_items"): API,
    ("GET", "/v1/models"): API,
    ("GET", "/v1/models/{name:path}"): API,
    ("GET", "/version"): API,
    ("POST", "/tokenize"): API,
    ("POST", "/detokenize"): API,
    ("POST", "/v1/tokenize"): API,
    ("POST", "/v1/detokenize"): API,
    ("POST", "/invocations"): API,
    ("GET", "/tokenizer_info"): API,
    ("GET", "/metrics"): METRICS,
    ("GET", "/rooms"): OPERATORS,
    ("GET", "/rooms/{room}"): OPERATORS,
    ("PUT", "/workers/{process}"): OPERATORS,
    ("GET", "/live"): OPERATORS,
    ("GET", "/workers"): OPERATORS,
    ("GET", "/requests"): OPERATORS,
    ("GET", "/requests/{id_:path}"): OPERATORS,
    ("GET", "/ui"): PAGE,
    ("GET", "/ui/{name}"): PAGE,
    ("GET", "/"): ROOT,
}
"""Kind of each route, which decides who may call it. A new route needs an entry."""

IN, UNKNOWN, NOT_YOURS = "let in", "401", "403"
ALL: Final = (IN, IN, IN, IN)
WITH_A_KEY: Final = (UNKNOWN, IN, IN, UNKNOWN)
WITH_ANY: Final = (UNKNOWN, IN, IN, IN)
ADMINS: Final = (UNKNOWN, UNKNOWN, UNKNOWN, IN)


def keys(*given: str) -> ApiKeys:
    return ApiKeys(given, None)


def access_controls() -> dict[str, AccessControl]:
    return {
        "no keys": AccessControl(),
        "one key": AccessControl(keys(KEY)),
        "several keys": AccessControl(keys(KEY, OTHER)),
        "several keys, open": AccessControl(keys(KEY, OTHER), open_admin=True),
        "several keys and an admin's": AccessControl(keys(KEY, OTHER), admin_keys=keys(ADMIN)),
        "one key and an admin's": AccessControl(keys(KEY), admin_keys=keys(ADMIN)),
        "an admin's key alone": AccessControl(admin_keys=keys(ADMIN)),
    }


RIGHTS: Final[Mapping[str, Mapping[str, tuple[str, str, str, str]]]] = {
    "no keys": dict.fromkeys((API, OPERATORS, METRICS, PAGE, ROOT), ALL),
    "one key": dict.fromkeys((API, OPERATORS, METRICS, PAGE, ROOT), (UNKNOWN, IN, UNKNOWN, UNKNOWN)),
    "several keys": {
        API: WITH_A_KEY,
        OPERATORS: (UNKNOWN, NOT_YOURS, NOT_YOURS, UNKNOWN),
        METRICS: (UNKNOWN, NOT_YOURS, NOT_YOURS, UNKNOWN),
        PAGE: WITH_A_KEY,
        ROOT: WITH_A_KEY,
    },
    "several keys, open": dict.fromkeys((API, OPERATORS, METRICS, PAGE, ROOT), WITH_A_KEY),
    "several keys and an admin's": {
        API: WITH_ANY,
        OPERATORS: (UNKNOWN, NOT_YOURS, NOT_YOURS, IN),
        METRICS: (UNKNOWN, NOT_YOURS, NOT_YOURS, IN),
        PAGE: WITH_ANY,
        ROOT: WITH_ANY,
    },
    "one key and an admin's": {
        API: (UNKNOWN, IN, UNKNOWN, IN),
        OPERATORS: (UNKNOWN, NOT_YOURS, UNKNOWN, IN),
        METRICS: (UNKNOWN, NOT_YOURS, UNKNOWN, IN),
        PAGE: (UNKNOWN, IN, UNKNOWN, IN),
        ROOT: (UNKNOWN, IN, UNKNOWN, IN),
    },
    "an admin's key alone": {API: ALL, OPERATORS: ADMINS, METRICS: ADMINS, PAGE: ADMINS, ROOT: ALL},
}
"""Status for each caller, in the order of CALLERS."""

APART: Final[Mapping[str, Mapping[str, tuple[str, str, str, str]]]] = {
    "no admin key": dict.fromkeys((API, OPERATORS, METRICS, PAGE, ROOT), ALL),
    "an admin key": {API: ALL, OPERATORS: ADMINS, METRICS: ALL, PAGE: ADMINS, ROOT: ALL},
}
"""Likewise, on a port of their own. Its one route of the API describes the others."""


@pytest.fixture
async def at() -> AsyncIterator[House]:
    async with house() as made:
        yield made


def application(at: House, access_control: AccessControl) -> ApiMiddleware:
    routers = [probe_router(at.registry, lambda: None), *operator_routers(at.rooms, at.metrics, at.peers)]
    return create_app(
        ScriptedBackend(), tiny.model(), CollectorRegistry(), routers=routers, access_control=access_control
    )


def routes_of(app: Any) -> Iterator[tuple[str, str]]:
    """Methods and paths that the application serves, also those that it keeps in routers."""
    waiting: list[Iterable[Any]] = [app.routes]
    for routes in waiting:
        for route in routes:
            if hasattr(route, "original_router"):
                waiting.append(route.original_router.routes)
            else:
                yield from ((method, route.path) for method in route.methods - {"HEAD"})


async def answer(app: Any, method: str, path: str, key: str | None, **headers: str) -> str:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    shown = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        reply = await http.request(
            method, path, headers=shown | headers, json={} if method == "POST" else None
        )
    assert reply.status_code < 500, reply.text
    return {401: UNKNOWN, 403: NOT_YOURS}.get(reply.status_code, IN)


def example(path: str) -> str:
    return "/".join("x" if each.startswith("{") else each for each in path.split("/"))


async def test_every_route_has_a_line(at: House) -> None:
    assert {*routes_of(application(at, AccessControl()).app)} == ROUTES.keys()


@pytest.mark.parametrize("access_control", RIGHTS)
async def test_each_caller_is_let_in_to_its_own_routes_alone(at: House, access_control: str) -> None:
    app = application(at, access_controls()[access_control])
    for (method, path), kind in ROUTES.items():
        expected = ALL if kind == PROBE else RIGHTS[access_control][kind]
        found = [await answer(app, method, example(path), key) for key in CALLERS.values()]
        assert found == list(expected), (access_control, method, path)


@pytest.mark.parametrize("access_control", APART)
async def test_a_port_of_their_own_is_for_its_network_or_for_admin_keys(
    at: House, access_control: str
) -> None:
    routers = [probe_router(at.registry, lambda: None), *operator_routers(at.rooms, at.metrics, at.peers)]
    admin_keys = keys(ADMIN) if access_control == "an admin key" else None
    app = create_pages(
        application(at, AccessControl(keys(KEY, OTHER))),
        routers,
        AccessControl(admin_keys=admin_keys, open_metrics=True),
    )
    for method, path in routes_of(app.app):
        kind = ROUTES[method, path]
        expected = ALL if kind == PROBE else APART[access_control][kind]
        found = [await answer(app, method, example(path), key) for key in CALLERS.values()]
        assert found == list(expected), (access_control, method, path)


async def test_what_is_asked_for_is_judged_after_who_asks(at: House) -> None:
    """A refusal says nothing of what is there, not even of what is wrong with a question."""
    app = application(at, access_controls()["several keys"])
    for path in ("/requests?limit=x", "/requests/nothing", "/rooms/1", "/rooms?limit=-1", "/ready/x"):
        found = await answer(app, "GET", path, KEY)
        assert found == (IN if path == "/ready/x" else NOT_YOURS), path
    assert await answer(app, "PUT", "/workers/worker-0?prefill_weight=1000", KEY) == NOT_YOURS


async def test_a_refusal_names_what_opens_it_and_a_browser_asks_for_another_key(at: House) -> None:
    app = application(at, access_controls()["several keys and an admin's"])
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        refused = await http.get("/requests", headers={"x-api-key": KEY})
        assert refused.json()["error"]["code"] == "insufficient_permissions"
        assert "--admin-api-key-file" in refused.json()["error"]["message"]
        page = await http.get("/ui", headers={"Accept": "text/html"})
        assert page.headers["www-authenticate"].startswith("Basic realm=")
        for headers in ({"x-api-key": ADMIN}, {"x-api-key": ADMIN, "Authorization": f"Bearer {KEY}"}):
            assert (await http.get("/live", headers=headers)).status_code == 200
        assert (await http.get("/live", auth=("anyone", ADMIN))).status_code == 200


@pytest.mark.parametrize("access_control", ["one key", "several keys", "several keys and an admin's"])
async def test_ready_names_workers_to_operators_alone(at: House, access_control: str) -> None:
    transport = httpx.ASGITransport(application(at, access_controls()[access_control]))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        told = {}
        for name, key in CALLERS.items():
            headers = {} if key is None else {"x-api-key": key}
            told[name] = "workers" in (await http.get("/ready", headers=headers)).json()
    operators = {"one key": "a key", "several keys": "", "several keys and an admin's": "admin"}[
        access_control
    ]
    assert {name for name, whole in told.items() if whole} == {operators} - {""}
