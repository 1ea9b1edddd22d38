"""A reader of one stream, which goes on at another bootstrap when its connection breaks."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from tests.http import web

ANSWER_S: Final = 120.0
AGAIN_S: Final = 0.1
"""Seconds between two rounds of all bootstraps, if none of them takes a request."""
ROUNDS_MAX: Final = 1_000
"""Most rounds of all bootstraps for one stream."""
NO_ANSWER: Final = "no answer"
DONE: Final = "[DONE]"
LAST: Final = ("message_stop", "response.completed", "response.incomplete")
"""Types of the last event of a stream that ends without `[DONE]`."""


class Refused(Exception):
    """No stream begins there: the bootstrap answers that it has no worker, or nothing."""


class Broken(Exception):
    """The connection broke before the last event."""


class Failed(AssertionError):
    """The stream ended with an event that reports an error."""


Events = Iterable[tuple[str, Any]]
"""Ids and data of a stream's events. The data is an object, or DONE."""
Connect = Callable[[str, str], AbstractContextManager[Events]]
"""Function that sends a request. Arguments: base URL of a bootstrap, and the id of the event behind which the
stream goes on, or "". Raises Refused, and Broken before or between events."""


def refused_s(readers: Iterable["StreamReader"], faults: Sequence[float]) -> float:
    """Return the longest time in seconds for which a request was refused.

    `faults`: times of the faults. A request that was sent before its bootstrap died is refused from then on.
    """
    spans = [each for reader in readers for each in reader.refused]
    return max(
        (until - max(t for t in (since, *faults) if t <= until) for since, until in spans), default=0.0
    )


def plain_http(path: str, body: bytes, timeout_s: float = ANSWER_S) -> Connect:
    """Return a function that sends a request by httpx. `timeout_s`: longest wait for bytes, in seconds."""

    @contextmanager
    def connect(url: str, last_id: str) -> Iterator[Events]:
        headers = {"content-type": "application/json"} | ({"last-event-id": last_id} if last_id else {})
        try:
            with web().stream("POST", url + path, content=body, headers=headers, timeout=timeout_s) as reply:
                if reply.status_code != httpx.codes.OK:
                    reply.read()
                    raise refusal(reply.status_code, reply.text)
                yield parse_events(reply.iter_lines())
        except httpx.TransportError as error:
            raise Broken(repr(error)) from error

    return connect


def refusal(status: int, text: str) -> Refused | AssertionError:
    """Return the error for a status other than 200. A stack without workers is one to try again."""
    if status in (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE):
        return Refused(json.loads(text)["error"].get("code"))
    return AssertionError(f"HTTP {status}: {text}")


def parse_events(lines: Iterable[str]) -> Events:
    """Yield the id and the data of each event in the lines of a stream."""
    id_ = ""
    for line in lines:
        name, _, value = line.partition(": ")
        if name == "id":
            id_ = value
        elif name == "data":
            yield id_, value if value == DONE else json.loads(value)


@dataclass
class StreamReader:
    """Reader of one stream, over all of its connections."""

    connect: Connect
    on_event: Callable[["StreamReader"], None] = lambda _: None
    """Called after each event. It may raise Broken: the reader then closes the connection."""
    has_ids: bool = True
    ids: list[str] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False
    breaks: int = 0
    """Connections that broke in mid-stream."""
    refusals: int = 0
    refused: list[tuple[float, float]] = field(default_factory=list)
    """Times at which a request was sent that was refused, and at which one was sent that a bootstrap took."""
    url: str = ""
    """Base URL of the bootstrap that took the request last."""
    broke_at: str = ""
    """Base URL of the bootstrap whose connection broke last."""
    _refused_since_s: float | None = None

    def read(self, url: str, after: str = "") -> None:
        """Read one connection to its end. `after`: id of the event behind which it goes on. Raises Refused,
        Broken and Failed."""
        began, sent_s = False, time.monotonic()
        try:
            with self.connect(url, after) as events:
                began, self.url = True, url
                self._note_taken(sent_s)
                for id_, event in events:
                    self._take(id_, event)
        except Broken as error:
            if not began:
                self._note_refused(sent_s)
                raise Refused(NO_ANSWER) from error
        except Refused:
            self._note_refused(sent_s)
            raise
        if not self.done:
            self.breaks, self.broke_at = self.breaks + 1, url
            raise Broken("the connection ended before the last event")

    def run(self, urls: Sequence[str], after: str = "") -> "StreamReader":
        """Read the whole stream, or what comes after the event `after`, at one of `urls` after the other.
        Raises Failed, and Broken if the stream has no ids. Raises AssertionError after too many rounds."""
        last_id = after
        for number in range(ROUNDS_MAX * len(urls)):
            try:
                self.read(urls[number % len(urls)], last_id)
            except Refused:
                if (number + 1) % len(urls) == 0:
                    time.sleep(AGAIN_S)
                continue
            except Broken:
                if not self.has_ids:
                    raise
            if self.done:
                return self
            last_id = self.ids[-1] if self.ids else after
        raise AssertionError(f"no end: {len(self.events)} events, {self.refusals} refusals")

    def _note_refused(self, sent_s: float) -> None:
        self.refusals += 1
        if self._refused_since_s is None:
            self._refused_since_s = sent_s

    def _note_taken(self, sent_s: float) -> None:
        if self._refused_since_s is not None:
            self.refused.append((self._refused_since_s, sent_s))
            self._refused_since_s = None

    def _take(self, id_: str, event: Any) -> None:
        if event == DONE:
            self.done = True
            return
        if event.get("error"):
            raise Failed(event)
        if event.get("type") == "ping":
            return
        assert id_ or not self.has_ids, f"an event without an id: {event}"
        self.ids.append(id_)
        self.events.append(event)
        self.done = self.done or event.get("type") in LAST
        self.on_event(self)
