"""Command `baton chat`, which sends questions to a running server and shows the answers as they arrive."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, Final, TextIO

import httpx

from baton.cli.chat_settings import ChatSettings, base_of
from baton.cli.resumed_stream import StreamCut, stream_data
from baton.runtime.errors import StartupError
from baton.runtime.reachability import is_reachable_from_elsewhere
from baton.runtime.settings import Flags, load
from baton.web.client_trust import certificate_problem, key_headers, tls_context

CONNECT_TIMEOUT_S: Final = 5.0
READ_TIMEOUT_S: Final = 300.0
"""Longest time without data from the server, in seconds. The wait for the first token includes the queue and
a long prompt."""

ENDS: Final = frozenset({"exit", "quit", "/exit", "/quit"})
"""Words that end a conversation on a terminal. They are not sent to the server."""

Message = dict[str, str]


class ChatFailed(StartupError):
    """The chat server could not be reached, or did not answer as expected."""


def run_chat(question: str | None, flags: Flags, also_known: frozenset[str]) -> int:
    """Run `baton chat` for one question, or as a conversation until the end of input. Return the
    exit code."""
    settings = load(ChatSettings, flags, os.environ, also_known)
    timeout = httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
    with httpx.Client(
        base_url=base_of(settings.url),
        timeout=timeout,
        trust_env=is_reachable_from_elsewhere(httpx.URL(settings.url).host),
        verify=tls_context(),
        headers=key_headers(),
    ) as http:
        conversation = ChatSession(http, settings)
        if question is not None:
            conversation.send(question, sys.stdout)
            return 0
        return converse(conversation)


class ChatSession:
    """Conversation with a server: the messages so far, and the connection that sends them."""

    def __init__(self, http: httpx.Client, settings: ChatSettings) -> None:
        self._http = http
        self._settings = settings
        self.messages: list[Message] = (
            [{"role": "system", "content": settings.system}] if settings.system else []
        )
        with _connection_errors(settings.url):
            self.model: str = _checked(http.get("/v1/models")).json()["data"][0]["id"]

    def send(self, question: str, out: TextIO) -> None:
        """Send a question, and stream the answer to `out`. Then add both to the messages.

        Raises ChatFailed. In that case no message is added.
        """
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
            with _connection_errors(self._settings.url):
                for delta in self._deltas(json.dumps(body).encode()):
                    answer += delta
                    out.write(delta)
                    out.flush()
        finally:
            out.write("\n" if answer else "")
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def _deltas(self, body: bytes) -> Iterator[str]:
        """Yield the pieces of answer text in the stream that answers a request. A stream whose connection
        breaks is continued. Raises ChatFailed."""
        for data in stream_data(self._http, "/v1/chat/completions", body, _checked, _report):
            event = json.loads(data)
            if "error" in event:
                raise ChatFailed(_message(event))
            for choice in event.get("choices", ()):
                yield choice.get("delta", {}).get("content") or ""


def converse(conversation: ChatSession) -> int:
    """Send each line of standard input as a question, until the input ends. Return the exit code.

    On a terminal, an answer that fails or is stopped does not end the conversation.
    """
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
        print(f"{conversation.model}: send away. Ctrl-C stops an answer; exit, quit or Ctrl-D end.")
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
            conversation.send(question, sys.stdout)
        except KeyboardInterrupt:
            if not interactive:
                return 130
            print()
        except ChatFailed as error:
            if not interactive:
                raise
            print(f"error: {error}", file=sys.stderr)


def _report(line: str) -> None:
    print(f"\n{line}", file=sys.stderr)


def _checked(reply: httpx.Response) -> httpx.Response:
    if reply.is_error:
        try:
            message = _message(reply.json())
        except ValueError:
            message = reply.text[:200]
        raise ChatFailed(f"the server answered {reply.status_code}: {message}")
    return reply


def _message(body: Any) -> str:
    match body:
        case {"error": {"message": str(message)}}:
            return message
        case _:
            return json.dumps(body)[:200]


@contextlib.contextmanager
def _connection_errors(url: str) -> Iterator[None]:
    """Context manager that turns errors of the connection into a ChatFailed with one clear sentence."""
    try:
        yield
    except httpx.ConnectError as error:
        none = f"no server answers at {url}: start one with `baton serve`, or name it with --url"
        raise ChatFailed(certificate_problem(error, url) or none) from None
    except StreamCut as error:
        raise ChatFailed(str(error)) from None
    except httpx.TimeoutException:
        raise ChatFailed(f"the server at {url} was silent for too long") from None
    except httpx.TransportError as error:
        raise ChatFailed(f"the connection to {url} broke: {error}") from None
    except (KeyError, IndexError, TypeError, json.JSONDecodeError):
        raise ChatFailed(f"what answers at {url} does not speak the OpenAI API") from None
