"""Ranks of a worker started one by one, as on several hosts, with hooks into one of them."""

import re
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from tests.forks import fork_call
from tests.http import greedy, web
from tests.idle import POLL_S
from tests.ports import free_port
from tests.process import hooked_rank
from tests.process.cancelling import cancel_room
from tests.process.hooks import Folder
from tests.process.load import Answer
from tests.process.stack import STOP_S, Service, Stack

ANSWER_S: Final = 120.0
OUTPUT_TOKENS: Final = 8
GROUP_TIMEOUT_MS: Final = "15000"

MOVED: Final = re.compile(r"baton\.worker\.turn_loop moved \S* ?turn=(\d+) room=(\d+) effect=(\w+)")


@dataclass
class Group:
    """The ranks of one worker, without a launcher. Only the test starts them again."""

    stack: Stack
    side: str
    name: str
    shape: Mapping[str, str]
    """Flags that every rank gets."""
    world: int
    starts: int = 0
    ranks: list[Service] = field(default_factory=list)

    def start(self, *habits: str, followers: tuple[str, ...] = ()) -> None:
        """Start every rank as a new incarnation. `habits`: hooks that each has from the beginning.
        `followers`: those of all but the leader."""
        self.starts += 1
        if self.starts > 1:
            self.stack.forget(self.name)
        rendezvous = f"127.0.0.1:{free_port()}"
        self.ranks = [
            self._start(rank, rendezvous, habits + followers * bool(rank)) for rank in range(self.world)
        ]
        for rank, service in enumerate(self.ranks):
            self.stack.services[f"{self.name}/{rank}"] = service

    def folder(self, rank: int) -> Folder:
        """Return the folder of a running rank's hooks."""
        return Folder(self.stack.folder / f"{self.name}-{rank}-{self.starts}")

    def wait_said(self, rank: int, name: str, seconds: float) -> str:
        """Wait for what a hook of this rank reports."""
        deadline = time.monotonic() + seconds
        while (said := self.folder(rank).asked(name)) is None:
            assert time.monotonic() < deadline, f"{name} of rank {rank} did nothing\n{self.stack.tails()}"
            time.sleep(POLL_S)
        return said

    def gauge(self, name: str) -> list[float]:
        """Return a gauge of every rank, by rank."""
        return [each.gauges()[name, ()] for each in self.ranks]

    def wait_gauge(self, name: str, values: list[float], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (now := self.gauge(name)) != values:
            assert time.monotonic() < deadline, f"{name}: {now}, not {values}\n{self.stack.tails()}"
            time.sleep(POLL_S)

    def wait_ended(self) -> list[int]:
        """Wait until every rank has ended by itself, and return their exit codes."""
        return [each.process.wait(STOP_S) for each in self.ranks]

    def moves(self, rank: int, room: int) -> list[tuple[str, int]]:
        """(effect, turn) of each move of a room on one rank, as its log tells (`--log-level debug`)."""
        found = MOVED.findall(self.ranks[rank].log.read_text(errors="replace"))
        return [(effect, int(turn)) for turn, whose, effect in found if int(whose) == room]

    def _start(self, rank: int, rendezvous: str, habits: tuple[str, ...]) -> Service:
        port = free_port()
        flags = {**self.stack.common, **self.shape, "model": self.stack.model, "log_level": "debug"}
        command = [self.side, "--name", self.name, "--metrics-port", str(port)]
        command += ["--bootstrap", f"127.0.0.1:{self.stack.grpc_port}", "--rendezvous", rendezvous]
        command += ["--rank", str(rank), "--world", str(self.world)]
        command += [part for key, value in flags.items() for part in (f"--{key.replace('_', '-')}", value)]
        folder = self.folder(rank)
        folder.path.mkdir()
        for habit in habits:
            folder.say(habit)
        log = self.stack.folder / f"{self.name}-{rank}-{self.starts}.log"
        environ = {"OMP_NUM_THREADS": "1"}
        process = fork_call(hooked_rank.run, (folder.path, command), log, environ)
        return Service(f"{self.name}/{rank}", process, log, _http(port), command)


@dataclass
class Hand:
    """A stack of one worker a side, whose ranks are started by hand."""

    stack: Stack
    prefill: Group
    decode: Group

    def start(self, group: Group, *habits: str, followers: tuple[str, ...] = ()) -> None:
        """Start the group's ranks again, and wait until both workers are ready."""
        group.start(*habits, followers=followers)
        self.stack.wait_ready(2)

    def answer(self, prompt: Sequence[int], tokens: int = OUTPUT_TOKENS, **more: Any) -> httpx.Response:
        return web().post(
            f"{self.stack.url}/v1/completions", json=self._body(prompt, tokens) | more, timeout=ANSWER_S
        )

    def ids(self, prompt: Sequence[int], tokens: int = OUTPUT_TOKENS) -> list[int]:
        """Return the tokens of an answer when nothing goes wrong."""
        reply = self.answer(prompt, tokens)
        assert reply.status_code == 200, reply.text
        ids: list[int] = reply.json()["choices"][0]["token_ids"]
        return ids

    def rooms(self, request_id: str) -> list[dict[str, Any]]:
        """A request's rooms with their timelines, oldest first."""
        listed = web().get(f"{self.stack.url}/rooms", params={"request_id": request_id}).json()["rooms"]
        return [web().get(f"{self.stack.url}/rooms/{each['id']}").json() for each in reversed(listed)]

    def events(self, answer: Answer) -> list[str]:
        """Names of the lines in the timeline of a request's first room."""
        return [event["name"] for event in self.rooms(answer.request_id)[0]["events"]]

    def wait_event(self, answer: Answer, name: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while name not in (names := self.events(answer)):
            assert time.monotonic() < deadline, f"no {name} after {names}\n{self.stack.tails()}"
            time.sleep(POLL_S)

    def cancel(self, room: dict[str, Any]) -> None:
        """Cancel the request's room, which is not retried."""
        cancel_room(f"127.0.0.1:{self.stack.grpc_port}", int(room["id"]), "by a test")

    @contextmanager
    def asking(self, prompt: Sequence[int], tokens: int = OUTPUT_TOKENS) -> Iterator[Answer]:
        """Keep one streamed request under way while the body runs."""
        answer = Answer(f"defect-{time.monotonic_ns()}")
        body = self._body(prompt, tokens) | {"stream": True}
        thread = threading.Thread(target=answer.read, args=(self.stack.url, body))
        thread.start()
        try:
            yield answer
        finally:
            thread.join(ANSWER_S)
        assert not thread.is_alive(), "no end of the answer\n" + self.stack.tails()

    def _body(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        model = web().get(f"{self.stack.url}/v1/models").json()["data"][0]["id"]
        return greedy(model, prompt, tokens)


@contextmanager
def by_hand(model: Path, prefill: Mapping[str, str], decode: Mapping[str, str]) -> Iterator[Hand]:
    """A ready stack of one worker a side, each of the ranks that its flags make. The bootstrap waits long for
    a worker that is being started again. Whatever happens, its processes end with it."""
    with tempfile.TemporaryDirectory(prefix="baton-test-") as folder:
        common = {"dtype": "float32", "kv_cache_memory": "8MiB", "group_timeout_ms": GROUP_TIMEOUT_MS}
        stack = Stack(str(model), Path(folder), common)
        groups = [
            Group(stack, side, f"{side}-0", shape, world=int(shape.get("tp", 1)) * int(shape.get("pp", 1)))
            for side, shape in (("prefill", prefill), ("decode", decode))
        ]
        try:
            stack.start_bootstrap(retry_wait_ms="240000", room_attempts="6")
            for group in groups:
                group.start()
            stack.wait_ready(2)
            yield Hand(stack, *groups)
        finally:
            for service in stack.services.values():
                if service.process.poll() is None:
                    service.kill()


def _http(port: int) -> str:
    return f"http://127.0.0.1:{port}"
