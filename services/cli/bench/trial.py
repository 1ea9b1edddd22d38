"""How is one server measured, round after round?"""

from dataclasses import dataclass
from typing import Any, Final

from baton.cli.bench.latencies import Objective, medians, summarise
from baton.cli.bench.load import LoadGenerator, LoadOutcome
from baton.cli.bench.probe import NotMeasurable, model_of, writer_for
from baton.cli.bench.stream_client import ServerAddress
from baton.cli.bench.workload import ArrivalProcess, PromptForm, Workload, Writer, make_asks, schedule

WARM_UP: Final = -2
"""The turn of the requests that come before the measured ones."""
FAILURES_TOLD: Final = 10


@dataclass(frozen=True, slots=True)
class Closed:
    """So many requests at a time."""

    concurrency: int

    def described(self) -> dict[str, Any]:
        return {"concurrency": self.concurrency}


@dataclass(frozen=True, slots=True)
class Open:
    """So many requests a second."""

    rate: float
    arrivals: ArrivalProcess
    in_flight_max: int

    def described(self) -> dict[str, Any]:
        return {"rate": self.rate, "arrivals": self.arrivals.value, "in_flight_max": self.in_flight_max}


class Trial:
    """One server that answers one workload. Made by `begin`, closed by whoever made it."""

    def __init__(self, load: LoadGenerator, workload: Workload, writer: Writer) -> None:
        self._load = load
        self._workload = workload
        self.writer = writer

    @classmethod
    async def begin(
        cls,
        server: ServerAddress,
        workload: Workload,
        *,
        model: str = "",
        prompts: PromptForm | None = None,
        ignore_eos: bool = True,
        timeout_s: float = 600.0,
    ) -> "Trial":
        """Find out how the server takes prompts. Raises NotMeasurable."""
        load = LoadGenerator(server, workload.endpoint.path, timeout_s)
        try:
            name = model or model_of(server)
            return cls(load, workload, await writer_for(load, workload, name, prompts, ignore_eos=ignore_eos))
        except BaseException:
            load.close()
            raise

    async def warm_up(self, requests: int, concurrency: int, turn: int = WARM_UP) -> None:
        await self._load.closed(make_asks(self._workload, self.writer, requests, turn), concurrency)

    async def round(
        self, pace: Closed | Open, requests: int, turn: int, objective: Objective
    ) -> dict[str, Any]:
        """Raises NotMeasurable if nothing was answered."""
        outcome = await self._outcome(pace, requests, turn)
        if not outcome.answers:
            raise NotMeasurable(f"no request was answered: {outcome.failures[0]}")
        told = summarise(outcome, objective)
        if outcome.failures:
            told["failures"] = sorted(set(outcome.failures))[:FAILURES_TOLD]
        return told

    async def _outcome(self, pace: Closed | Open, requests: int, turn: int) -> LoadOutcome:
        asks = make_asks(self._workload, self.writer, requests, turn)
        match pace:
            case Closed(concurrency):
                return await self._load.closed(asks, concurrency)
            case Open(rate, arrivals, in_flight_max):
                timed = schedule(asks, rate, arrivals, self._workload.seed, turn)
                return await self._load.open(timed, in_flight_max)

    def close(self) -> None:
        self._load.close()


async def measure(
    server: ServerAddress,
    workload: Workload,
    pace: Closed | Open,
    objective: Objective,
    *,
    requests: int,
    repeats: int,
    warm_up: int,
    model: str,
    prompts: PromptForm | None,
    ignore_eos: bool,
    timeout_s: float,
) -> dict[str, Any]:
    """What `baton bench serve` prints. Raises NotMeasurable."""
    trial = await Trial.begin(
        server, workload, model=model, prompts=prompts, ignore_eos=ignore_eos, timeout_s=timeout_s
    )
    try:
        concurrency = pace.concurrency if isinstance(pace, Closed) else 1
        await trial.warm_up(warm_up, concurrency)
        rounds = [await trial.round(pace, requests, turn, objective) for turn in range(repeats)]
    finally:
        trial.close()
    return {
        "benchmark": "serve",
        "url": server.url,
        **trial.writer.described(),
        **workload.described(),
        **pace.described(),
        "requests": requests,
        "repeats": repeats,
        "warm_up": warm_up,
        **({"objective": objective.described()} if objective.asked else {}),
        "median": medians(rounds),
        "rounds": rounds,
    }
