"""Tests that long bodies cost bounded memory and time, shared among callers."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

import httpx
import pytest
from prometheus_client import CollectorRegistry

from baton.api.app import create_app
from baton.api.backend import Limits, Overloaded
from baton.api.errors import ApiError
from baton.api.http import request_bodies
from baton.api.http.authentication import AccessControl
from baton.api.http.request_bodies import parse
from baton.api.requests import json_reader
from baton.api.requests.schemas import CompletionRequest
from baton.api.settings import ApiSettings
from baton.api.text import tokenizer_pool
from baton.api.text.tokenizer_pool import LONG_BYTES, FairThreadPool
from baton.web.api_keys import ApiKeys
from tests.api import tiny
from tests.api.scripted import ScriptedBackend
from tests.patience import PATIENCE_S

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that were tokenised, in order."""
    texts: list[str] = []
    encode = tiny.model().tokenizer.encode

    def watched(_: object, text: str, **how: Any) -> list[int]:
        texts.append(text)
        return encode(text, **how)

    monkeypatch.setattr("baton.api.text.tokenizer.Tokenizer.encode", watched)
    return texts


async def test_what_cannot_fit_is_refused_before_it_is_tokenised(
    http: httpx.AsyncClient, backend: ScriptedBackend, encoded: list[str]
) -> None:
    long = "x" * 1_000_000
    for path, given_, param in (
        (CHAT, {"messages": [{"role": "user", "content": long}]}, "messages"),
        (COMPLETIONS, {"prompt": long}, "prompt"),
        (COMPLETIONS, {"prompt": ["x", long]}, "prompt[1]"),
        ("/tokenize", {"prompt": long}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": long}]}, "messages"),
    ):
        encoded.clear()
        reply = await http.post(path, json={"model": tiny.MODEL, **given_})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["code"]) == (400, param, "context_length_exceeded")
        assert "has at least" in error["message"]
        assert long not in encoded
    assert backend.asked == []


async def test_what_has_too_many_tokens_is_told_so_without_a_list_of_them(
    http: httpx.AsyncClient, backend: ScriptedBackend
) -> None:
    backend.known_limits = Limits(3000, 0, 0)
    for path, tokens in ((COMPLETIONS, 5000), ("/tokenize", 12_001)):
        reply = await http.post(path, json={"model": tiny.MODEL, "prompt": "z" * tokens})
        assert f"'prompt' has {tokens} tokens" in reply.json()["error"]["message"]
    reply = await http.post("/tokenize", json={"prompt": "z" * 12_000})
    assert reply.json()["count"] == 12_000, "what does not fit is counted, too, up to a bound"
    assert backend.asked == []


class Gate:
    """Work that goes on when it may, and knows what ran at once."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.begun: list[str] = []
        self.most = self.running = 0
        self._lock = threading.Lock()

    def work(self, name: str) -> Callable[[], str]:
        def run() -> str:
            with self._lock:
                self.begun.append(name)
                self.running += 1
                self.most = max(self.most, self.running)
            self.may_end.wait(PATIENCE_S)
            with self._lock:
                self.running -= 1
            return name

        return run


async def settled(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_one_of_the_longest_is_worked_on_at_a_time_and_shorter_ones_go_on_beside_it() -> None:
    line, gate, free = FairThreadPool(), Gate(), Gate()
    free.may_end.set()
    long = [asyncio.create_task(line.run(b"a", LONG_BYTES + 1, gate.work(f"long {at}"))) for at in range(4)]
    await settled(lambda: len(gate.begun) == 1)
    async with asyncio.timeout(PATIENCE_S):
        assert [await line.run(b"b", LONG_BYTES, free.work(str(at))) for at in range(20)] == [
            *map(str, range(20))
        ]
    assert gate.begun == ["long 0"]
    gate.may_end.set()
    assert await asyncio.gather(*long) == [f"long {at}" for at in range(4)]
    assert gate.most == 1
    assert line.waiting_bytes == 0


async def test_who_sends_much_has_no_more_turns_than_who_sends_little() -> None:
    line, gate = FairThreadPool(), Gate()
    much = [asyncio.create_task(line.run(b"much", LONG_BYTES + 1, gate.work("much"))) for _ in range(9)]
    await settled(lambda: len(gate.begun) == 1)
    little = asyncio.create_task(line.run(b"little", LONG_BYTES + 1, gate.work("little")))
    await asyncio.sleep(0)
    gate.may_end.set()
    await asyncio.gather(*much, little)
    assert gate.begun.index("little") <= 2


async def test_what_waits_is_bounded_for_each_caller_and_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_pool, "WAITING_BYTES_MAX", 8 * LONG_BYTES)
    monkeypatch.setattr(tokenizer_pool, "CALLER_WAITING_BYTES_MAX", 4 * LONG_BYTES)
    line, gate = FairThreadPool(), Gate()
    tasks = [
        (caller, asyncio.create_task(line.run(caller, LONG_BYTES + 1, gate.work("x"))))
        for caller in (b"a", b"b", b"c")
        for _ in range(5)
    ]
    await settled(lambda: len(gate.begun) == 1)
    refused = [caller for caller, task in tasks if task.done()]
    # Three of each fit; a's first is worked on, and of c's there is no room for what two others left.
    assert refused == [b"a", b"b", b"b", b"c", b"c", b"c", b"c"]
    assert line.waiting_bytes == 7 * (LONG_BYTES + 1)
    for _, task in tasks:
        if task.done():
            with pytest.raises(Overloaded):
                task.result()
    gate.may_end.set()
    await asyncio.gather(*(task for _, task in tasks if not task.done()))
    assert line.waiting_bytes == 0


async def test_who_waits_too_long_or_goes_away_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    line, gate = FairThreadPool(), Gate()
    first = asyncio.create_task(line.run(b"a", LONG_BYTES + 1, gate.work("first")))
    await settled(lambda: len(gate.begun) == 1)
    gone = asyncio.create_task(line.run(b"b", LONG_BYTES + 1, gate.work("gone")))
    await asyncio.sleep(0)
    gone.cancel()
    monkeypatch.setattr(tokenizer_pool, "WAIT_S", 0.01)
    with pytest.raises(Overloaded, match="was not tokenised within"):
        await line.run(b"c", LONG_BYTES + 1, gate.work("late"))
    assert line.waiting_bytes == 0
    gate.may_end.set()
    assert await first == "first"
    assert await line.run(b"d", LONG_BYTES + 1, gate.work("next")) == "next"
    assert gate.begun == ["first", "next"]


async def test_who_goes_away_while_it_is_worked_on_holds_its_turn_until_the_thread_is_done() -> None:
    line, gate = FairThreadPool(), Gate()
    gone = asyncio.create_task(line.run(b"a", LONG_BYTES + 1, gate.work("gone")))
    await settled(lambda: len(gate.begun) == 1)
    gone.cancel()
    following = asyncio.create_task(line.run(b"a", LONG_BYTES + 1, gate.work("next")))
    await asyncio.sleep(0.01)
    assert gate.begun == ["gone"]
    gate.may_end.set()
    assert await following == "next"
    assert gate.most == 1


MUCH: Final[dict[str, tuple[bytes, bool]]] = {
    "keys": (json.dumps({"metadata": dict.fromkeys(map(str, range(150_000)), 1)}).encode(), True),
    "lists": (b'{"metadata":[' + b"[]," * 150_000 + b"[]]}", True),
    "objects": (b'{"metadata":[' + b'{"a":1},' * 60_000 + b"{}]}", True),
    "texts": (json.dumps({"metadata": ["\\"] * 150_000}).encode(), True),
    "texts that end in backslashes": (
        json.dumps({"metadata": {f"{at}\\\\": '"' for at in range(60_000)}}).encode(),
        True,
    ),
    "numbers": (json.dumps({"prompt": [1] * (request_bodies.COMMAS_MAX + 2)}).encode(), True),
    "a text like it": (json.dumps({"prompt": json.dumps([{"a": [], "b": "\\"}] * 90_000)}).encode(), False),
    "a text of lines": (json.dumps({"prompt": 'a, "b": [{\n' * 200_000}).encode(), False),
    "token ids": (json.dumps({"prompt": [123456] * 200_000}).encode(), False),
    "messages": (
        json.dumps({"prompt": [{"role": "user", "content": "hi, you", "name": "x"}] * 8192}).encode(),
        False,
    ),
}


@pytest.mark.parametrize("what", MUCH)
def test_a_body_of_very_many_values_is_refused_before_anything_is_made_of_it(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, much = MUCH[what]
    made: list[int] = []

    def from_json(text: str, **_: Any) -> dict[str, Any]:
        made.append(len(text))
        return {}

    monkeypatch.setattr(json_reader, "from_json", from_json)
    with pytest.raises(ApiError) as told:
        parse(raw, CompletionRequest)
    assert made == [] if much else made
    assert ("holds more than" in str(told.value)) == much


KEY, OTHER = "sk-one-0123456789", "sk-two-0123456789"


@pytest.fixture
async def keyed(
    backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application where each caller may have 4,000 bytes beyond what is free."""
    monkeypatch.setattr(request_bodies, "POOL_BYTES", 8000)
    monkeypatch.setattr(request_bodies, "CALLER_BODIES_MIN", 0)
    settings = ApiSettings(body_bytes_max=request_bodies.BEGINNING_BYTES + 1000)
    access_control = AccessControl(ApiKeys([KEY, OTHER], None))
    app = create_app(backend, tiny.model(), CollectorRegistry(), settings, access_control=access_control)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


async def test_large_bodies_are_bounded_together_and_by_caller_and_small_ones_never_refused(
    keyed: httpx.AsyncClient,
) -> None:
    go_on = asyncio.Event()
    much = b'{"model": "' + tiny.MODEL.encode() + b'", "prompt": "' + b"x" * request_bodies.BEGINNING_BYTES

    async def slowly() -> AsyncIterator[bytes]:
        yield much + b"y" * 800
        await go_on.wait()
        yield b'"}'

    def post(key: str, content: Any) -> asyncio.Task[httpx.Response]:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        return asyncio.create_task(keyed.post(COMPLETIONS, content=content, headers=headers))

    mine = [post(KEY, slowly()) for _ in range(9)]
    await settled(lambda: sum(each.done() for each in mine) == 5)
    refused = [each for each in mine if each.done()]
    assert {each.result().status_code for each in refused} == {429}
    other = post(OTHER, slowly())
    small = post(KEY, b'{"model": "tiny", "prompt": "x"}')
    assert (await small).status_code == 200
    assert not other.done()
    go_on.set()
    for each in (*mine, other):
        if each not in refused:
            assert (await each).status_code == 400, "too long, which it came far enough to be found"
    again = post(KEY, much + b'"}')
    assert (await again).status_code == 400, "too long, and there is room to find out"
