"""Start of a rank: it meets its group, compares settings, and waits until all ranks are ready.

Loading a model takes minutes, and some ranks take longer than others. The ranks stay in touch meanwhile, so
that all learn at once if one ends or cannot start.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from baton.parallel.rank_group import GroupBroken, RankGroup
from baton.parallel.solo import SoloGroup
from baton.runtime.errors import GroupLost, SettingsError
from baton.runtime.logging import Log
from baton.runtime.setting_kinds import split_address
from baton.runtime.settings import settings_of
from baton.runtime.worker_settings import WorkerSettings

log = Log(__name__)

LOOK_S: Final = 0.25
"""Seconds between two checks whether all ranks have loaded the engine. In each check the ranks exchange their
states."""
LOOKS: Final = 4
"""Most checks, LOOK_S apart, whether the group knows the rank that broke a step."""
TEXT_CHARS_MAX: Final = 1024

OWN: Final = frozenset(
    {"rank", "name", "bootstrap", "host", "advertise", "grpc_port", "metrics_port", "model", "device"}
    | {"threads", "cpus", "drain_timeout_ms", "log_level", "log_format", "kv_cache_memory", "rendezvous"}
    | {"world", "meet_timeout_ms", "machines", "machine"}
    | {"tls_cert", "tls_key", "tls_ca", "run_token", "exit_digest", "exit_file"}
)
"""Names of the settings that may differ between the ranks of a worker, such as ports, devices and log
format."""

Loaded = TypeVar("Loaded")

Join = Callable[[int, int, str, int, float, float], Awaitable[RankGroup]]
"""Function by which a rank meets the other ranks of its worker, such as `GlooGroup.join`. It returns their
group."""


class StartedDifferently(SettingsError):
    """Error: the ranks of a worker differ in a setting or a fact. The text names it and the rank."""


@dataclass(frozen=True, slots=True)
class Formed:
    """Rank group in which all ranks have met and have equal settings, with the leader's id and credential."""

    group: RankGroup
    leaders: int
    """Incarnation of the worker, which its leader has drawn and sent to all ranks."""
    leaders_word: str = ""
    """Credential by which the other ranks report for the worker, as hexadecimal digits. The leader has sent
    it."""


async def form_group(settings: WorkerSettings, join: Join, mine: int, word: str = "") -> Formed:
    """Meet the other ranks of the worker, and compare settings. Return the group.

    `mine`: incarnation that the worker gets if this rank leads. `word`: credential for the other ranks in
    that case. Raises GroupLost, and StartedDifferently on every rank.
    """
    if not settings.grouped:
        return Formed(SoloGroup(), mine, word)
    assert settings.rank is not None
    host, port = split_address(settings.rendezvous)
    ranks, timeout_s = settings.topology.ranks, settings.group_timeout_ms / 1000
    try:
        meet_s = max(settings.meet_timeout_ms / 1000, timeout_s)
        group = await join(settings.rank, ranks, host, port, timeout_s, meet_s)
        gathered = await _gather_facts(group, {"number": mine, "word": word, "settings": _shared(settings)})
    except GroupBroken as error:
        raise GroupLost(str(error)) from error
    compare([each["settings"] for each in gathered], "was started with")
    log.info("the group has met", ranks=ranks)
    return Formed(group, gathered[0]["number"], gathered[0]["word"])


async def load_together(group: RankGroup, loading: Awaitable[Loaded]) -> Loaded:
    """Wait until every rank has finished `loading`. Return this rank's result. Raises its error, or GroupLost
    if another rank failed."""
    here = asyncio.ensure_future(loading)
    while True:
        await asyncio.wait({here}, timeout=LOOK_S)
        error = here.exception() if here.done() else None
        try:
            gathered = await _gather_facts(
                group, {"done": here.done(), "error": str(error or "")[:TEXT_CHARS_MAX]}
            )
        except GroupBroken as broken:
            raise GroupLost(str(broken)) from error or broken
        if error is not None:
            raise error
        failed = [f"rank {rank}: {each['error']}" for rank, each in enumerate(gathered) if each["error"]]
        if failed:
            raise GroupLost(failed[0])
        if all(each["done"] for each in gathered):
            return here.result()


async def agree_on(group: RankGroup, facts: Mapping[str, str]) -> None:
    """Check that all ranks have the same values of `facts`. Raises StartedDifferently on every rank if they
    differ, and GroupLost if a rank is gone."""
    try:
        gathered = await _gather_facts(group, {"facts": dict(facts)})
    except GroupBroken as error:
        raise GroupLost(str(error)) from error
    compare([each["facts"] for each in gathered], "has")


async def explained(turns: Coroutine[Any, Any, None], group: RankGroup, vague: type[Exception]) -> None:
    """Run the turns of a rank to their end. If another rank made them fail, raise an error that names that
    rank.

    `vague`: type of an error that does not name the rank. If the group learns the cause soon after it,
    GroupBroken with the rank is raised instead.
    """
    try:
        await turns
    except vague as error:
        for _ in range(LOOKS):
            if group.broken is not None:
                raise GroupBroken(f"{group.broken}; {error}") from error
            await asyncio.sleep(LOOK_S)
        raise


def compare(gathered: Sequence[Mapping[str, str]], verb: str) -> None:
    """Raise StartedDifferently for the first rank that differs from the leader. The text names the
    difference.

    `gathered`: values of each rank by name, in rank order. `verb`: verb for the text, such as "has".
    """
    first = gathered[0]
    for rank, each in enumerate(gathered):
        for name in sorted(first.keys() | each.keys()):
            if each.get(name) != first.get(name):
                raise StartedDifferently(
                    f"rank {rank} {verb} {name} {each.get(name)}, rank 0 {verb} {first.get(name)}: all ranks"
                    " of a worker must have the same"
                )


def _shared(settings: WorkerSettings) -> dict[str, str]:
    """Return the settings that must be equal on every rank: their values as text, by flag."""
    return {
        each.flag: each.kind.show(getattr(settings, each.name))
        for each in settings_of(type(settings))
        if each.name not in OWN
    }


async def _gather_facts(group: RankGroup, mine: Mapping[str, Any]) -> list[Any]:
    return [json.loads(each) for each in await group.gather(json.dumps(mine).encode())]
