"""What becomes of the requests of a trace, each asked when the trace says, and of those that are refused?

Whatever has become of those before it, a request is sent in its time. One that is refused with 429 or 503
is asked again as soon as the server's `Retry-After` allows it, by a client that obeys; its time counts from
when it was due, so that what it waits between two refusals is part of its wait.
"""

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from baton.cli.bench.answers import REFUSALS, Answer, AnswerFailed, error_text, understand
from baton.cli.bench.counters import counted_since, counts
from baton.cli.bench.latencies import Objective, spread, summarise
from baton.cli.bench.lengths import Lengths
from baton.cli.bench.load import LoadGenerator, LoadOutcome, undisturbed
from baton.cli.bench.probe import NotMeasurable, model_of, writer_for
from baton.cli.bench.stream_client import ConnectionPool, Reply, ServerAddress, ServerBroke
from baton.cli.bench.traces import Replay
from baton.cli.bench.workload import ApiEndpoint, Ask, PromptForm, Workload, make_asks
from baton.runtime.serve import allow_open_files

WATCHED: Final = {
    "baton_rooms_failed_total": "rooms_failed",
    "baton_request_retries_total": "retries",
    "baton_rooms_retracted_total": "retractions",
}
"""Counters of a bootstrap, each by what it is told as; another server's are not there."""
CLASS: Final = re.compile(r"(-?\d{1,9})(?:@(\d{1,5}))?", re.ASCII)
PROBE: Final = Lengths.parse("16"), Lengths.parse("2")
WARM_UP: Final = -2
FAILURES_TOLD: Final = 10


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """How a trace is asked."""

    replay: Replay
    in_flight_max: int
    """Requests at a time, those that wait for another try among them; more wait in this client."""
    obeys: bool
    """`Retry-After`: a refused request is asked again. If not, its refusal is its answer."""
    classes: Mapping[int, int]
    """Values of `priority`, each with its weight; none: it is not said."""
    warm_up: int
    vocabulary: int
    seed: int
    timeout_s: float
    """Longest that a request may take, its waits between tries included."""


@dataclass(slots=True)
class Fate:
    """Of one request."""

    priority: int | None = None
    refusals: list[float | None] = field(default_factory=list)
    """After how many seconds it was to come again; None: the server did not say."""
    due: float = 0.0
    reply: Reply | None = None
    """The last."""
    failure: str = ""
    """Why there is none."""
    answer: Answer | None = None

    @property
    def status(self) -> str:
        if self.reply is None:
            return "no answer"
        broken = self.reply.status == 200 and self.answer is None
        return "broken" if broken else str(self.reply.status)

    def understand(self) -> None:
        """What it was told in the end."""
        if self.reply is None:
            return
        try:
            self.answer = understand(self.reply, self.due)
        except AnswerFailed as error:
            self.failure = str(error)


class Replayer:
    """Asks one server."""

    def __init__(self, server: ServerAddress, path: str, plan: ReplayPlan) -> None:
        self._server = server
        self._path = path
        self._plan = plan
        self._connections = ConnectionPool(server)

    async def replay(self, asks: Sequence[tuple[Ask, Fate]]) -> LoadOutcome:
        """By each one's `at_s`. Fills in the fates."""
        places = asyncio.Semaphore(self._plan.in_flight_max)
        with undisturbed() as outcome:
            started = time.perf_counter()

            async def one(ask: Ask, fate: Fate) -> None:
                try:
                    await self._ask(ask, fate)
                finally:
                    places.release()

            async with asyncio.TaskGroup() as group:
                for ask, fate in asks:
                    fate.due = started + ask.at_s
                    await asyncio.sleep(max(0.0, fate.due - time.perf_counter()))
                    await places.acquire()
                    group.create_task(one(ask, fate))
        for _, fate in asks:
            fate.understand()
            outcome.refused += len(fate.refusals)
            if fate.answer is not None:
                outcome.answers.append(fate.answer)
            else:
                outcome.failures.append(fate.failure)
        return outcome

    def close(self) -> None:
        self._connections.close()

    async def _ask(self, ask: Ask, fate: Fate) -> None:
        """Never raises: a failed request is part of the result."""
        request = self._server.post(self._path, ask.body)
        ends = time.perf_counter() + self._plan.timeout_s
        try:
            async with asyncio.timeout(self._plan.timeout_s):
                while True:
                    fate.reply = await self._connections.ask(request)
                    if fate.reply.status not in REFUSALS:
                        return
                    wait_s = fate.reply.retry_after_s
                    fate.refusals.append(wait_s)
                    fate.failure = f"HTTP {fate.reply.status}: {error_text(fate.reply.body)}"
                    if not self._plan.obeys or wait_s is None or time.perf_counter() + wait_s >= ends:
                        return
                    await asyncio.sleep(wait_s)
        except ServerBroke as error:
            fate.reply, fate.failure = None, str(error)
        except TimeoutError:
            fate.reply, fate.failure = None, f"no whole answer within {self._plan.timeout_s:g} s"


async def measure(
    server: ServerAddress,
    plan: ReplayPlan,
    objective: Objective,
    *,
    endpoint: ApiEndpoint,
    model: str,
    prompts: PromptForm | None,
    ignore_eos: bool,
) -> dict[str, Any]:
    """What `baton bench serve --trace` prints beside the trace's name. Raises NotMeasurable."""
    allow_open_files()
    workload = Workload(*PROBE, vocabulary=plan.vocabulary, seed=plan.seed, endpoint=endpoint)
    load = LoadGenerator(server, endpoint.path, plan.timeout_s)
    replayer = Replayer(server, endpoint.path, plan)
    try:
        writer = await writer_for(load, workload, model or model_of(server), prompts, ignore_eos=ignore_eos)
        await load.closed(make_asks(workload, writer, plan.warm_up, WARM_UP), 1)
        asks = []
        for place, priority in enumerate(_priorities(plan)):
            asked = plan.replay.requests[place]
            pieces = plan.replay.prompt(place, plan.vocabulary, plan.seed)
            body = writer.body(pieces, asked.output_tokens, priority)
            asks.append((Ask(body, asked.at_s), Fate(priority)))
        before = await asyncio.to_thread(_counts, server)
        outcome = await replayer.replay(asks)
        after = await asyncio.to_thread(_counts, server)
    finally:
        load.close()
        replayer.close()
    fates = [fate for _, fate in asks]
    return {
        "url": server.url,
        **writer.described(),
        "endpoint": endpoint.path,
        "seed": plan.seed,
        "in_flight_max": plan.in_flight_max,
        **({"objective": objective.described()} if objective.asked else {}),
        "shortened": plan.replay.shortened,
        "statuses": dict(sorted(Counter(fate.status for fate in fates).items())),
        **summarise(outcome, objective),
        "refusals": told_refusals(fates, plan.obeys),
        "by_priority": told_classes(fates, objective) if plan.classes else {},
        "server": counted_since(before, after),
        "failures": sorted(set(outcome.failures))[:FAILURES_TOLD],
    }


def told_refusals(fates: Sequence[Fate], obeyed: bool) -> dict[str, Any]:
    """Whether the server said when to come again, and whether those who came then were served."""
    refused = [fate for fate in fates if fate.refusals]
    waits = [wait_s for fate in refused for wait_s in fate.refusals]
    return {
        "times": len(waits),
        "requests": len(refused),
        "without_retry_after": waits.count(None),
        "retry_after_ms": spread([wait for wait in waits if wait is not None]),
        "obeyed": obeyed,
        "served_in_the_end": sum(fate.answer is not None for fate in refused),
    }


def told_classes(fates: Sequence[Fate], objective: Objective) -> dict[str, Any]:
    """By `priority`: how long its requests waited for their first token, and how many kept the objective."""
    told = {}
    for priority in sorted({fate.priority for fate in fates if fate.priority is not None}):
        of_it = [fate for fate in fates if fate.priority == priority]
        answers = [fate.answer for fate in of_it if fate.answer is not None]
        told[str(priority)] = {
            "requests": len(of_it),
            "answered": len(answers),
            "refused": sum(len(fate.refusals) for fate in of_it),
            "ttft_ms": spread([each.ttft_s for each in answers]),
            "end_to_end_ms": spread([each.ended - each.due for each in answers]),
        }
        if objective.asked:
            told[str(priority)]["good_share"] = round(sum(map(objective.met, answers)) / len(of_it), 4)
    return told


def parse_classes(text: str) -> dict[int, int]:
    """Values of `priority` with their weights, such as 0@3,10; none of an empty text. Raises ValueError."""
    told: dict[int, int] = {}
    for each in filter(None, text.split(",")):
        match = CLASS.fullmatch(each.strip())
        if match is None or int(match[2] or 1) < 1:
            raise ValueError(f"{text!r}: classes have to be like 0,10 or 0@3,10")
        told[int(match[1])] = int(match[2] or 1)
    return told


def _priorities(plan: ReplayPlan) -> Iterator[int | None]:
    """Of each request, the same for the same seed."""
    rng = random.Random(f"{plan.seed} priorities")  # noqa: S311
    for _ in plan.replay.requests:
        yield rng.choices(list(plan.classes), list(plan.classes.values()))[0] if plan.classes else None


def _counts(server: ServerAddress) -> dict[str, float]:
    """Nothing where the server does not tell."""
    try:
        return counts(server, WATCHED)
    except NotMeasurable:
        return {}
