"""Simulated clients: their requests, their answers, and whether these are the model's."""

import asyncio
import random
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from baton.api.backend import Hangup, NoWorker, Overloaded, RoomFailed
from baton.rooms.choice_pages import longest_of
from baton.rooms.errors import Cause, Reason
from baton.rooms.request import Request, Sampling, TokenBatch
from tests.sim.bootstrap import QUEUE_MS, SimulatedBootstrap
from tests.sim.checks import broken_by, explained
from tests.sim.engine import PAGE_TOKENS, REPEATS, VOCABULARY, answer
from tests.sim.platform import Platform
from tests.sim.profile import Profile
from tests.sim.rank import World

END_S: Final = 75.0
"""Time in which every client's request ends, whatever happens, seconds: the queue's timeout, the request's,
and a margin."""
QUEUE_FULL: Final = "the queue for workers is full"
TRIES: Final = 8
SOON_S: Final = (0.0, 0.2)
"""Shortest and longest pause of a client that resumes its stream, in seconds."""
LATER_S: Final = (0.5, 2.0)
"""The same for one that was turned away."""
TENANTS: Final = (b"one", b"one", b"another")
"""Tenants of the clients. Requests of several classes wait in the share of each."""
TURNED_AWAY: Final = frozenset({"overloaded", "no worker", "bootstrap gone"})


@dataclass(slots=True)
class Client:
    request: Request
    hang_up_s: float | None = None
    """Time at which the client hangs up, in seconds."""
    enough: int | None = None
    """Number of tokens after which the client stops reading."""
    cancel_s: float | None = None
    """Time at which its room is cancelled by number, in seconds."""
    outputs: dict[int, list[int]] = field(default_factory=dict)
    """Tokens of each choice."""
    outcome: str = ""
    resumes: bool = False
    """Whether its bootstrap died while it served the request."""
    _right: dict[int, list[int]] = field(default_factory=dict)

    def right(self, choice: int) -> list[int]:
        """Return the model's whole answer."""
        if choice not in self._right:
            self._right[choice] = answer(self.request.choice(choice))
        return self._right[choice]

    def has_enough(self, choice: int) -> bool:
        """Return whether the reader has enough of this choice. Some readers wait for the end."""
        several = self.request.choices > 1
        read = len(self.outputs.get(choice, ()))
        return self.enough is not None and read >= self.enough and (not several or choice % 2 == 1)


class Clients:
    def __init__(self, world: World, platform: Platform, seed: str, rooms: int) -> None:
        self._world = world
        self._platform = platform
        self._random = random.Random(f"{seed}/clients")
        self.outcomes: Counter[str] = Counter()
        self.clients = [self._client(number) for number in range(rooms)]
        self._connections: dict[asyncio.Future[str], None] = {}
        """Future of each connection's end, for ends other than its answer."""

    def _client(self, number: int) -> Client:
        draw, troubles = self._random, self._world.shape.troubles
        request = make_request(draw, number, self._world.shape)
        client = Client(request)
        if draw.random() < troubles.hangup_share:
            if draw.random() < 0.5:
                client.hang_up_s = draw.uniform(0.0, 0.3)
            else:
                client.enough = draw.randint(1, request.max_tokens)
        if draw.random() < troubles.cancel_share:
            client.cancel_s = draw.uniform(0.0, 0.2)
        return client

    async def run(self) -> None:
        """Run all clients, each at its time, until the last one ends."""
        loop, shape = self._world.loop, self._world.shape
        times = sorted(self._random.uniform(0.0, shape.arrivals_s) for _ in self.clients)
        start_s = loop.time()
        tasks = []
        for client, at_s in zip(self.clients, times, strict=True):
            await asyncio.sleep(start_s + at_s - loop.time())
            tasks.append(loop.create_task(self._serve(client)))
        for task in tasks:
            await task

    def storm(self) -> None:
        """Let most of the waiting clients hang up at once."""
        for left in list(self._connections):
            if self._random.random() < 0.7:
                _leave(left, "hung up")

    async def ask(self, bootstrap: SimulatedBootstrap, client: Client) -> None:
        """Serve one request in the bootstrap's process, as the HTTP API's handler does."""
        began_s = self._world.loop.time()
        try:
            stream = await bootstrap.backend.generate(replace(client.request, resumes=client.resumes))
        except Overloaded:
            client.outcome = "overloaded"
            return
        except NoWorker as error:
            client.outcome = "no worker"
            self._explain("no worker", str(error))
            return
        try:
            going = set(range(client.request.choices))
            while going:
                batch = await stream.next()
                self._got(client, batch, going)
                if batch.finish is not None:
                    going.discard(batch.choice)
                elif client.has_enough(batch.choice):
                    going.discard(batch.choice)
                    if not going:
                        await stream.hang_up(Hangup.STOP_STRING)
                        client.outcome = "had enough"
                        return
                    stream.end_choice(batch.choice)
            client.outcome = "answered"
        except Overloaded as error:
            client.outcome = "overloaded"
            waited_s = self._world.loop.time() - began_s
            if waited_s < QUEUE_MS / 1000 and QUEUE_FULL not in str(error):
                text = (
                    f"a client was refused {waited_s:.3f} s after it came, since a worker was full: {error}"
                )
                self._world.trace.violate(self._world.loop.time(), "full-is-no-failure", text)
        except NoWorker as error:
            client.outcome = "no worker"
            self._explain("no worker", str(error))
        except RoomFailed as error:
            client.outcome = error.reason.value
            self._explain(client.outcome, str(error))
        except BaseException:
            await asyncio.shield(stream.hang_up(Hangup.CLIENT_GONE))
            raise

    # ---- inside

    async def _serve(self, client: Client) -> None:
        """Try the client's request until it ends. A refused client comes back up to TRIES times."""
        for _ in range(TRIES):
            await self._platform.bootstrap_up.wait()
            await self._try(client)
            if client.outcome not in TURNED_AWAY:
                break
            client.resumes = client.outcome == "bootstrap gone" and self._world.shape.orphan_ms > 0
            self.outcomes[f"{client.outcome}, for now"] += 1
            await asyncio.sleep(self._random.uniform(*(SOON_S if client.resumes else LATER_S)))
        self.outcomes[client.outcome] += 1
        self._world.trace.note(
            self._world.loop.time(), "client", client.outcome, 0, client.request.request_id
        )

    async def _try(self, client: Client) -> None:
        client.outputs.clear()
        try:
            async with asyncio.timeout(END_S):
                await self._connection(client, self._bootstrap())
        except TimeoutError:
            client.outcome = "never ended"
            text = f"request {client.request.request_id} had no end in {END_S:g} s"
            self._world.trace.violate(self._world.loop.time(), "room-ends", text)

    def _bootstrap(self) -> SimulatedBootstrap:
        """Return the bootstrap for the next request: one of those that run, as the kernel picks one."""
        living = self._platform.living()
        return self._random.choice(living) if len(living) > 1 else (*living, self._platform.bootstrap)[0]

    async def _connection(self, client: Client, bootstrap: SimulatedBootstrap) -> None:
        """Follow one try until the answer is whole, the client hangs up, or the bootstrap is gone."""
        loop, process = self._world.loop, bootstrap.process
        asking = process.spawn(self.ask(bootstrap, client))
        left: asyncio.Future[str] = loop.create_future()
        asking.add_done_callback(lambda _: _leave(left, ""))
        gone = partial(_leave, left, "bootstrap gone")
        process.on_death.append(gone)
        self._connections[left] = None
        if client.hang_up_s is not None:
            loop.call_later(client.hang_up_s, _leave, left, "hung up")
        if client.cancel_s is not None:
            loop.call_later(client.cancel_s, process.soon, self._cancel, bootstrap, client)
        try:
            outcome = await left
        finally:
            del self._connections[left]
            process.on_death.remove(gone)
        if outcome:
            client.outcome = outcome
            process.soon(asking.cancel)
            return
        if (error := asking.exception()) is not None:
            client.outcome = "broken"
            self._world.trace.violate(
                self._world.loop.time(), "moves-listed", f"the backend raised {error!r}"
            )

    def _cancel(self, bootstrap: SimulatedBootstrap, client: Client) -> None:
        """Cancel a room like the gRPC API's CancelRoom."""
        for entry in bootstrap.registry.find(client.request.request_id)[:1]:
            self._world.trace.fault(self._world.loop.time(), "cancel")
            bootstrap.rooms.fail(entry.id, Cause(Reason.CANCELLED, "cancelled"))

    def _got(self, client: Client, batch: TokenBatch, going: Set[int]) -> None:
        request, choice, now_s = client.request, batch.choice, self._world.loop.time()
        output = client.outputs.setdefault(choice, [])
        tokens = [token.id for token in batch.tokens]
        output.extend(tokens)
        right, count, whole = client.right(choice), len(output), batch.finish is not None
        of_choice = f"choice {choice} of " if request.choices > 1 else ""
        self._world.trace.note(now_s, "client", "tokens", 0, f"{of_choice}{request.request_id} {tokens}")
        if choice not in going:
            text = f"choice {choice} of request {request.request_id} goes on behind its end"
            self._world.trace.violate(now_s, "choices-end-alone", text)
        if output != right[:count] or (whole and count != len(right)):
            broken = "own-draws" if request.choices > 1 else "stale-never-served"
            text = f"{of_choice}request {request.request_id} got {output}, the model says {right}"
            self._world.trace.violate(now_s, broken, text)

    def _explain(self, reason: str, text: str) -> None:
        if not explained(reason, self._world.trace.faults):
            self._world.trace.violate(
                self._world.loop.time(),
                broken_by(reason, self._world.trace.faults),
                f"a client was told {reason} ({text}), and nothing that happened explains it",
            )


def _leave(left: "asyncio.Future[str]", why: str) -> None:
    if not left.done():
        left.set_result(why)


def make_request(draw: random.Random, number: int, shape: Profile) -> Request:
    """Prompts that share beginnings, some of them all but the end, and request ids that are used again and
    again."""
    longest = min(28, shape.pages * 4 - 10)
    length = draw.choice((1, 3, 4, 5, 8, 11, 16, longest))
    prompt = tuple(draw.randrange(VOCABULARY) for _ in range(min(length, longest)))
    if draw.random() < shape.alike:
        prompt = (1, 2, 3, 4, 5, 6, 7, 8, *prompt)[:longest]
        if shape.alike > 0.2:
            branch = draw.randrange(3)
            stem = tuple(range(branch, branch + draw.choice((4, 8, 12, 16, 20))))
            prompt = (*prompt[:8], *stem, *prompt[8:])[: draw.choice((longest, len(prompt)))]
    if shape.drafts_by and draw.random() < 0.8:
        prompt = (REPEATS, *prompt[1:])
    max_tokens = draw.choice(shape.outputs)
    name = f"r{number % 5}" if draw.random() < 0.1 else f"request-{number}"
    asked = Request(
        name,
        prompt,
        max_tokens,
        ignore_eos=True,
        sampling=Sampling(temperature=0.0, seed=number + 1),
        priority=shape.classes[number % len(shape.classes)],
        tenant=TENANTS[number % len(TENANTS)] if len(shape.classes) > 1 else b"",
    )
    if shape.several and draw.random() < shape.several:
        return _several(draw, asked, shape)
    return _that_fits(asked, shape)


def _that_fits(asked: Request, shape: Profile) -> Request:
    """Return a prompt that fits an otherwise empty decode worker's cache."""
    prompt_tokens = len(asked.prompt)
    longest = longest_of(prompt_tokens, asked.choices, shape.pages * PAGE_TOKENS, shape.decode_page_tokens)
    return replace(asked, max_tokens=min(asked.max_tokens, longest - prompt_tokens + 1))


def _several(draw: random.Random, asked: Request, shape: Profile) -> Request:
    """Several choices of it, of which one or another is stopped by a token of its own."""
    seeds = tuple(draw.getrandbits(64) for _ in range(draw.choice((1, 2, 3))))
    sampling = replace(asked.sampling, temperature=1.0)
    asked = _that_fits(replace(asked, sampling=sampling, further_seeds=seeds), shape)
    output = answer(asked.choice(draw.randrange(asked.choices)))
    return replace(asked, stop_token_ids=(draw.choice(output),))
