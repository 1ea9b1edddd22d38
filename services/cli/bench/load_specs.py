"""What is every system of a comparison asked? A table of its TOML file, read and made ready."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from baton.cli.bench.latencies import Objective
from baton.cli.bench.lengths import Lengths
from baton.cli.bench.replay import ReplayPlan, parse_classes
from baton.cli.bench.traces import read_trace, replayed
from baton.cli.bench.workload import IN_FLIGHT_MAX, PromptForm, Workload
from baton.runtime.errors import SettingsError

CLOSED: Final = "<closed>"
REPLAYED: Final = "<replayed>"
KINDS: Final = frozenset({CLOSED, REPLAYED})
"""Of a load: no words of the file, which has a `trace` or not."""


def _lengths(text: str) -> str:
    Lengths.parse(text)
    return text


def _classes(text: str) -> str:
    parse_classes(text)
    return text


Count = Annotated[int, Field(ge=1, le=100_000)]
Seconds = Annotated[float, Field(gt=0, le=7200)]
Scale = Annotated[float, Field(ge=0, le=1000)]
Limit = Annotated[float, Field(gt=0)] | None
LengthsText = Annotated[str, AfterValidator(_lengths)]
ClassesText = Annotated[str, AfterValidator(_classes)]


class Level(NamedTuple):
    """What one row of figures is of."""

    load: str
    """Its title."""
    concurrency: int | None = None
    """None of a trace."""

    @property
    def told(self) -> str:
        return self.load + ("" if self.concurrency is None else f", {self.concurrency} at a time")

    def described(self) -> dict[str, Any]:
        return {key: value for key, value in self._asdict().items() if value is not None}


class TomlTable(BaseModel):
    """Of the file; an unknown word in it is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class LoadSpec(TomlTable):
    """What all kinds of loads have."""

    name: str = ""
    """Default: what tells it from others."""
    prompts: PromptForm = PromptForm.IDS
    vocabulary: Annotated[int, Field(ge=200)] = 32_000
    seed: int = 0
    warm_up: Annotated[int, Field(ge=0, le=1000)] = 2
    rounds: Count = 5
    """One of fewer rounds than others has no part in the last ones."""
    timeout_s: Seconds = 300
    ttft_slo_ms: Limit = None
    tpot_slo_ms: Limit = None
    itl_slo_ms: Limit = None

    @property
    def objective(self) -> Objective:
        return Objective(self.ttft_slo_ms, self.tpot_slo_ms, self.itl_slo_ms)

    def _measured(self) -> str:
        limits = self.objective.described().items()
        kept = ", ".join(
            f"{name.removesuffix('_ms').upper()} of {limit:g} ms at most" for name, limit in limits
        )
        return f"{self.rounds} rounds" + (f"; goodput is of requests with a {kept}" if kept else "")


class ClosedLoad(LoadSpec):
    """So many requests at a time, each anew as soon as one was answered."""

    prompt_tokens: LengthsText = "512"
    output_tokens: LengthsText = "64"
    shared_prefix: Annotated[float, Field(ge=0, le=1)] = 0
    concurrency: tuple[Count, ...] = Field(default=(1, 4, 8), min_length=1)
    requests: tuple[Count, ...] = (4, 8, 16)

    @model_validator(mode="after")
    def _as_many(self) -> "ClosedLoad":
        if len(self.requests) != len(self.concurrency):
            raise ValueError("requests has one number for each of concurrency")
        if any(asks < at_a_time for asks, at_a_time in zip(self.requests, self.concurrency, strict=True)):
            raise ValueError("requests has at least as many as are to be at a time")
        return self

    @property
    def title(self) -> str:
        return self.name or f"{self.prompt_tokens}/{self.output_tokens}"

    @property
    def levels(self) -> tuple[Level, ...]:
        return tuple(Level(self.title, each) for each in self.concurrency)

    def sentence(self) -> str:
        """How it is told to readers."""
        lengths = f"prompts of {self.prompt_tokens} tokens, {self.output_tokens} tokens out"
        return f"{self.title}: {lengths}, {self._measured()}"


class TraceLoad(LoadSpec):
    """What a recorded trace asks, when it asks it."""

    trace: Path
    """From the file's folder."""
    requests: Count | None = None
    time_scale: Scale = 1
    length_scale: Scale = 1
    tokens_max: Annotated[int, Field(ge=2)] | None = None
    priorities: ClassesText = ""
    obey_retry_after: bool = True
    in_flight_max: Annotated[int, Field(ge=1, le=65_536)] = IN_FLIGHT_MAX

    @property
    def title(self) -> str:
        return self.name or self.trace.stem

    @property
    def levels(self) -> tuple[Level, ...]:
        return (Level(self.title),)

    def sentence(self) -> str:
        """How it is told to readers."""
        taken = "all" if self.requests is None else f"the first {self.requests}"
        return (
            f"{self.title}: {taken} requests of {self.trace.name}, times multiplied by {self.time_scale:g}, "
            f"lengths by {self.length_scale:g}, {self._measured()}"
        )


def _kind(table: Any) -> str:
    traced = isinstance(table, TraceLoad) or (isinstance(table, Mapping) and "trace" in table)
    return REPLAYED if traced else CLOSED


Load = Annotated[
    Annotated[ClosedLoad, Tag(CLOSED)] | Annotated[TraceLoad, Tag(REPLAYED)], Discriminator(_kind)
]


@dataclass(frozen=True, slots=True)
class PlannedClosed:
    """Ready to be asked."""

    spec: ClosedLoad
    workload: Workload


@dataclass(frozen=True, slots=True)
class PlannedTrace:
    """Ready to be asked."""

    spec: TraceLoad
    plan: ReplayPlan

    def of_round(self, number: int) -> ReplayPlan:
        """With prompts of its own: a prefix cache knows none of an earlier round."""
        return replace(self.plan, seed=self.plan.seed + number)


PlannedLoad = PlannedClosed | PlannedTrace


def planned(load: ClosedLoad | TraceLoad, folder: Path) -> PlannedLoad:
    """With its trace read. Raises SettingsError, which names the load."""
    if isinstance(load, ClosedLoad):
        lengths = Lengths.parse(load.prompt_tokens), Lengths.parse(load.output_tokens)
        workload = Workload(*lengths, load.shared_prefix, vocabulary=load.vocabulary, seed=load.seed)
        return PlannedClosed(load, workload)
    trace = read_trace(folder / load.trace, load.requests)
    if load.requests is not None and len(trace) < load.requests:
        raise SettingsError(
            f"load {load.title}: {load.requests} requests of {load.trace}, which has {len(trace)}"
        )
    plan = ReplayPlan(
        replayed(trace, load.time_scale, load.length_scale, load.tokens_max),
        load.in_flight_max,
        load.obey_retry_after,
        parse_classes(load.priorities),
        load.warm_up,
        load.vocabulary,
        load.seed,
        load.timeout_s,
    )
    return PlannedTrace(load, plan)
