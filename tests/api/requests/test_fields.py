"""Tests that fields of other servers' clients are honoured, or refused by name."""

from typing import Any, Final

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.api.served_model import ServedModel
from baton.api.settings import ApiSettings
from tests.api import tiny
from tests.api.requests.test_bad_input import CHAT, COMPLETIONS, chat, check, completion
from tests.api.scripted import STOP, ScriptedBackend, batch, saying


async def answer(http: httpx.AsyncClient, path: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    body = completion(**fields) if path == COMPLETIONS else chat(**fields)
    reply = await http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    told: dict[str, Any] = reply.json()
    return told


async def test_whole_numbers_may_be_written_with_a_point(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    fields: dict[str, Any] = {
        "max_tokens": 4.0,
        "top_k": 3.0,
        "seed": 7.0,
        "min_tokens": 1.0,
        "stop_token_ids": [9.0],
        "n": 1.0,
    }
    await answer(http, logprobs=1.0, **fields)
    (asked,) = backend.asked
    assert (asked.max_tokens, asked.min_tokens, asked.stop_token_ids) == (4, 1, (9,))
    assert (asked.sampling.top_k, asked.sampling.seed, asked.sampling.top_logprobs) == (3, 7, 1)
    check(await http.post(COMPLETIONS, json=completion(max_tokens=4.5)), 400, "max_tokens", "invalid_type")


HARMLESS: Final[dict[str, Any]] = {
    "use_beam_search": False,
    "length_penalty": 1.0,
    "extra_body": {},
    "early_stopping": False,
    "spaces_between_special_tokens": True,
    "best_of": 1,
    "priority": 0,
    "do_sample": True,
}


async def test_defaults_of_other_servers_are_taken_and_other_values_refused_by_name(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    for path in (CHAT, COMPLETIONS):
        await answer(http, path, **HARMLESS)
    backend.asked.clear()
    for name, value in {"use_beam_search": True, "length_penalty": 2.0, "extra_body": {"a": 1}}.items():
        check(await http.post(CHAT, json=chat(**{name: value})), 400, name, "unsupported_value")
    check(await http.post(CHAT, json=chat(priority=1.5)), 400, "priority", "invalid_type")
    assert backend.asked == []


async def test_a_model_has_several_names_and_none_has_to_be_given(backend: ScriptedBackend) -> None:
    model = tiny.model()
    served = ServedModel("a", model.tokenizer, (tiny.END_ID,), model.vocabulary, aliases=("b/c",))
    app = create_app(backend, served, CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        for given, told in ((None, "a"), ("a", "a"), ("b/c", "b/c")):
            assert (await answer(http, model=given))["model"] == told
            assert (await answer(http, CHAT, model=given))["model"] == told
        check(await http.post(CHAT, json=chat(model="b")), 404, "model", "model_not_found")
        assert [each["id"] for each in (await http.get("/v1/models")).json()["data"]] == ["a", "b/c"]
        assert (await http.get("/v1/models/b/c")).json()["id"] == "b/c"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_what_ended_an_answer_is_told(
    http: httpx.AsyncClient, backend: ScriptedBackend, path: str
) -> None:
    backend.script = lambda _: saying("one END two")
    (choice,) = (await answer(http, path, stop=["END", "two"]))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "END")
    (choice,) = (await answer(http, path, stop=["three"]))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    backend.script = lambda _: [batch([50, 60], STOP)]
    (choice,) = (await answer(http, path, stop_token_ids=[60]))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 60)
    reply = await http.post(
        path, json=(chat if path == CHAT else completion)(stop_token_ids=[60], stream=True)
    )
    assert '"stop_reason":60' in reply.text


async def test_log_probabilities_name_tokens_by_their_ids_on_demand(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    backend.script = lambda _: [batch([50, 60], STOP, top=1)]
    fields: dict[str, Any] = {"return_tokens_as_token_ids": True}
    told = (await answer(http, logprobs=1, **fields))["choices"][0]["logprobs"]
    assert told["tokens"] == ["token_id:50", "token_id:60"]
    assert set(told["top_logprobs"][0]) == {"token_id:10", "token_id:50"}
    told = (await answer(http, CHAT, logprobs=True, top_logprobs=1, **fields))["choices"][0]["logprobs"]
    assert [each["token"] for each in told["content"]] == ["token_id:50", "token_id:60"]
    assert told["content"][0]["top_logprobs"][0]["token"] == "token_id:10"


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 3}, [7, 8, 9]),
        ({"truncate_prompt_tokens": 3.0, "truncation_side": "right"}, [0, 1, 2]),
        ({"truncate_prompt_tokens": 10}, [*range(10)]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 5}, [*range(10)]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 507}, [*range(5, 10)]),
    ],
)
async def test_a_prompt_is_cut_on_demand(
    http: httpx.AsyncClient, backend: ScriptedBackend, fields: dict[str, Any], kept: list[int]
) -> None:
    backend.known_limits = type(backend.known_limits)(512, 512, 1024)
    await answer(http, prompt=[[*range(10)], [1]], **fields)
    assert sorted(request.prompt for request in backend.asked) == sorted([tuple(kept), (1,)])


async def test_a_text_that_is_longer_than_the_context_is_cut_too(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    for path, long in (
        (COMPLETIONS, {"prompt": "a b " * 300}),
        (CHAT, {"messages": [{"role": "user", "content": "a b " * 300}]}),
    ):
        await answer(http, path, truncate_prompt_tokens=20, **long)
        assert len(backend.asked[-1].prompt) == 20
    check(
        await http.post(COMPLETIONS, json=completion(truncate_prompt_tokens=513)),
        400,
        "truncate_prompt_tokens",
    )
    check(
        await http.post(COMPLETIONS, json=completion(truncate_prompt_tokens=0)), 400, "truncate_prompt_tokens"
    )
    check(await http.post(COMPLETIONS, json=completion(truncation_side="top")), 400, "truncation_side")


async def test_more_tokens_than_fit_are_as_many_as_fit_where_that_is_set(backend: ScriptedBackend) -> None:
    app = create_app(backend, tiny.model(), CollectorRegistry(), ApiSettings(clip_max_tokens=True))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        await answer(http, prompt=[1] * 100, max_tokens=10**6)
        await answer(http, prompt=[1] * 100, max_tokens=5)
        await answer(http, CHAT, max_completion_tokens=10**30)
        check(await http.post(COMPLETIONS, json=completion(prompt=[1] * 512)), 400, "prompt")
    assert [request.max_tokens for request in backend.asked[:2]] == [351, 5]


@pytest.mark.parametrize("name", ["request_id", "rid"])
async def test_a_body_names_its_request_where_no_header_does(
    http: httpx.AsyncClient, backend: ScriptedBackend, name: str
) -> None:
    reply = await http.post(CHAT, json=chat(**{name: "mine-7"}))
    assert (reply.headers["x-request-id"], reply.json()["id"]) == ("mine-7", "chatcmpl-mine-7")
    assert backend.asked[-1].request_id == "mine-7"
    reply = await http.post(CHAT, json=chat(**{name: "mine-7"}), headers={"X-Request-Id": "theirs"})
    assert reply.headers["x-request-id"] == "theirs"
    for wrong in ("a b", "", "x" * 129, 5):
        check(await http.post(CHAT, json=chat(**{name: wrong})), 400, name)
    check(await http.post(CHAT, json=chat(rid="a", request_id="b")), 400, "rid")


async def test_special_tokens_are_added_to_a_prompt_unless_that_is_not_wanted(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    await answer(http, prompt="The fox", add_special_tokens=False)
    assert list(backend.asked[-1].prompt) == tiny.ids("The fox")


async def test_evaluation_tools_are_told_of_the_tokenizer(http: httpx.AsyncClient) -> None:
    told = (await http.get("/tokenizer_info")).json()
    assert (told["eos_token"], told["pad_token"]) == ("<|end|>", "<pad>")
    assert told["chat_template"] == tiny.CHAT_TEMPLATE
    assert told["tokenizer_class"]
    assert not any("/" in str(value) for name, value in told.items() if name.endswith(("path", "file")))
