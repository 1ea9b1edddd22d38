"""Tests of stored responses, which later requests of the same owner may name."""

import json
from collections.abc import Callable
from typing import Any, Final

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.api.http.authentication import AccessControl
from baton.api.responses.response_store import ResponseStore
from baton.api.responses.signed_reasoning import NotOurs, ReasoningSigner
from baton.api.settings import ApiSettings
from baton.web.api_keys import ApiKeys
from tests.api import tiny
from tests.api.requests.test_bad_input import check
from tests.api.responses.test_responses import CALL, WEATHER, told
from tests.api.scripted import LENGTH, ScriptedBackend, saying

RESPONSES: Final = "/v1/responses"
KEYS: Final = ("a-key-of-sixteen-letters", "another-key-of-some-letters")

Client = Callable[..., httpx.AsyncClient]


@pytest.fixture
def client(backend: ScriptedBackend) -> Client:
    """Return a client of an application with these settings."""

    def made(access_control: AccessControl | None = None, **settings: Any) -> httpx.AsyncClient:
        registry, bounds = CollectorRegistry(), ApiSettings(**settings)
        app = create_app(backend, tiny.model(), registry, bounds, access_control=access_control)
        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")

    return made


async def ask(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    reply = await http.post(RESPONSES, json={"input": "hi", **fields})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def prompt(backend: ScriptedBackend) -> str:
    return tiny.model().tokenizer.decode(backend.asked[-1].prompt, skip_special_tokens=False)


async def test_an_answer_goes_on_from_one_before_without_its_instructions(
    client: Client, backend: ScriptedBackend
) -> None:
    async with client() as http:
        first = await ask(http, instructions="Be brief.")
        second = await ask(http, input="More", previous_response_id=first["id"], instructions="Be long.")
        assert second["previous_response_id"] == first["id"]
        turns = ("user", "hi"), ("assistant", "Hello world"), ("user", "More")
        assert prompt(backend) == told(("system", "Be long."), *turns)
        await ask(http, input=[], previous_response_id=second["id"])
        assert prompt(backend) == told(*turns, ("assistant", "Hello world"))


async def test_a_call_of_a_kept_answer_is_answered_alone(client: Client, backend: ScriptedBackend) -> None:
    backend.script = lambda _: saying(CALL)
    async with client() as http:
        first = await ask(http, tools=[WEATHER])
        result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "warm"}
        await ask(http, input=[result], previous_response_id=first["id"])
        answered = ("user", "<tool_response>\nwarm\n</tool_response>")
        assert prompt(backend) == told(("user", "hi"), ("assistant", CALL), answered)
        result["call_id"] = "other"
        reply = await http.post(RESPONSES, json={"input": [result], "previous_response_id": first["id"]})
        check(reply, 400, "input[0].call_id", "invalid_value")


async def test_a_call_that_was_cut_off_is_part_of_what_follows(
    client: Client, backend: ScriptedBackend
) -> None:
    begun = CALL.partition("Paris")[0]
    backend.script = lambda _: saying(begun, finish=LENGTH)
    async with client() as http:
        forced = {"input": "hi", "tools": [WEATHER], "tool_choice": "required", "stream": True}
        reply = await http.post(RESPONSES, json=forced)
        first = json.loads(reply.text.strip().rpartition("data: ")[2])["response"]
        (call,) = first["output"]
        assert (call["type"], call["status"]) == ("function_call", "incomplete")
        assert call["arguments"] == '{"city": "'
        await ask(http, input="More", previous_response_id=first["id"])
        begun = '<tool_call>\n{"name": "weather", "arguments": {"city": "}\n</tool_call>'
        assert prompt(backend) == told(("user", "hi"), ("assistant", begun), ("user", "More"))
        await ask(http, input=[said("hi"), {"id": call["id"]}, said("More")])
        assert prompt(backend) == told(("user", "hi"), ("assistant", begun), ("user", "More"))


async def test_an_item_is_named_by_its_id(client: Client, backend: ScriptedBackend) -> None:
    async with client() as http:
        first = await ask(http)
        item = first["output"][0]["id"]
        for reference in ({"id": item}, {"type": "item_reference", "id": item}):
            await ask(
                http, input=[{"role": "user", "content": "hi"}, reference, {"role": "user", "content": "so"}]
            )
            assert prompt(backend) == told(("user", "hi"), ("assistant", "Hello world"), ("user", "so"))
        for unknown in (item + "1", "msg_1", "rs_" + "0" * 32 + "_0"):
            reply = await http.post(RESPONSES, json={"input": [{"type": "item_reference", "id": unknown}]})
            check(reply, 400, "input[0].id", "item_not_found")


async def test_a_streamed_answer_is_kept_too(client: Client, backend: ScriptedBackend) -> None:
    async with client() as http:
        reply = await http.post(RESPONSES, json={"input": "hi", "stream": True})
        id_ = reply.text.partition('"id":"')[2].partition('"')[0]
        assert (await http.get(f"{RESPONSES}/{id_}")).json()["output"][0]["content"][0][
            "text"
        ] == "Hello world"


async def test_a_kept_answer_is_read_and_forgotten(client: Client) -> None:
    async with client() as http:
        first = await ask(
            http, input=[{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
        )
        here = f"{RESPONSES}/{first['id']}"
        assert (await http.get(here)).json() == first
        listed = (await http.get(f"{here}/input_items", params={"limit": 1})).json()
        assert [each["content"] for each in listed["data"]] == [[{"type": "input_text", "text": "two"}]]
        assert listed["has_more"]
        rest = (await http.get(f"{here}/input_items", params={"after": listed["last_id"]})).json()
        assert [each["content"][0]["text"] for each in rest["data"]] == ["one"]
        assert not rest["has_more"]
        check(await http.get(f"{here}/input_items", params={"after": "x"}), 400, "after")
        check(await http.get(here, params={"starting_after": 1}), 400, "starting_after")
        assert (await http.delete(here)).json() == {"id": first["id"], "object": "response", "deleted": True}
        for gone in (await http.get(here), await http.delete(here), await http.get(f"{here}/input_items")):
            check(gone, 404, "id", "response_not_found")
        reply = await http.post(RESPONSES, json={"input": "hi", "previous_response_id": first["id"]})
        check(reply, 400, "previous_response_id", "previous_response_not_found")


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({}, {"store": False}),
        ({"responses_kept": 0}, {}),
        ({"responses_kept": 0}, {"store": True}),
        ({"responses_kept_bytes": 1000}, {}),
    ],
)
async def test_what_is_not_kept_says_so_and_is_not_there(
    client: Client, settings: dict[str, Any], fields: dict[str, Any]
) -> None:
    async with client(**settings) as http:
        answer = await ask(http, **fields)
        assert answer["store"] is False
        check(await http.get(f"{RESPONSES}/{answer['id']}"), 404, "id")
        reply = await http.post(RESPONSES, json={"input": "hi", "previous_response_id": answer["id"]})
        message = check(reply, 400, "previous_response_id", "previous_response_not_found")
        assert ("--responses-kept is 0" in message) == ("responses_kept" in settings)


async def test_an_answer_is_its_keys_alone(client: Client) -> None:
    mine, other = ({"Authorization": f"Bearer {key}"} for key in KEYS)
    async with client(AccessControl(ApiKeys(KEYS, None))) as http:
        reply = await http.post(RESPONSES, json={"input": "hi"}, headers=mine)
        answer = reply.json()
        here = f"{RESPONSES}/{answer['id']}"
        assert (await http.get(here, headers=other)).status_code == 404
        assert (await http.delete(here, headers=other)).status_code == 404
        for fields in (
            {"input": "hi", "previous_response_id": answer["id"]},
            {"input": [{"type": "item_reference", "id": answer["output"][0]["id"]}]},
        ):
            assert (await http.post(RESPONSES, json=fields, headers=other)).status_code == 400
            assert (await http.post(RESPONSES, json=fields, headers=mine)).status_code == 200
        assert (await http.get(here, headers=mine)).status_code == 200


async def test_two_keys_with_one_request_id_have_answers_of_their_own(client: Client) -> None:
    """A caller that knows another's X-Request-Id can neither overwrite nor name the other's stored
    response."""
    mine, other = ({"Authorization": f"Bearer {key}", "X-Request-Id": "same"} for key in KEYS)
    async with client(AccessControl(ApiKeys(KEYS, None))) as http:
        answers = [
            (await http.post(RESPONSES, json={"input": text}, headers=headers)).json()
            for text, headers in (("mine", mine), ("theirs", other))
        ]
        assert answers[0]["id"] != answers[1]["id"]
        assert not any("same" in each["id"] for each in answers)
        found = await http.get(f"{RESPONSES}/{answers[0]['id']}", headers=mine)
        assert found.json()["output"] == answers[0]["output"]
        for guess in ("resp_same", "same", answers[0]["id"]):
            assert (await http.get(f"{RESPONSES}/{guess}", headers=other)).status_code == 404


def answer(number: int, text: str = "") -> dict[str, Any]:
    return {"id": f"resp_{number}", "output": [], "text": text}


def test_the_one_used_longest_ago_goes_first() -> None:
    kept = ResponseStore(2, 10**6)
    for number in range(2):
        kept.keep(answer(number), [], b"")
    assert kept.find("resp_0", b"") is not None
    kept.keep(answer(2), [], b"")
    assert [kept.find(f"resp_{number}", b"") is not None for number in range(3)] == [True, False, True]


@pytest.mark.parametrize(("most", "size"), [(10, 10**6), (1000, 10_000)])
def test_who_keeps_much_loses_its_own_and_none_of_another_key(most: int, size: int) -> None:
    kept = ResponseStore(most, size)
    for number in range(3):
        kept.keep(answer(number, "mine"), [], b"mine")
    for number in range(200):
        assert kept.keep(answer(number, "x" * 100), [], b"much")
    assert len(kept) <= most
    assert kept.size <= size
    assert [kept.find(f"resp_{number}", b"mine") is not None for number in range(3)] == [True] * 3
    assert kept.find("resp_199", b"much") is not None
    assert kept.find("resp_2", b"much") is None, "the same id is another key's answer"


def test_an_answer_that_is_kept_again_takes_its_space_once() -> None:
    kept = ResponseStore(10, 10**6)
    for _ in range(3):
        kept.keep(answer(1), [], b"")
    size = kept.size
    kept.forget("resp_1", b"")
    assert size > 0
    assert (len(kept), kept.size) == (0, 0)


def test_what_is_kept_has_no_more_than_its_bytes() -> None:
    kept = ResponseStore(100, 10_000)
    for number in range(100):
        kept.keep(answer(number, "x" * 1000), [], b"")
        assert kept.size <= 10_000
    assert 1 < len(kept) < 10
    assert not kept.keep(answer(100, "x" * 10_000), [], b"")
    assert kept.find("resp_100", b"") is None
    for number in range(100):
        kept.forget(f"resp_{number}", b"")
    assert (len(kept), kept.size) == (0, 0)


def test_reasoning_is_taken_by_the_key_that_signed_it() -> None:
    one, same, other = ReasoningSigner(b"k" * 32), ReasoningSigner(b"k" * 32), ReasoningSigner(b"o" * 32)
    for reasoning in ("", "Hm, 東京 \ud800", "x" * 5000):
        assert same.unwrap(one.wrap(reasoning)) == reasoning
        with pytest.raises(NotOurs):
            other.unwrap(one.wrap(reasoning))
