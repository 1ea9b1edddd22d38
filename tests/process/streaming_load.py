"""Load of streams on several bootstraps: clients of OpenAI and Anthropic, half of which continue theirs."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from math import isclose
from typing import Any, Final

from tests.idle import POLL_S
from tests.process.official_clients import resuming, usual
from tests.process.stream_reader import ANSWER_S, Broken, Connect, StreamReader
from tests.process.streamed_requests import ANTHROPIC, KINDS, OPENAI, by_choice
from tests.support.joined_texts import join_texts

CLIENTS: Final = 32
BEGUN: Final = 4
"""Events that the stream of each client has had when `wait_begun` returns."""
AT_THE_START: Final = range(BEGUN, 4 * BEGUN)
"""Numbers of events after which more than as many come."""
ROUNDED: Final = 1e-4
"""Most difference between two log-probabilities of one token in different batches."""

Answer = Mapping[int, Sequence[dict[str, Any]]]
"""Events of an answer by choice, without what differs between two equal answers."""


@dataclass
class Client:
    """One client, which sends its request again and again, first to its own bootstrap."""

    kind: str
    continues: bool
    """Whether it continues its streams. Otherwise a stream ends with its connection."""
    urls: Sequence[str]
    """Addresses in the order in which it tries them."""
    connect: Connect
    whole: list[StreamReader] = field(default_factory=list)
    """Streams that were read to their end."""
    reading: StreamReader | None = None
    """The stream that runs."""

    def is_streaming(self, url: str) -> bool:
        """Whether the bootstrap at `url` sends it a stream that is about to go on for a while."""
        reading = self.reading
        return reading is not None and reading.url == url and len(reading.events) in AT_THE_START

    def ask(self, begun: threading.Semaphore, cut: list[StreamReader]) -> None:
        """Send the request once. `begun` is released when its stream has begun, and when it ends sooner.
        `cut`: list for the stream if it ends with its connection."""

        def count(reader: StreamReader) -> None:
            if len(reader.events) == BEGUN:
                begun.release()

        self.reading = reader = StreamReader(self.connect, count, self.continues)
        try:
            self.whole.append(reader.run(self.urls))
        except Broken:
            cut.append(reader)
        finally:
            if len(reader.events) < BEGUN:
                begun.release()


@dataclass
class StreamingLoad:
    """Clients that always have a stream each."""

    clients: Sequence[Client]
    cut: list[StreamReader] = field(default_factory=list)
    """Streams that ended with their connection, and were not continued."""
    _leave: threading.Event = field(default_factory=threading.Event)
    _begun: list[threading.Semaphore] = field(init=False)
    _running: list[Future[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._begun = [threading.Semaphore(0) for _ in self.clients]

    @contextmanager
    def run(self) -> Iterator[None]:
        """Run all clients. At the end each reads its last stream. Raises the error of a client."""
        with ThreadPoolExecutor(len(self.clients)) as pool:
            self._running = [
                pool.submit(self._repeat, *each) for each in zip(self.clients, self._begun, strict=True)
            ]
            try:
                yield
            finally:
                self._leave.set()
            for each in self._running:
                each.result()

    def wait_begun(self) -> None:
        """Wait until the stream of each client has begun, since the last call. Raises the error of a client
        that failed."""
        for begun in self._begun:
            while begun.acquire(blocking=False):
                pass
        for each, begun in zip(self._running, self._begun, strict=True):
            assert begun.acquire(timeout=ANSWER_S), "a stream does not begin"
            if each.done():
                each.result()

    def wait_streaming(self, url: str) -> None:
        """Wait until the bootstrap at `url` sends a stream that its client continues, and one that it does
        not. Raises the error of a client that failed."""
        give_up = time.monotonic() + ANSWER_S
        while len({each.continues for each in self.clients if each.is_streaming(url)}) < 2:
            assert time.monotonic() < give_up, "no stream is at its start"
            for each in self._running:
                if each.done():
                    each.result()
            time.sleep(POLL_S)

    def _repeat(self, client: Client, begun: threading.Semaphore) -> None:
        try:
            while not self._leave.is_set():
                client.ask(begun, self.cut)
        finally:
            begun.release()

    def read(self) -> list[StreamReader]:
        """Return all streams that have ended."""
        return [*(each for client in self.clients for each in client.whole), *self.cut]


def clients_of(urls: Sequence[str], model: str) -> list[Client]:
    """Return CLIENTS clients, as many at each bootstrap as possible. Half of them continue their streams, and
    a third are Anthropic's."""
    kinds = [*OPENAI, *ANTHROPIC, *ANTHROPIC]
    repeating = [kind for kind in kinds if KINDS[kind].repeats]
    found = []
    for number in range(CLIENTS):
        pair, continues = number // 2, number % 2 == 0
        kind = kinds[pair % len(kinds)] if continues else repeating[pair % len(repeating)]
        first = pair % len(urls)
        connect = (resuming if continues else usual)(KINDS[kind], model)
        found.append(Client(kind, continues, [*urls[first:], *urls[:first]], connect))
    return found


def check(clients: Sequence[Client], expected: Mapping[tuple[str, bool], Answer]) -> int:
    """Check every token of each whole stream. Return the number of streams that were continued.

    `expected`: answer by kind, and whether its events were read as lines. A request whose answers differ is
    not in it. Its stream is then read again, from behind its first event.
    """
    continued = 0
    for client in clients:
        answer = expected.get((client.kind, client.continues))
        for reader in client.whole:
            continued += reader.breaks > 0
            assert len(set(reader.ids)) == len(reader.ids) or not client.continues, client.kind
            if answer is not None:
                assert_same(by_choice(reader.events), answer, client.kind)
            elif reader.breaks:
                again = StreamReader(client.connect).run(client.urls, after=reader.ids[0])
                assert_same(by_choice(reader.events[1:]), by_choice(again.events), client.kind)
    return continued


def assert_same(got: Answer, expected: Answer, what: str) -> None:
    """Raise AssertionError with the first event that differs. Where texts are cut depends on the time, and
    is not compared. `what`: what was read."""
    assert got.keys() == expected.keys(), what
    for choice, events in expected.items():
        for number, (one, other) in enumerate(zip_longest(*map(join_texts, (got[choice], events)))):
            assert is_same(one, other), f"{what}: event {number} of choice {choice} is {one}, not {other}"


def is_same(one: Any, other: Any) -> bool:
    """Whether two values of JSON are equal, with log-probabilities that were rounded in another way."""
    if isinstance(one, float) and isinstance(other, float):
        return isclose(one, other, abs_tol=ROUNDED)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def answers(url: str, model: str) -> dict[tuple[str, bool], Answer]:
    """Return the answer to each request of KINDS that repeats itself, by its kind and whether its events are
    read as lines."""
    wanted = [
        (kind, connect(request, model), connect is resuming)
        for kind, request in KINDS.items()
        for connect in (resuming, usual)
        if request.repeats
    ]
    with ThreadPoolExecutor(len(wanted)) as pool:
        read = [pool.submit(StreamReader(connect, has_ids=lines).run, [url]) for _, connect, lines in wanted]
        pairs = zip(wanted, read, strict=True)
        return {(kind, lines): by_choice(each.result().events) for (kind, _, lines), each in pairs}
