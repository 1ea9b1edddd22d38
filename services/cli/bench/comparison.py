"""Which systems are compared, under which loads, and what is wanted of it? Read from a TOML file.

    model = "demo"                      # prepared once; what follows has its directory as $MODEL_DIR,
                                        # and what it was made of, such as a GGUF file, as $MODEL_FILE

    [load]                              # or several, each as [[load]]: all are asked in every turn
    prompt_tokens = "512"               # as `baton bench serve` takes them
    output_tokens = "64"
    prompts = "ids"                     # or "text", where one of them takes no token ids
    concurrency = [1, 4, 8]
    requests = [4, 8, 16]               # of one round, for each concurrency
    warm_up = 2                         # requests before each round of a system
    rounds = 5                          # each system in turn, so often
    ttft_slo_ms = 2000                  # for goodput; tpot_slo_ms and itl_slo_ms as well

    [[load]]                            # a recorded trace, each request when it says
    trace = "traces/azure-conversation-2023.csv"              # beside the TOML file
    requests = 120                      # the first; default: all
    time_scale = 0.5                    # as `baton bench serve --trace` takes them
    length_scale = 0.125
    tokens_max = 1024
    priorities = "0@3,10"
    obey_retry_after = true             # of a 429 or a 503

    [[systems]]                         # the first is set against each of the others
    name = "Baton"
    url = "http://127.0.0.1:8000"
    start = ["baton", "serve", "--model", "${MODEL_DIR}"]     # none: it runs already
    ready = ["http://127.0.0.1:8000/ready"]                   # default: its /health
    ready_timeout_s = 600
    cpus = [0, 1]
    env = { OMP_NUM_THREADS = "1" }

    [[wanted]]
    against = "vLLM"
    measure = "ttft_ms.p50"
    load = ["512/64"]                   # by name; default: all
    concurrency = [1]                   # default: all, and traces
    at_most = 0.5                       # or at_least: the first system's value by the other's

Commands run in the file's folder, with this `baton` first on the PATH; `${NAME}` is of the environment.
"""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from baton.cli.bench.load_specs import KINDS, ClosedLoad, Level, Load, Seconds, TomlTable
from baton.cli.bench.measures import GOODPUT, MEASURES, Measure
from baton.runtime.errors import SettingsError

VARIABLE: Final = re.compile(r"\$\{(\w+)\}")
SYSTEMS_MAX: Final = 16
LOADS_MAX: Final = 32


class SystemSpec(TomlTable):
    """One system."""

    name: str
    url: str
    start: tuple[str, ...] = ()
    ready: tuple[str, ...] = ()
    ready_timeout_s: Seconds = 600
    cpus: tuple[int, ...] = ()
    env: Mapping[str, str] = {}
    about: str = ""
    """One sentence for readers of the table."""


class Wanted(TomlTable):
    """A limit on the first system's value divided by another's."""

    against: str
    measure: str
    load: tuple[str, ...] = ()
    concurrency: tuple[int, ...] = ()
    at_most: float | None = None
    at_least: float | None = None

    @model_validator(mode="after")
    def _limits(self) -> "Wanted":
        paths = [each.path for each in MEASURES]
        if self.measure not in paths:
            raise ValueError(f"measure {self.measure!r} is none of {', '.join(paths)}")
        if self.at_most is None and self.at_least is None:
            raise ValueError("a limit is missing: at_most or at_least")
        return self

    def of(self, level: Level) -> bool:
        """Whether it is said of this one."""
        by_load = not self.load or level.load in self.load
        return by_load and (not self.concurrency or level.concurrency in self.concurrency)

    def met(self, ours: float, theirs: float) -> bool:
        """By products: what another has none of cannot be divided by."""
        low, high = self.at_least, self.at_most
        return (high is None or ours <= high * theirs) and (low is None or ours >= low * theirs)


class Comparison(TomlTable):
    """The whole file."""

    model_config = ConfigDict(validate_by_name=True, validate_by_alias=True)

    systems: tuple[SystemSpec, ...] = Field(min_length=2, max_length=SYSTEMS_MAX)
    loads: tuple[Load, ...] = Field(
        default=(ClosedLoad(),), validation_alias="load", min_length=1, max_length=LOADS_MAX
    )
    wanted: tuple[Wanted, ...] = ()
    model: str = ""

    @field_validator("loads", mode="before")
    @classmethod
    def _several(cls, given: Any) -> Any:
        return (given,) if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _consistent(self) -> "Comparison":
        names = [each.name for each in self.systems]
        if len(set(names)) != len(names):
            raise ValueError(f"systems have different names, not {names}")
        titles = [each.title for each in self.loads]
        if len(set(titles)) != len(titles):
            raise ValueError(f"loads have different names, not {titles}")
        for each in self.wanted:
            if each.against not in names[1:]:
                raise ValueError(f"wanted.against {each.against!r} is none of {names[1:]}")
            if unknown := set(each.load) - set(titles):
                raise ValueError(f"wanted.load {min(unknown)!r} is none of {titles}")
            of = [level for level in self.levels if not each.load or level.load in each.load]
            if not set(each.concurrency) <= {level.concurrency for level in of}:
                raise ValueError(f"wanted.concurrency {each.concurrency} is not all measured")
            asked = {load.title for load in self.loads if load.objective.asked}
            if each.measure == GOODPUT.path and not asked >= {level.load for level in of if each.of(level)}:
                raise ValueError(f"wanted.measure {each.measure} is of loads with a ttft_slo_ms or the like")
        return self

    @property
    def levels(self) -> tuple[Level, ...]:
        """Of all loads."""
        return tuple(level for load in self.loads for level in load.levels)

    @property
    def measures(self) -> tuple[Measure, ...]:
        """Those that can be told: goodput where a load states what is good."""
        asked = any(load.objective.asked for load in self.loads)
        return tuple(each for each in MEASURES if asked or each is not GOODPUT)


def read_comparison(path: Path) -> Comparison:
    """Raises SettingsError, which names what is wrong."""
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from None
    try:
        return Comparison.model_validate(table)
    except ValidationError as error:
        raise SettingsError(f"{path}: {_told(error, table)}") from None


def _told(error: ValidationError, table: Mapping[str, Any]) -> str:
    """The first of what is wrong, by the words of the file."""
    first = error.errors(include_url=False)[0]
    where = [str(each) for each in first["loc"] if each not in KINDS]
    if where[:2] == ["load", "0"] and isinstance(table["load"], Mapping):
        del where[1]
    return ".".join(where) + (": " if where else "") + first["msg"]


def filled(spec: SystemSpec, environ: Mapping[str, str]) -> SystemSpec:
    """With `${NAME}` replaced, and /health to wait for if nothing else is said. Raises SettingsError."""

    def fill(text: str) -> str:
        missing = [name for name in VARIABLE.findall(text) if name not in environ]
        if missing:
            raise SettingsError(f"{spec.name}: set the variable {missing[0]}, which {text!r} asks for")
        return VARIABLE.sub(lambda match: environ[match[1]], text)

    absent = set(spec.cpus) - os.sched_getaffinity(0)
    if absent:
        raise SettingsError(f"{spec.name}: cpus names core {min(absent)}, which this process may not use")
    ready = tuple(map(fill, spec.ready)) or (f"{fill(spec.url)}/health",)
    return spec.model_copy(
        update={
            "about": fill(spec.about),
            "url": fill(spec.url),
            "start": tuple(map(fill, spec.start)),
            "ready": ready,
            "env": {name: fill(value) for name, value in spec.env.items()},
        }
    )


def narrowed(comparison: Comparison, only: Sequence[str], rounds: int | None) -> Comparison:
    """The same with some of its systems, and with so many rounds. Raises SettingsError."""
    names = [each.name for each in comparison.systems]
    unknown = sorted(set(only) - set(names))
    if unknown:
        raise SettingsError(f"--only {unknown[0]!r} is none of {names}")
    kept = set(only) or set(names)
    loads = comparison.loads
    if rounds is not None:
        loads = tuple(each.model_copy(update={"rounds": rounds}) for each in loads)
    try:
        return Comparison(
            systems=tuple(each for each in comparison.systems if each.name in kept),
            loads=loads,
            wanted=tuple(each for each in comparison.wanted if each.against in kept),
            model=comparison.model,
        )
    except ValidationError as error:
        raise SettingsError(_told(error, {})) from None
