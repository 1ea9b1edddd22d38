"""Do prompts share what is computed of them with those of their own salt, and of their own key, alone?"""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from services.openai.api_settings import ApiSettings
from services.openai.app import create_app
from services.openai.door import Door
from services.openai.salts import salt_of
from services.openai.schemas import CACHE_SALT_CHARS_MAX
from services.rooms.request import SALT_BYTES
from services.runtime.api_keys import ApiKeys
from tests.openai import tiny
from tests.openai.scripted import ScriptedBackend
from tests.openai.test_bad_input import CHAT, COMPLETIONS, chat, check, completion

KEYS = ("sk-one-0123456789abcdef", "sk-two-0123456789abcdef")


async def salts(
    asked: Sequence[tuple[str, str, dict[str, Any]]], *, isolate: bool, keys: ApiKeys | None = None
) -> list[int]:
    """Of requests, each by its key, its path and what else it says."""
    backend = ScriptedBackend()
    app = create_app(
        backend,
        tiny.model(),
        CollectorRegistry(),
        ApiSettings(isolate_keys=isolate),
        door=Door(keys or ApiKeys(KEYS, None)),
    )
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
        )
        for key, path, fields in asked:
            body = completion(**fields) if path == COMPLETIONS else chat(**fields)
            reply = await http.post(path, json=body, headers={"Authorization": f"Bearer {key}"})
            assert reply.status_code == 200, reply.text
    return [request.salt for request in backend.asked]


async def test_a_salt_is_the_same_for_all_who_give_it_and_none_where_none_is_given() -> None:
    one, two = KEYS
    given = [(key, path, {"cache_salt": "a"}) for key in KEYS for path in (COMPLETIONS, CHAT)]
    found = await salts([*given, (one, CHAT, {"cache_salt": "b"}), (two, CHAT, {})], isolate=False)
    assert len({*found[:4]}) == 1
    assert len({*found[3:]}) == 3
    assert found[-1] == 0


async def test_same_root_only_isolated_keys_share_no_salt_whatever_they_ask_for() -> None:
    fields: list[dict[str, Any]] = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}]
    asked = [(key, path, each) for path in (COMPLETIONS, CHAT) for key in KEYS for each in fields]
    found = await salts(asked, isolate=True)
    assert found[:6] == found[6:]
    assert len({*found}) == 6
    assert 0 not in found


async def test_each_prompt_of_a_request_has_its_salt() -> None:
    found = await salts([(KEYS[0], COMPLETIONS, {"prompt": ["a", "b"], "cache_salt": "a"})], isolate=False)
    assert found == [salt_of("a")] * 2


async def test_a_key_is_not_to_be_guessed_from_its_salt() -> None:
    """Whoever sees salts cannot try keys against them: another process makes others of the same keys."""
    asked: list[tuple[str, str, dict[str, Any]]] = [(KEYS[0], CHAT, {})]
    assert await salts(asked, isolate=True) != await salts(asked, isolate=True)


@pytest.mark.parametrize("wrong", ["", "x" * (CACHE_SALT_CHARS_MAX + 1), 5, ["a"]])
async def test_what_is_no_salt_is_refused_by_name(http: httpx.AsyncClient, wrong: Any) -> None:
    for path, body in ((CHAT, chat(cache_salt=wrong)), (COMPLETIONS, completion(cache_salt=wrong))):
        check(await http.post(path, json=body), 400, "cache_salt")


async def test_the_longest_salt_is_taken(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    assert (await http.post(CHAT, json=chat(cache_salt="é" * CACHE_SALT_CHARS_MAX))).status_code == 200
    assert 0 < backend.asked[-1].salt < 2 ** (8 * SALT_BYTES)
