"""What does the running server answer? Asked from a terminal, shown as it is written."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, Final, TextIO

import httpx

from baton.cli.chat_settings import ChatSettings, base_of
from baton.cli.options import Flags
from baton.runtime.errors import StartupError
from baton.runtime.reachability import is_reachable_from_elsewhere
from baton.runtime.settings import load
from baton.web.client_trust import distrusted, key_headers, trusted

CONNECT_TIMEOUT_S: Final = 5.0
READ_TIMEOUT_S: Final = 300.0
"""Longest silence: waiting in the queue and a long prompt come before the first token."""

ENDS: Final = frozenset({"exit", "quit", "/exit", "/quit"})
"""What ends a conversation on a terminal, and is asked of nobody."""

Message = dict[str, str]


class ChatFailed(StartupError):
    """The server is not there or did not answer as asked."""


def run_chat(question: str | None, flags: Flags, also_known: frozenset[str]) -> int:
    """`baton chat`: one question, or a conversation until end of input. Returns the exit code."""
    settings = load(ChatSettings, flags, os.environ, also_known)
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    with httpx.Client(
        base_url=base_of(settings.url),
        timeout=timeout,
        trust_env=is_reachable_from_elsewhere(httpx.URL(settings.url).host),
        verify=trusted(),
        headers=key_headers(),
    ) as http:
        conversation = ChatSession(http, settings)
        if question is not None:
            conversation.ask(question, sys.stdout)
            return 0
        return converse(conversation)


class ChatSession:
    """The messages so far, and the server that continues them."""

    def __init__(self, http: httpx.Client, settings: ChatSettings) -> None:
        self._http = http
        self._settings = settings
        self.messages: list[Message] = (
            [{"role": "system", "content": settings.system}] if settings.system else []
        )
        with _told(settings.url):
            self.model: str = _checked(http.get("/v1/models")).json()["data"][0]["id"]

    def ask(self, question: str, out: TextIO) -> None:
        """Stream the answer to `out` and remember both. Raises ChatFailed, remembering neither."""
        messages = [*self.messages, {"role": "user", "content": question}]
        body: dict[str, object] = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "temperature": float(self._settings.temperature),
        }
        if self._settings.max_tokens is not None:
            body["max_tokens"] = self._settings.max_tokens
        answer = ""
        try:
            with (
                _told(self._settings.url),
                self._http.stream("POST", "/v1/chat/completions", json=body) as reply,
            ):
                if reply.is_error:
                    reply.read()
                for delta in _deltas(_checked(reply)):
                    answer += delta
                    out.write(delta)
                    out.flush()
        finally:
            out.write("\n" if answer else "")
        self.messages = [*messages, {"role": "assistant", "content": answer}]


def converse(conversation: ChatSession) -> int:
    """Ask each line of standard input until it ends. Returns the exit code.

    On a terminal, an answer that fails or is stopped does not end the conversation.
    """
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
        print(f"{conversation.model}: ask away. Ctrl-C stops an answer; exit, quit or Ctrl-D end.")
    while True:
        try:
            question = input("> " if interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            return 0
        if not question:
            continue
        if interactive and question.lower() in ENDS:
            return 0
        try:
            conversation.ask(question, sys.stdout)
        except KeyboardInterrupt:
            if not interactive:
                return 130
            print()
        except ChatFailed as error:
            if not interactive:
                raise
            print(f"error: {error}", file=sys.stderr)


def _deltas(reply: httpx.Response) -> Iterator[str]:
    """The pieces of text in a stream of server-sent events."""
    for line in reply.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise ChatFailed(_message(event))
        for choice in event.get("choices", ()):
            yield choice.get("delta", {}).get("content") or ""
    raise ChatFailed("the server ended the answer before it was complete")


def _checked(reply: httpx.Response) -> httpx.Response:
    if reply.is_error:
        try:
            told = _message(reply.json())
        except ValueError:
            told = reply.text[:200]
        raise ChatFailed(f"the server answered {reply.status_code}: {told}")
    return reply


def _message(body: Any) -> str:
    match body:
        case {"error": {"message": str(message)}}:
            return message
        case _:
            return json.dumps(body)[:200]


@contextlib.contextmanager
def _told(url: str) -> Iterator[None]:
    """Turn what a connection can fail with into one clear sentence."""
    try:
        yield
    except httpx.ConnectError as error:
        none = f"no server answers at {url}: start one with `baton serve`, or name it with --url"
        raise ChatFailed(distrusted(error, url) or none) from None
    except httpx.TimeoutException:
        raise ChatFailed(f"the server at {url} was silent for too long") from None
    except httpx.TransportError as error:
        raise ChatFailed(f"the connection to {url} broke: {error}") from None
    except (KeyError, IndexError, TypeError, json.JSONDecodeError):
        raise ChatFailed(f"what answers at {url} does not speak the OpenAI API") from None
