"""KV events of a worker in vLLM's format, over ZMQ: numbered batches, and a socket for replays.

External routers and indexers of prefix caches read them as those of a vLLM server. The first batch says that
nothing is cached. Blocks under a cache salt are not published: nobody outside knows the salts.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from hashlib import blake2b
from importlib.util import find_spec
from typing import Any, Final

from baton.ids import PageId
from baton.runtime.errors import StartupError
from baton.runtime.logging import Log

log = Log(__name__)

GATHER_S: Final = 0.05
"""Time in which events gather before they are sent as one batch, in seconds."""
BATCHES_MAX: Final = 10_000
"""Most batches that are remembered for replays, as in vLLM."""
EVENTS_MAX: Final = 100_000
"""Most events that wait for the next batch. Beyond that they are dropped, and a number is left out."""
RUN_MAX: Final = 256
"""Most blocks of one event. A prompt's blocks are stored together."""
HASH_BYTES: Final = 8
UNSALTED_ROOT: Final = -1
MEDIUM: Final = "GPU"
"""Name of the memory of an engine's own KV cache, whatever the device is."""
END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)
PACKAGES: Final = {"zmq": "pyzmq", "msgspec": "msgspec"}

Event = dict[str, Any]


class VllmKvEvents:
    """Changes of a prefix tree as vLLM's events. It is a `TreeListener`."""

    def __init__(self, block_tokens: int) -> None:
        """Make events that begin with an empty cache. `block_tokens`: tokens per block of the tree."""
        self._block_tokens = block_tokens
        self._hashes: dict[PageId, int] = {}
        self._last: PageId | None = None
        """Block that was stored last, if the last event may be continued by the block below it."""
        self.pending: list[Event] = [{"type": "AllBlocksCleared"}]
        self.dropped = 0
        """Number of times that more than EVENTS_MAX events were waiting, so that all of them were dropped."""
        self.changed = asyncio.Event()
        self.changed.set()

    def stored(self, parent: int, block: PageId, tokens: Sequence[int], start: int) -> None:
        above = None if parent == UNSALTED_ROOT else self._hashes.get(PageId(parent))
        if above is None and parent != UNSALTED_ROOT:
            return
        own = list(tokens[start : start + self._block_tokens])
        name = self._hashes[block] = _hash(above, own)
        run = self.pending[-1] if self._last == parent else None
        if run is not None and len(run["block_hashes"]) < RUN_MAX:
            run["block_hashes"].append(name)
            run["token_ids"].extend(own)
        else:
            self._add(
                {
                    "type": "BlockStored",
                    "block_hashes": [name],
                    "parent_block_hash": above,
                    "token_ids": own,
                    "block_size": self._block_tokens,
                    "lora_id": None,
                    "medium": MEDIUM,
                    "lora_name": None,
                }
            )
        self._last = block

    def hidden(self, block: PageId) -> None:
        name = self._hashes.pop(block, None)
        if name is not None:
            self._add({"type": "BlockRemoved", "block_hashes": [name], "medium": MEDIUM})

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        taken, self.pending, self._last = self.pending, [], None
        self.changed.clear()
        return taken

    def _add(self, event: Event) -> None:
        if len(self.pending) >= EVENTS_MAX:
            self.pending.clear()
            self.dropped += 1
        self._last = None
        self.pending.append(event)
        self.changed.set()


class KvEventPublisher:
    """Sockets that publish KV events, and answer requests for earlier batches."""

    def __init__(self, events: VllmKvEvents, endpoint: str, replay_endpoint: str, topic: str) -> None:
        """Open the sockets. `endpoint`: bound with a wildcard or an ipc path, otherwise connected to, as in
        vLLM. `replay_endpoint`: bound; empty for no replays. Raises StartupError."""
        missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
        if missing:
            raise StartupError(
                f"--kv-events-endpoint needs what is not installed: pip install {' '.join(missing)}"
            )
        import msgspec
        import zmq
        import zmq.asyncio

        self._events = events
        self._topic = topic.encode()
        self._encode = msgspec.msgpack.encode
        self._recent: deque[tuple[bytes, bytes]] = deque(maxlen=BATCHES_MAX)
        self._number = 0
        self._dropped = 0
        context = zmq.asyncio.Context.instance()
        self._publishing, self._replaying = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        try:
            if "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://"):
                self._publishing.bind(endpoint)
            else:
                self._publishing.connect(endpoint)
            if replay_endpoint:
                self._replaying.bind(replay_endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise StartupError(f"--kv-events-endpoint {endpoint} {replay_endpoint}: {error}") from error

    async def run(self) -> None:
        """Publish batches, and answer requests for replays, until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._publish())
                tasks.create_task(self._replay())
        except Exception as error:
            log.warning("KV events are published no more", cause=repr(error))
            raise

    def close(self) -> None:
        for each in (self._publishing, self._replaying):
            each.close(linger=0)

    async def _publish(self) -> None:
        while True:
            await self._events.changed.wait()
            await asyncio.sleep(GATHER_S)
            await self._send(self._events.take())

    async def _send(self, events: list[Event]) -> None:
        if self._events.dropped > self._dropped:
            self._number += 1  # readers notice the gap
            self._dropped = self._events.dropped
        batch = (self._number.to_bytes(8, "big"), self._encode([time.time(), events, 0]))
        self._number += 1
        self._recent.append(batch)
        await self._publishing.send_multipart((self._topic, *batch))

    async def _replay(self) -> None:
        while True:
            reader, *request = await self._replaying.recv_multipart()
            if len(request) != 2 or len(request[1]) != 8:
                log.debug("a request for earlier KV events has no number")
                continue
            for number, payload in [each for each in self._recent if each[0] >= request[1]]:
                await self._replaying.send_multipart((reader, b"", self._topic, number, payload))
            await self._replaying.send_multipart((reader, b"", b"", END_OF_REPLAY, b""))


def _hash(above: int | None, tokens: Sequence[int]) -> int:
    """Return the hash of a block: 64 bits over its tokens and its parent's hash."""
    text = f"{above}:{','.join(map(str, tokens))}".encode()
    return int.from_bytes(blake2b(text, digest_size=HASH_BYTES).digest(), "big")
