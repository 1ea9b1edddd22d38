"""No stream is silent for long: its status comes soon, and keep-alives come while nothing else does."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import anthropic
import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry
from starlette.types import Message

from baton.api.app import create_app
from baton.api.backend import Hangup, Limits, NoWorker, Overloaded, RoomFailed, client_gone
from baton.api.generation.prompt_encoder import PromptEncoder
from baton.api.http.event_stream import HEADERS, PLAIN, EventStream
from baton.api.settings import ApiSettings
from baton.rooms.errors import Reason
from baton.rooms.request import Request
from baton.runtime.listening_ports import bind_port
from baton.web.http_server import serve_http
from tests.api import tiny
from tests.api.cutting_proxy import cutting_proxy
from tests.api.scripted import ScriptedBackend, Step, Stream, batch, saying

SILENCE_S: Final = 0.05
CUT_TICKS: Final = 150
PATIENCE_S: Final = 30.0
LIMITS: Final = Limits(context_tokens=8192, prompt_tokens=8000, sequence_tokens=8192)
HELLO: Final[list[Any]] = [{"role": "user", "content": "Say hello"}]
CHAT: Final = "/v1/chat/completions"
ROUTES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "chat": (CHAT, {"messages": HELLO}),
    "completions": ("/v1/completions", {"prompt": "Say hello"}),
    "messages": ("/v1/messages", {"messages": HELLO, "max_tokens": 64}),
    "responses": ("/v1/responses", {"input": "Say hello"}),
}
KEEP_ALIVE: Final = dict.fromkeys(ROUTES, ": keep-alive\n") | {
    "messages": 'event: ping\ndata: {"type":"ping"}\n\n'
}
ENDS: Final = dict.fromkeys(ROUTES, "[DONE]") | {
    "messages": "event: message_stop",
    "responses": "event: response.completed",
}
EACH_ROUTE: Final = pytest.mark.parametrize("route", ROUTES)


@dataclass
class SlowBackend(ScriptedBackend):
    """A backend that lets a request into a room, or refuses it, once `admits` is set."""

    admits: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: Exception | None = None

    async def generate(self, request: Request, why: Callable[[], Hangup] = client_gone) -> Stream:
        await self.admits.wait()
        if self.refusal is not None:
            raise self.refusal
        return await super().generate(request, why)


@pytest.fixture
def backend() -> SlowBackend:
    return SlowBackend(known_limits=LIMITS)


@asynccontextmanager
async def serving(
    backend: ScriptedBackend, silence_s: float = SILENCE_S, registry: CollectorRegistry | None = None
) -> AsyncIterator[int]:
    """Serve an application whose streams are silent for at most this many seconds. Yields its port."""
    settings = ApiSettings(stream_silence_s=silence_s)
    app = create_app(backend, tiny.model(), registry or CollectorRegistry(), settings)
    server = await serve_http(app, bind_port("127.0.0.1", 0, "test"), 1, answers_refusals=True)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield server.port
    finally:
        await server.stop()


@dataclass
class Waiting:
    """A stream of which nothing but keep-alives has come."""

    route: str
    reply: httpx.Response
    texts: AsyncIterator[str]
    text: str = ""

    @classmethod
    async def begin(cls, client: httpx.AsyncClient, route: str, keep_alives: int = 3) -> "Waiting":
        path, body = ROUTES[route]
        asked = client.build_request("POST", path, json={"model": tiny.MODEL, "stream": True} | body)
        reply = await client.send(asked, stream=True)
        waiting = cls(route, reply, reply.aiter_text())
        await waiting.until(KEEP_ALIVE[route] * keep_alives)
        return waiting

    async def until(self, end: str) -> None:
        while not self.text.endswith(end):
            self.text += await anext(self.texts)

    async def rest(self) -> str:
        async for text in self.texts:
            self.text += text
        return self.text.replace(KEEP_ALIVE[self.route], "")


@EACH_ROUTE
async def test_a_stream_that_waits_has_its_status_and_keep_alives(route: str, backend: SlowBackend) -> None:
    async with serving(backend) as port, httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        waiting = await Waiting.begin(client, route)
        assert waiting.reply.status_code == 200
        assert waiting.text.replace(KEEP_ALIVE[route], "") == "", (
            "no other event comes before the first token"
        )
        for name, value in HEADERS:
            assert waiting.reply.headers[name.decode()] == value.decode()
        backend.admits.set()
        assert ENDS[route] in await waiting.rest()
    assert backend.left_open == []


@EACH_ROUTE
@pytest.mark.parametrize(
    ("refusal", "word"),
    [
        (Overloaded("the queue is full", 5), "the queue is full"),
        (NoWorker("no decode worker is ready"), "no decode worker is ready"),
        (RoomFailed("prefill-0 is gone", Reason.PREFILL_LOST), "prefill-0 is gone"),
        (ZeroDivisionError("oops"), "internal error"),
    ],
    ids=["overloaded", "no worker", "failed room", "bug"],
)
async def test_what_fails_behind_a_keep_alive_is_an_error_event(
    route: str, refusal: Exception, word: str, backend: SlowBackend
) -> None:
    registry = CollectorRegistry()
    async with (
        serving(backend, registry=registry) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        waiting = await Waiting.begin(client, route, keep_alives=1)
        backend.refusal = refusal
        backend.admits.set()
        text = await waiting.rest()
    assert word in text
    assert "[DONE]" not in text
    assert "oops" not in text
    last = text.rstrip("\n").split("\n\n")[-1]
    assert {"chat": "data: ", "completions": "data: ", "messages": "event: error\n"}.get(
        route, "event: response.failed\n"
    ) in last
    status = {Overloaded: "429", ZeroDivisionError: "500"}.get(type(refusal), "503")
    counted = registry.get_sample_value(
        "baton_http_requests_total", {"route": ROUTES[route][0], "status": status}
    )
    assert counted == 1, "a stream that broke off counts as its error"


@EACH_ROUTE
async def test_what_fails_before_the_first_keep_alive_has_its_status(
    route: str, backend: SlowBackend
) -> None:
    backend.refusal = Overloaded("the queue is full", 5)
    backend.admits.set()
    path, body = ROUTES[route]
    async with (
        serving(backend, silence_s=PATIENCE_S) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        reply = await client.post(path, json={"model": tiny.MODEL, "stream": True} | body)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "5")
        wrong = await client.post(path, json={"model": tiny.MODEL, "stream": True, "temperature": -1} | body)
        assert wrong.status_code == 400


async def test_a_comment_is_no_token(backend: SlowBackend) -> None:
    registry = CollectorRegistry()
    async with (
        serving(backend, registry=registry) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        waiting = await Waiting.begin(client, "chat")
        assert registry.get_sample_value("baton_time_to_first_token_seconds_count") == 0
        backend.admits.set()
        await waiting.rest()
        assert registry.get_sample_value("baton_time_to_first_token_seconds_count") == 1


async def _ends_whole(client: httpx.AsyncClient, route: str) -> bool:
    path, body = ROUTES[route]
    try:
        reply = await client.post(path, json={"model": tiny.MODEL, "stream": True} | body)
    except httpx.HTTPError:
        return False
    return ENDS[route] in reply.text


async def _passes(
    backend: SlowBackend, silence_s: float, go_on: Sequence[asyncio.Event]
) -> tuple[list[bool], int]:
    """Return whether each route's stream came whole through a proxy, and how many connections the proxy cut.
    `go_on`: set once a silent stream would have been cut."""
    async with (
        serving(backend, silence_s) as port,
        cutting_proxy(port, CUT_TICKS) as proxy,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{proxy.port}", timeout=PATIENCE_S) as client,
    ):
        streams = [asyncio.create_task(_ends_whole(client, route)) for route in ROUTES]
        while proxy.aged < len(ROUTES):
            await asyncio.sleep(0.01)
        for each in go_on:
            each.set()
        return await asyncio.gather(*streams), proxy.cuts


class _Blocked:
    """Prompts that are made once `go_on` is set."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self._made = PromptEncoder._run

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def run(prompts: PromptEncoder, *arguments: Any) -> Any:
            await self.go_on.wait()
            return await self._made(prompts, *arguments)

        monkeypatch.setattr(PromptEncoder, "_run", run)


async def test_a_proxy_that_cuts_silent_connections_cuts_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting to be tokenised, waiting in line, computing the prompt, and behind some tokens."""

    def at_work(script: Callable[[asyncio.Event], Sequence[Step]]) -> tuple[SlowBackend, asyncio.Event]:
        gate, busy = asyncio.Event(), SlowBackend(known_limits=LIMITS)
        busy.admits.set()
        busy.script = lambda _: script(gate)
        return busy, gate

    in_line = SlowBackend(known_limits=LIMITS)
    computing, computed = at_work(lambda gate: [gate, *saying("Hello world")])
    retracted, resumed = at_work(lambda gate: [batch(tiny.ids("Hello")), gate, *saying(" world")])
    states = [(in_line, in_line.admits), (computing, computed), (retracted, resumed)]
    seen = await asyncio.gather(*(_passes(backend, SILENCE_S, [go_on]) for backend, go_on in states))
    assert seen == [([True] * len(ROUTES), 0)] * len(states)

    blocked = _Blocked()
    blocked.install(monkeypatch)
    tokenising = SlowBackend(known_limits=LIMITS)
    tokenising.admits.set()
    silent = SlowBackend(known_limits=LIMITS)
    whole, cut = await asyncio.gather(
        _passes(tokenising, SILENCE_S, [blocked.go_on]),
        _passes(silent, PATIENCE_S, [silent.admits, blocked.go_on]),
    )
    assert whole == ([True] * len(ROUTES), 0)
    assert cut == ([False] * len(ROUTES), len(ROUTES)), "the proxy cuts what is silent"


async def test_the_openai_client_reads_through_keep_alives(backend: SlowBackend) -> None:
    gate = asyncio.Event()
    backend.script = lambda _: [batch(tiny.ids("Hello")), gate, *saying(" world")]
    async with serving(backend) as port:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        chat = await client.chat.completions.create(model=tiny.MODEL, messages=HELLO, stream=True)
        text = await client.completions.create(model=tiny.MODEL, prompt="Hi", stream=True)
        responses = await client.responses.create(model=tiny.MODEL, input="Hi", stream=True)
        asyncio.get_running_loop().call_later(5 * SILENCE_S, backend.admits.set)
        asyncio.get_running_loop().call_later(10 * SILENCE_S, gate.set)
        deltas = [each.choices[0].delta.content or "" async for each in chat]
        assert "".join(deltas) == "Hello world"
        assert "".join([each.choices[0].text async for each in text]) == "Hello world"
        events = [event async for event in responses]
        assert [event.type for event in events][:2] == ["response.created", "response.in_progress"]
        assert events[-1].type == "response.completed"
        assert events[-1].response.output_text == "Hello world"


async def test_the_openai_client_raises_what_fails_behind_a_keep_alive(backend: SlowBackend) -> None:
    backend.refusal = Overloaded("the queue is full", 5)
    async with serving(backend) as port:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        stream = await client.chat.completions.create(model=tiny.MODEL, messages=HELLO, stream=True)
        waiting = client.responses.stream(model=tiny.MODEL, input="Hi")
        async with waiting as responses:
            backend.admits.set()
            with pytest.raises(openai.APIError, match="the queue is full"):
                async for _ in stream:
                    pass
            kinds = [event.type async for event in responses]
        assert kinds[:1] == ["response.created"]
        assert kinds[-1] == "response.failed"


async def test_the_anthropic_client_reads_through_pings(backend: SlowBackend) -> None:
    gate = asyncio.Event()
    backend.script = lambda _: [batch(tiny.ids("Hello")), gate, *saying(" world")]
    asked: dict[str, Any] = {"model": tiny.MODEL, "max_tokens": 64, "messages": HELLO}
    async with serving(backend) as port:
        client = anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0)
        async with client.messages.stream(**asked) as stream:
            asyncio.get_running_loop().call_later(5 * SILENCE_S, backend.admits.set)
            asyncio.get_running_loop().call_later(10 * SILENCE_S, gate.set)
            message = await stream.get_final_message()
        assert [block.type for block in message.content] == ["text"]
        assert message.content[0].text == "Hello world"  # type: ignore[union-attr]
        backend.admits.clear()
        backend.refusal = Overloaded("the queue is full", 5)
        async with client.messages.stream(**asked) as stream:
            backend.admits.set()
            with pytest.raises(anthropic.APIError, match="the queue is full"):
                await stream.get_final_message()


class Sent:
    """A receiver of what a stream sends, as long as it is `open`."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.messages: list[Message] = []

    async def send(self, message: Message) -> None:
        await self.open.wait()
        self.messages.append(message)

    @property
    def bodies(self) -> list[bytes]:
        return [each["body"] for each in self.messages if each["type"] == "http.response.body"]


async def test_a_client_that_reads_nothing_is_sent_no_keep_alives() -> None:
    sent = Sent()
    stream = EventStream(sent.send, PLAIN, 0.01)
    sent.open.clear()
    writing = asyncio.create_task(stream.write(b"first"))
    await asyncio.sleep(0.05)
    sent.open.set()
    await writing
    assert sent.bodies == [b"first"]
    stream.close()


async def test_an_event_and_a_keep_alive_do_not_mix() -> None:
    """The status goes out once, and an event comes behind the keep-alive that was begun before it."""
    sent = Sent()
    sent.open.clear()
    stream = EventStream(sent.send, PLAIN, 0.01)
    while not stream.started:
        await asyncio.sleep(0.001)
    writing = asyncio.create_task(stream.write(b"event", last=True))
    await asyncio.sleep(0)
    sent.open.set()
    await writing
    assert sent.bodies == [PLAIN.keep_alive, b"event"]
    assert [each["type"] for each in sent.messages].count("http.response.start") == 1
    await asyncio.sleep(0.03)
    assert len(sent.bodies) == 2, "nothing comes behind the end"


@EACH_ROUTE
async def test_who_hangs_up_between_two_keep_alives_takes_its_request_along(
    route: str, backend: SlowBackend
) -> None:
    backend.admits.set()
    backend.script = lambda _: [asyncio.Event()]
    async with serving(backend) as port:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            waiting = await Waiting.begin(client, route)
            await waiting.reply.aclose()
        async with asyncio.timeout(PATIENCE_S):
            await backend.streams[0].hung_up.wait()
    assert backend.streams[0].hangups == [Hangup.CLIENT_GONE]


def test_clients_are_promised_ten_seconds() -> None:
    assert ApiSettings().stream_silence_s < 10


async def test_what_ends_a_keep_alive_ends_the_next_write() -> None:
    """The error of a keep-alive's sending is not lost with its task."""
    failed = asyncio.Event()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            failed.set()
            raise OSError("the connection is broken")

    stream = EventStream(send, PLAIN, SILENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        await failed.wait()
    with pytest.raises(OSError, match="broken"):
        await stream.write(b"data: x\n\n")
    stream.close()
