"""Tests that `baton chat` continues an answer whose connection broke."""

import io
import json
from collections.abc import Iterator, Sequence

import httpx
import pytest

from baton.cli.chat import ChatFailed, ChatSession
from baton.cli.chat_settings import ChatSettings
from baton.cli.resumed_stream import TRIES_MAX

PIECES = ("Pa", "ri", "s ", "in ", "May.")


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Waits between the tries, which take no time here."""
    slept: list[float] = []
    monkeypatch.setattr("baton.cli.resumed_stream.time.sleep", slept.append)
    return slept


class Broken(httpx.SyncByteStream):
    """Body of a stream whose connection breaks after some events, in the midst of the next one."""

    def __init__(self, events: Sequence[bytes], *, breaks: bool) -> None:
        self._events = events
        self._breaks = breaks

    def __iter__(self) -> Iterator[bytes]:
        yield from self._events
        if self._breaks:
            yield b"id: torn\ndata: {"
            raise httpx.ReadError("the connection was reset")


class Server:
    """Server that cuts each stream after `events_each` events, and then answers 503 `down` times."""

    def __init__(self, events_each: int, *, down: int = 0, ids: bool = True) -> None:
        self._each = events_each
        self._down = down
        self._left_down = 0
        self._ids = ids
        self.after: list[str] = []
        self.bodies: set[bytes] = set()

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        after = request.headers.get("last-event-id", "")
        if self._left_down:
            self._left_down -= 1
            return httpx.Response(503, text="not up yet")
        self._left_down = self._down
        self.after.append(after)
        self.bodies.add(request.content)
        first = int(after or -1) + 1
        events = [self._event(place, _delta(piece)) for place, piece in enumerate(PIECES)]
        events.append(self._event(len(PIECES), "[DONE]"))
        sent = events[first : first + self._each]
        breaks = first + self._each < len(events)
        return httpx.Response(200, stream=Broken(sent, breaks=breaks))

    def _event(self, place: int, data: str) -> bytes:
        return (f"id: {place}\n" if self._ids else "").encode() + f"data: {data}\n\n".encode()

    def chat(self) -> ChatSession:
        transport = httpx.MockTransport(self.answer)
        return ChatSession(httpx.Client(base_url="http://server", transport=transport), ChatSettings())


def _delta(text: str) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]})


def test_an_answer_goes_on_as_often_as_its_connection_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    server, out = Server(1), io.StringIO()
    server.chat().send("Where?", out)
    assert out.getvalue() == "Paris in May.\n"
    assert server.after == ["", "0", "1", "2", "3", "4"]
    assert len(server.bodies) == 1, "the same bytes"
    said = capsys.readouterr().err.split()
    assert said.count("continued") == 5, "one line for each"


def test_a_server_that_is_not_up_yet_is_tried_again(waits: list[float]) -> None:
    server, out = Server(3, down=TRIES_MAX - 1), io.StringIO()
    server.chat().send("Where?", out)
    assert out.getvalue() == "Paris in May.\n"
    assert waits == [0.5 * 2**place for place in range(TRIES_MAX)]


def test_the_tries_are_bounded(waits: list[float]) -> None:
    server = Server(2, down=1000)
    with pytest.raises(ChatFailed, match="503"):
        server.chat().send("Where?", io.StringIO())
    assert len(waits) == TRIES_MAX


def test_a_stream_without_ids_is_not_continued() -> None:
    server = Server(2, ids=False)
    with pytest.raises(ChatFailed, match="broke"):
        server.chat().send("Where?", io.StringIO())
    assert server.after == [""]
