"""Tests of `baton chat`: streamed answers, the conversation, and errors."""

import io
import json
from collections.abc import Callable

import httpx
import pytest

from baton.cli.chat import ChatFailed, ChatSession, converse, run_chat
from baton.cli.chat_settings import ChatSettings

Answer = Callable[[httpx.Request], httpx.Response]


def sse(*events: object, done: bool = True) -> httpx.Response:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"] * done
    return httpx.Response(
        200, text=": ping\n\n" + "".join(lines), headers={"content-type": "text/event-stream"}
    )


def delta(text: str | None) -> object:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


def conversation(answer: Answer, settings: ChatSettings | None = None) -> ChatSession:
    def server(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"object": "list", "data": [{"id": "tiny"}]})
        return answer(request)

    http = httpx.Client(base_url="http://server", transport=httpx.MockTransport(server))
    return ChatSession(http, settings or ChatSettings())


def test_an_answer_is_written_piece_by_piece_and_remembered() -> None:
    asked: list[dict[str, object]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return sse(delta(None), delta("Par"), delta("is."), {"choices": [], "usage": {}})

    chat, out = conversation(answer, ChatSettings(system="Be brief.", temperature="0.5")), io.StringIO()
    chat.send("Capital of France?", out)
    chat.send("Of Spain?", out)

    assert out.getvalue() == "Paris.\nParis.\n"
    assert (asked[0]["model"], asked[0]["stream"], asked[0]["temperature"]) == ("tiny", True, 0.5)
    assert asked[1]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Capital of France?"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "Of Spain?"},
    ]


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (lambda: httpx.Response(429, json={"error": {"message": "queues are full"}}), "429: queues are full"),
        (lambda: httpx.Response(502, text="<html>bad gateway"), "502: <html>bad gateway"),
        (lambda: sse(delta("Par"), {"error": {"message": "decode worker lost"}}), "^decode worker lost$"),
        (lambda: sse(delta("Par"), done=False), "before it was complete"),
        (lambda: httpx.Response(200, text="data: {broken\n\n"), "does not speak the OpenAI API"),
    ],
)
def test_an_error_is_shown_and_leaves_no_messages(reply: Callable[[], httpx.Response], told: str) -> None:
    chat = conversation(lambda _: reply())
    with pytest.raises(ChatFailed, match=told):
        chat.send("Capital of France?", io.StringIO())
    assert chat.messages == []


def test_a_missing_server_is_named_with_what_to_do(unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    with pytest.raises(ChatFailed, match=f"no server answers at {url}: start one with `baton serve`"):
        run_chat("hello", {"url": url}, frozenset())


def test_a_certificate_that_is_not_believed_is_no_missing_server() -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")

    http = httpx.Client(base_url="https://server", transport=httpx.MockTransport(refuse))
    with pytest.raises(ChatFailed, match=r"the certificate of .* is not trusted here \(SSL_CERT_FILE"):
        ChatSession(http, ChatSettings(url="https://server")).send("hello", io.StringIO())


def test_another_server_on_the_port_is_named() -> None:
    http = httpx.Client(
        base_url="http://server",
        transport=httpx.MockTransport(lambda _: httpx.Response(200, json={"data": []})),
    )
    with pytest.raises(ChatFailed, match="does not speak the OpenAI API"):
        ChatSession(http, ChatSettings())


def test_each_line_of_standard_input_is_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def echo(request: httpx.Request) -> httpx.Response:
        return sse(delta(json.loads(request.content)["messages"][-1]["content"].upper()))

    monkeypatch.setattr("sys.stdin", io.StringIO("first\n\n  second  \n"))
    assert converse(conversation(echo)) == 0
    assert capsys.readouterr().out == "FIRST\nSECOND\n"


@pytest.mark.parametrize("word", ["exit", "Quit"])
def test_a_conversation_on_a_terminal_ends_by_a_word(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nobody(_: httpx.Request) -> httpx.Response:
        raise AssertionError(f"{word} was asked")

    typed = io.StringIO(f"{word}\n")
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", typed)
    assert converse(conversation(nobody)) == 0
    assert "exit, quit or Ctrl-D end" in capsys.readouterr().out


def test_no_length_is_sent_that_was_not_given() -> None:
    """The server knows its context length, and allows what is left of it."""
    asked: list[dict[str, object]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        return sse(delta("Par"))

    conversation(answer).send("Capital of France?", io.StringIO())
    conversation(answer, ChatSettings(max_tokens=7)).send("Capital of France?", io.StringIO())
    assert "max_tokens" not in asked[0]
    assert asked[1]["max_tokens"] == 7
