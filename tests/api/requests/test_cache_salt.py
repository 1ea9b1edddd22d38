"""Tests of salts: only prompts with the same salt and of the same key share cached KV."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.api.http.authentication import AccessControl
from baton.api.requests.cache_salt import salt_of
from baton.api.requests.field_types import CACHE_SALT_CHARS_MAX
from baton.api.settings import ApiSettings
from baton.ids import SALT_BYTES
from baton.runtime.file_changes import FileChanges
from baton.web.api_keys import ApiKeys
from tests.api import tiny
from tests.api.requests.test_bad_input import CHAT, COMPLETIONS, chat, check, completion
from tests.api.scripted import ScriptedBackend

ADMIN = "sk-admin-0123456789abcdef"
KEYS = ("sk-one-0123456789abcdef", "sk-two-0123456789abcdef")


def shared() -> AccessControl:
    return AccessControl(ApiKeys(KEYS, None), share_prefixes=True)


async def salts(
    asked: Sequence[tuple[str, str, dict[str, Any]]], access_control: AccessControl | None = None
) -> list[int]:
    """Return the salts of requests, each by its key, its path and its other fields."""
    backend = ScriptedBackend()
    app = create_app(
        backend,
        tiny.model(),
        CollectorRegistry(),
        ApiSettings(),
        access_control=access_control or AccessControl(ApiKeys(KEYS, None)),
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
    found = await salts([*given, (one, CHAT, {"cache_salt": "b"}), (two, CHAT, {})], shared())
    assert len({*found[:4]}) == 1
    assert len({*found[3:]}) == 3
    assert found[-1] == 0


async def test_same_root_only_several_keys_share_no_salt_whatever_they_ask_for() -> None:
    fields: list[dict[str, Any]] = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}]
    asked = [(key, path, each) for path in (COMPLETIONS, CHAT) for key in KEYS for each in fields]
    found = await salts(asked)
    assert found[:6] == found[6:]
    assert len({*found}) == 6
    assert 0 not in found


async def test_each_prompt_of_a_request_has_its_salt() -> None:
    found = await salts([(KEYS[0], COMPLETIONS, {"prompt": ["a", "b"], "cache_salt": "a"})], shared())
    assert found == [salt_of("a")] * 2


async def test_a_key_is_not_to_be_guessed_from_its_salt() -> None:
    """A caller who sees salts cannot try keys against them, since each process makes other salts of the same
    keys."""
    asked: list[tuple[str, str, dict[str, Any]]] = [(KEYS[0], CHAT, {})]
    assert await salts(asked) != await salts(asked)


async def test_a_single_key_has_the_salts_of_callers_without_a_key() -> None:
    fields: list[dict[str, Any]] = [{}, {"cache_salt": "a"}]
    found = await salts([(KEYS[0], CHAT, each) for each in fields], AccessControl(ApiKeys(KEYS[:1], None)))
    assert found == [0, salt_of("a")]
    assert found == await salts([("", CHAT, each) for each in fields], AccessControl())
    twice = AccessControl(ApiKeys([KEYS[0], KEYS[0]], None))
    assert found == await salts([(KEYS[0], CHAT, each) for each in fields], twice), "one key, named twice"


async def test_an_admin_key_shares_no_prefix_with_an_api_key_or_a_caller_without() -> None:
    for keys in (None, ApiKeys(KEYS[:1], None)):
        access_control = AccessControl(keys, admin_keys=ApiKeys([ADMIN], None))
        found = await salts(
            [(KEYS[0], CHAT, {}), (ADMIN, CHAT, {}), (ADMIN, CHAT, {"cache_salt": "a"})], access_control
        )
        assert found[0] == 0
        assert len({*found, salt_of("a")}) == 4


async def test_a_key_that_replaced_another_finds_nothing_of_it(tmp_path: Path) -> None:
    """A key file has one key at a time. The second key does not reuse what the first one computed."""
    file = tmp_path / "keys"
    file.write_text(KEYS[0])
    now_s = 0.0
    access_control = AccessControl(ApiKeys([], file, lambda paths: FileChanges(paths, lambda: now_s)))
    assert await salts([(KEYS[0], CHAT, {})], access_control) == [0]
    (tmp_path / "new").write_text(KEYS[1])
    (tmp_path / "new").replace(file)
    now_s = 10.0
    assert 0 not in await salts([(KEYS[1], CHAT, {})], access_control)


async def test_no_header_or_field_reaches_the_salt_of_another_key() -> None:
    """Every way to name a tenant stays within the key."""
    one, two = KEYS
    access_control = AccessControl(ApiKeys(KEYS, None))
    [mine] = await salts([(one, CHAT, {})], access_control)
    words = [one, mine.to_bytes(SALT_BYTES, "big").hex(), str(mine), f"{mine:x}", "0", "cache_salt"]
    found = await salts([(two, CHAT, {"cache_salt": each, "user": one}) for each in words], access_control)
    assert mine not in found
    assert len({*found}) == len({*words})


@pytest.mark.parametrize("wrong", ["", "x" * (CACHE_SALT_CHARS_MAX + 1), 5, ["a"]])
async def test_what_is_no_salt_is_refused_by_name(http: httpx.AsyncClient, wrong: Any) -> None:
    for path, body in ((CHAT, chat(cache_salt=wrong)), (COMPLETIONS, completion(cache_salt=wrong))):
        check(await http.post(path, json=body), 400, "cache_salt")


async def test_the_longest_salt_is_taken(http: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    assert (await http.post(CHAT, json=chat(cache_salt="é" * CACHE_SALT_CHARS_MAX))).status_code == 200
    assert 0 < backend.asked[-1].salt < 2 ** (8 * SALT_BYTES)
