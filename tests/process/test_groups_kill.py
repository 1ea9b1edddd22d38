"""Tests of a worker of several ranks, one of which is killed or stopped.

Whoever is hit: nothing waits longer than the group's time-out, the other ranks end, the launcher starts the
group again, and the requests go on where they were, token for token.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.http import web
from tests.launch.stand_ins import gone
from tests.models.eight_heads import VOCABULARY, eight_heads
from tests.pairwise import Case, every, parameters
from tests.process.load import Asked, any_prompts, asked
from tests.process.stack import SPLIT, Rank, Stack, running_stack
from tests.support.shared import Shared

ANSWER_S = 180.0
CLIENTS = 3
OUTPUT_TOKENS = 40
LENGTHS = (400, 500, 600)
GROUP_TIMEOUT_MS = 4_000
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
BLOWS = every({"side": ("prefill", "decode"), "rank": (0, 1), "number": (KILL, STOP)})


def named(case: Case) -> str:
    who, what = ("leader", "follower")[case["rank"]], {KILL: "killed", STOP: "stopped"}[case["number"]]
    return f"{case['side']}-{who}-{what}"


@pytest.fixture(scope="module")
def model(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eight_heads(tmp_path_factory.mktemp("eight-heads"), demo_model_dir)


@pytest.fixture(scope="module")
def stacks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared[Stack]]:
    """A stack in which two pipeline ranks compute the prompts and two tensor ranks decode, without another
    pair. A restarted launcher reports the exit of the last one's ranks."""
    exits = tmp_path_factory.mktemp("exits")
    start = partial(
        running_stack,
        str(model),
        prefill=[{"pp": "2", "chunk_tokens": "64", "exit_file": str(exits / "prefill-0")}],
        decode=[{"tp": "2", **SPLIT, "exit_file": str(exits / "decode-0")}],
        bootstrap={"retry_wait_ms": "120000", "room_attempts": "8"},
        dtype="float32",
        kv_cache_memory="8MiB",
        group_timeout_ms=str(GROUP_TIMEOUT_MS),
    )
    with Shared(start) as shared:
        yield shared


@pytest.fixture
def groups(stacks: Shared[Stack], request: pytest.FixtureRequest) -> Stack:
    return stacks.lend(request.node)


@pytest.fixture(scope="module")
def known(model: Path) -> Asked:
    return asked(model, any_prompts(LENGTHS, VOCABULARY), OUTPUT_TOKENS)


@dataclass
class Clients:
    """Ask one request after another, each its own prompt, until told to leave."""

    stack: Stack
    asked: Asked
    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    _leave: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def asking(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._ask, args=(index,)) for index in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._leave.set()
            for thread in threads:
                thread.join(ANSWER_S)

    def wait_answers(self, more: int) -> None:
        """Wait until this many more requests were answered."""
        wanted, deadline = self.answers + more, time.monotonic() + ANSWER_S
        while self.answers < wanted:
            assert not self.wrong, self.wrong
            assert time.monotonic() < deadline, self.stack.tails()
            time.sleep(0.05)

    def _ask(self, index: int) -> None:
        prompt, want = self.asked.prompts[index], list(self.asked.answers[index])
        model = web().get(f"{self.stack.url}/v1/models").json()["data"][0]["id"]
        body: dict[str, Any] = {"model": model, "prompt": list(prompt), "max_tokens": len(want)}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        while not self._leave.is_set():
            reply = web().post(f"{self.stack.url}/v1/completions", json=body, timeout=ANSWER_S)
            if reply.status_code == 503 and reply.json()["error"]["code"] == "no_worker":
                time.sleep(0.1)  # it came while a side was away: refused at once, as it should be
                continue
            self.request_ids.append(reply.headers["x-request-id"])
            if reply.status_code != 200:
                self.wrong.append(f"prompt {index}: {reply.status_code} {reply.text}")
            elif (ids := reply.json()["choices"][0]["token_ids"]) != want:
                self.wrong.append(f"prompt {index}: {ids} expected {want}")
            self.answers += 1

    def causes(self) -> list[tuple[str, str]]:
        """Return (reason, text) of every failed room of these requests."""
        found = []
        for each in self.request_ids:
            rooms = web().get(f"{self.stack.url}/rooms", params={"request_id": each}).json()["rooms"]
            found += [(room["cause"]["reason"], room["cause"]["text"]) for room in rooms if room["cause"]]
        return found


def wait_held(stack: Stack, side: str) -> None:
    """Wait until a room is stuck at `side`, of which one rank is stopped. Rooms that need nothing of it go
    on."""
    waiting = {"open"} if side == "prefill" else {"open", "streaming"}

    def held() -> set[str]:
        rooms = web().get(f"{stack.url}/rooms").json()["rooms"]
        return {each["id"] for each in rooms if each["phase"] in waiting}

    deadline = time.monotonic() + ANSWER_S
    before, now = set[str](), held()
    while not before & now:
        assert time.monotonic() < deadline, stack.tails()
        time.sleep(0.3)
        before, now = now, held()


def wait_gone(ranks: list[Rank]) -> None:
    deadline = time.monotonic() + ANSWER_S
    while not all(gone(rank.pid) for rank in ranks):
        assert time.monotonic() < deadline, [rank.pid for rank in ranks if not gone(rank.pid)]
        time.sleep(0.05)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", parameters(BLOWS, named, pytest.mark.all_groups))
def test_requests_go_on_token_for_token_and_the_group_comes_back_when_a_rank_is(
    groups: Stack, known: Asked, case: Case
) -> None:
    side, rank, number = case.values()
    start = groups.idle_gauges()
    service = groups.services[f"{side}-0"]
    before = service.ranks()
    clients = Clients(groups, known)
    with clients.asking():
        clients.wait_answers(CLIENTS)
        groups.forget(service.name)
        before[rank].send(STOP)
        wait_held(groups, side)  # or the blow may fall between two rooms, and cost none
        before[rank].send(number)
        wait_gone(before)
        groups.wait_ready(2)
        clients.wait_answers(CLIENTS)
    assert not clients.wrong, clients.wrong
    causes = clients.causes()
    if rank == 0:
        assert f"{side}_lost" in {reason for reason, _ in causes}, causes
    else:
        # Refused: the rooms that no turn opened any more.
        told = {"group_broken", "refused"}
        assert any(reason in told and "rank 1" in text for reason, text in causes), causes
    assert not {each.pid for each in service.ranks()} & {each.pid for each in before}
    groups.wait_idle(start)


@pytest.mark.timeout(300)
def test_ranks_die_with_their_launcher_and_its_next_start_serves(groups: Stack, known: Asked) -> None:
    start = groups.idle_gauges()
    ranks = groups.services["decode-0"].ranks()
    clients = Clients(groups, known)
    with clients.asking():
        clients.wait_answers(1)
        groups.services["decode-0"].kill()
        wait_gone(ranks)
        groups.restart("decode-0")
        groups.wait_ready(2)
        clients.wait_answers(CLIENTS)
    assert not clients.wrong, clients.wrong
    groups.wait_idle(start)


def test_the_first_signal_drains_every_rank_of_every_group_and_all_exit_zero(
    groups: Stack, known: Asked
) -> None:
    ranks = [rank for name in ("prefill-0", "decode-0") for rank in groups.services[name].ranks()]
    assert len(ranks) == 4
    clients = Clients(groups, known)
    with clients.asking():
        clients.wait_answers(1)
    codes = groups.stop()
    assert codes == {"prefill-0": 0, "decode-0": 0, "bootstrap": 0}, groups.tails()
    assert not clients.wrong
    wait_gone(ranks)
