"""Start times of a request's stages, from its room's timeline and the client's clock.

All processes run on one host and use its monotonic clock.
"""

import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import httpx

from baton.fleet.room_entry import RoomPhase
from baton.rooms.phases import Side
from baton.rooms.timeline import BOOTSTRAP, Moment

REQUEST_S: Final = 300.0
FILED_S: Final = 10.0
POLL_S: Final = 0.02
WARM_UP: Final = 3
TOKENS: Final = range(1000, 20_000)
"""Token ids of prompts. They are words in any vocabulary."""
SEALED: Final = re.compile(r"(\d+) bytes in (\d+) us, (\d+) us of them beside steps")

PREFILL, DECODE = Side.PREFILL.value, Side.DECODE.value
Mark: TypeAlias = tuple[str, str]
"""Observer and event: a `Moment`, or an event of the client."""
SENT: Final[Mark] = ("client", "sent")
FIRST: Final[Mark] = ("client", "first token")
SECOND: Final[Mark] = ("client", "second token")
LAST: Final[Mark] = ("client", "end")

STAGES: Final[Mapping[str, tuple[Mark, Mark]]] = {
    "router in: parsed, rendered, placed": (SENT, (BOOTSTRAP, Moment.OPENED)),
    "prefill accepts": ((BOOTSTRAP, Moment.OPENED), (PREFILL, Moment.ACCEPTED)),
    "decode accepts, beside that": ((BOOTSTRAP, Moment.OPENED), (DECODE, Moment.ACCEPTED)),
    "decode grants": ((DECODE, Moment.ACCEPTED), (DECODE, Moment.GRANTED)),
    "prefill hears where": ((DECODE, Moment.GRANTED), (PREFILL, Moment.DESTINATION_KNOWN)),
    "prefill's queue": ((PREFILL, Moment.DESTINATION_KNOWN), (PREFILL, Moment.COMPUTING)),
    "compute": ((PREFILL, Moment.COMPUTING), (PREFILL, Moment.FIRST_TOKEN)),
    "first token to the router": ((PREFILL, Moment.FIRST_TOKEN), (BOOTSTRAP, Moment.FIRST_TOKEN_PASSED_ON)),
    "first token to the client": ((BOOTSTRAP, Moment.FIRST_TOKEN_PASSED_ON), FIRST),
    "transfer behind compute, record, seal": ((PREFILL, Moment.FIRST_TOKEN), (PREFILL, Moment.SEALED)),
    "the seal is seen": ((PREFILL, Moment.SEALED), (DECODE, Moment.LANDED)),
    "admission": ((DECODE, Moment.LANDED), (DECODE, Moment.ADMITTED)),
    "first decode step, to the client": ((DECODE, Moment.ADMITTED), SECOND),
    "further steps": (SECOND, LAST),
    "end of the stream": ((DECODE, Moment.FINISHED), LAST),
    "whole request": (SENT, LAST),
}


@dataclass(frozen=True, slots=True)
class RoomTimes:
    at_us: Mapping[Mark, int]
    """Microseconds of the first occurrence of each mark."""
    chunks: int
    length: int
    """Bytes written to the decode worker."""
    transfer_us: int
    hidden_us: int
    """Microseconds of the transfer during which a step ran."""

    def between(self, begin: Mark, end: Mark) -> float:
        return self.at_us[end] - self.at_us[begin]

    @property
    def handover_us(self) -> float:
        return self.between((BOOTSTRAP, Moment.OPENED), (DECODE, Moment.ADMITTED))

    @property
    def compute_us(self) -> float:
        return self.between((PREFILL, Moment.COMPUTING), (PREFILL, Moment.FIRST_TOKEN))


def measure_rooms(url: str, runs: int, prompt_tokens: int, output_tokens: int) -> list[RoomTimes]:
    """Send requests one after the other and return their times."""
    words = random.Random(time.monotonic_ns())  # noqa: S311 prompts that no cache has seen
    measured: list[RoomTimes] = []
    with httpx.Client(base_url=url, timeout=REQUEST_S, trust_env=False) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        for run in range(WARM_UP + runs):
            name = f"bench-{time.monotonic_ns()}"
            body = {
                "model": model,
                "prompt": words.choices(TOKENS, k=prompt_tokens),
                "max_tokens": output_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            seen = _ask(client, name, body)
            room = filed_room(client, name)
            if run >= WARM_UP:
                measured.append(times_of(seen, room))
    return measured


def _ask(client: httpx.Client, name: str, body: Mapping[str, Any]) -> dict[Mark, int]:
    arrived: list[int] = []
    seen = {SENT: now_us()}
    with client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": name}) as reply:
        if reply.status_code != httpx.codes.OK:
            reply.read()
            raise RuntimeError(f"HTTP {reply.status_code}: {reply.text[:500]}")
        arrived.extend(now_us() for line in reply.iter_lines() if line.startswith("data: {"))
    return {**seen, FIRST: arrived[0], SECOND: arrived[1], LAST: now_us()}


def filed_room(client: httpx.Client, name: str) -> Mapping[str, Any]:
    """Wait until both workers have reported the room retired, and return it."""
    deadline = time.monotonic() + FILED_S
    while True:
        rooms = client.get("/rooms", params={"request_id": name}).json()["rooms"]
        if rooms and rooms[0]["phase"] == RoomPhase.RETIRED.value:
            room: Mapping[str, Any] = client.get(f"/rooms/{rooms[0]['id']}").json()
            return room
        if time.monotonic() >= deadline:
            raise RuntimeError(f"no room of {name} is retired after {FILED_S:g} s: {rooms}")
        time.sleep(POLL_S)


def times_of(seen: Mapping[Mark, int], room: Mapping[str, Any]) -> RoomTimes:
    sides = {BOOTSTRAP: BOOTSTRAP, room["prefill"]: PREFILL, room["decode"]: DECODE}
    at_us, chunks, moved = dict(seen), 1, (0, 0, 0)
    for event in room["events"]:
        at_us.setdefault((sides[event["source"]], event["name"]), event["host_us"])
        chunks += event["name"] == Moment.CHUNK_COMPUTED
        found = SEALED.search(event["detail"])
        if found is not None:
            moved = (int(found[1]), int(found[2]), int(found[3]))
    return RoomTimes(at_us, chunks, *moved)


def now_us() -> int:
    return time.monotonic_ns() // 1000
