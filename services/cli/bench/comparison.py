"""Which systems are compared, under which load, and what is wanted of it? Read from a TOML file.

    model = "demo"                      # prepared once; its directory is $MODEL_DIR in what follows

    [load]
    prompt_tokens = "512"               # as `baton bench serve` takes them
    output_tokens = "64"
    prompts = "ids"                     # or "text", where one of them takes no token ids
    concurrency = [1, 4, 8]
    requests = [4, 8, 16]               # of one round, for each concurrency
    warm_up = 2                         # requests before each round of a system
    rounds = 5                          # each system in turn, so often

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
    concurrency = [1]
    at_most = 0.5                       # or at_least: the first system's value by the other's

Commands run in the file's folder, with this `baton` first on the PATH; `${NAME}` is of the environment.
"""

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from services.cli.bench.workload import PromptForm
from services.runtime.errors import SettingsError

VARIABLE: Final = re.compile(r"\$\{(\w+)\}")
SYSTEMS_MAX: Final = 16

Count = Annotated[int, Field(ge=1, le=100_000)]
Seconds = Annotated[float, Field(gt=0, le=7200)]


class TomlTable(BaseModel):
    """Of the file; an unknown word in it is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


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


class LoadSpec(TomlTable):
    """What every system is asked."""

    prompt_tokens: str = "512"
    output_tokens: str = "64"
    prompts: PromptForm = PromptForm.IDS
    shared_prefix: Annotated[float, Field(ge=0, le=1)] = 0
    vocabulary: Annotated[int, Field(ge=200)] = 32_000
    seed: int = 0
    concurrency: tuple[Count, ...] = Field(default=(1, 4, 8), min_length=1)
    requests: tuple[Count, ...] = (4, 8, 16)
    warm_up: Annotated[int, Field(ge=0)] = 2
    rounds: Count = 5
    timeout_s: Seconds = 300

    @model_validator(mode="after")
    def _as_many(self) -> "LoadSpec":
        if len(self.requests) != len(self.concurrency):
            raise ValueError("load.requests has one number for each of load.concurrency")
        if any(asks < at_a_time for asks, at_a_time in zip(self.requests, self.concurrency, strict=True)):
            raise ValueError("load.requests has at least as many as are to be at a time")
        return self


class Wanted(TomlTable):
    """A limit on the first system's value divided by another's."""

    against: str
    measure: str
    concurrency: tuple[int, ...]
    at_most: float | None = None
    at_least: float | None = None

    def met(self, ratio: float) -> bool:
        low, high = self.at_least, self.at_most
        return (high is None or ratio <= high) and (low is None or ratio >= low)


class Comparison(TomlTable):
    """The whole file."""

    systems: tuple[SystemSpec, ...] = Field(min_length=2, max_length=SYSTEMS_MAX)
    load: LoadSpec = LoadSpec()
    wanted: tuple[Wanted, ...] = ()
    model: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> "Comparison":
        names = [each.name for each in self.systems]
        if len(set(names)) != len(names):
            raise ValueError(f"systems have different names, not {names}")
        for each in self.wanted:
            if each.against not in names[1:]:
                raise ValueError(f"wanted.against {each.against!r} is none of {names[1:]}")
            if not set(each.concurrency) <= set(self.load.concurrency):
                raise ValueError(f"wanted.concurrency {each.concurrency} is not all measured")
        return self


def read_comparison(path: Path) -> Comparison:
    """Raises SettingsError, which names what is wrong."""
    try:
        return Comparison.model_validate(tomllib.loads(path.read_text("utf-8")))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise SettingsError(f"{path}: {where}{': ' if where else ''}{first['msg']}") from None
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from None


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
    load = comparison.load if rounds is None else comparison.load.model_copy(update={"rounds": rounds})
    try:
        return Comparison(
            systems=tuple(each for each in comparison.systems if each.name in kept),
            load=load,
            wanted=tuple(each for each in comparison.wanted if each.against in kept),
            model=comparison.model,
        )
    except ValidationError as error:
        raise SettingsError(error.errors(include_url=False)[0]["msg"]) from None
