"""How does a rank come to its group: do all meet, were they started alike, is each of them ready?

Loading a model takes minutes, and not the same on every rank. Meanwhile the ranks stay in touch, so that one
that ends, or cannot start, is known to all at once.
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
"""How often ranks that are still loading tell each other so."""
LOOKS: Final = 4
"""How often the group is asked why a step broke: a second in all."""
TEXT_CHARS_MAX: Final = 1024

OWN: Final = frozenset(
    {"rank", "name", "bootstrap", "host", "advertise", "grpc_port", "metrics_port", "model", "device"}
    | {"threads", "cpus", "drain_timeout_ms", "log_level", "log_format", "kv_cache_memory", "rendezvous"}
    | {"world", "meet_timeout_ms", "machines", "machine"}
    | {"tls_cert", "tls_key", "tls_ca", "run_token", "exit_digest", "exit_file"}
)
"""Settings that may differ from rank to rank: they say where and with what a rank runs, not what it does."""

Loaded = TypeVar("Loaded")

Join = Callable[[int, int, str, int, float, float], Awaitable[RankGroup]]
"""Meet a rank's group, as `GlooGroup.join`."""


class StartedDifferently(SettingsError):
    """The ranks of a worker were started with settings that must be the same; names one and the rank."""


@dataclass(frozen=True, slots=True)
class Formed:
    """A rank's group, all of which was started alike."""

    group: RankGroup
    leaders: int
    """The number that the leader brought."""
    leaders_word: str = ""
    """And its word."""


async def form_group(settings: WorkerSettings, join: Join, mine: int, word: str = "") -> Formed:
    """Meet the other ranks, and compare what they were started with.

    `mine`, `word`: of which all learn the leader's. Raises GroupLost, and StartedDifferently on every rank.
    """
    if not settings.grouped:
        return Formed(SoloGroup(), mine, word)
    assert settings.rank is not None
    host, port = split_address(settings.rendezvous)
    ranks, timeout_s = settings.topology.ranks, settings.group_timeout_ms / 1000
    try:
        meet_s = max(settings.meet_timeout_ms / 1000, timeout_s)
        group = await join(settings.rank, ranks, host, port, timeout_s, meet_s)
        told = await _gather_facts(group, {"number": mine, "word": word, "settings": _shared(settings)})
    except GroupBroken as error:
        raise GroupLost(str(error)) from error
    compare([each["settings"] for each in told], "was started with")
    log.info("the group has met", ranks=ranks)
    return Formed(group, told[0]["number"], told[0]["word"])


async def load_together(group: RankGroup, loading: Awaitable[Loaded]) -> Loaded:
    """Wait for `loading` on every rank. Raises what it raised here, GroupLost when it failed on another."""
    here = asyncio.ensure_future(loading)
    while True:
        await asyncio.wait({here}, timeout=LOOK_S)
        error = here.exception() if here.done() else None
        try:
            told = await _gather_facts(
                group, {"done": here.done(), "error": str(error or "")[:TEXT_CHARS_MAX]}
            )
        except GroupBroken as broken:
            raise GroupLost(str(broken)) from error or broken
        if error is not None:
            raise error
        failed = [f"rank {rank}: {each['error']}" for rank, each in enumerate(told) if each["error"]]
        if failed:
            raise GroupLost(failed[0])
        if all(each["done"] for each in told):
            return here.result()


async def agree_on(group: RankGroup, facts: Mapping[str, str]) -> None:
    """Raises StartedDifferently, on every rank, where the ranks' facts differ, and GroupLost."""
    try:
        told = await _gather_facts(group, {"facts": dict(facts)})
    except GroupBroken as error:
        raise GroupLost(str(error)) from error
    compare([each["facts"] for each in told], "has")


async def explained(turns: Coroutine[Any, Any, None], group: RankGroup, vague: type[Exception]) -> None:
    """The turns of a rank. What is `vague` about the rank that is the reason is raised as a GroupBroken that
    names it, if the group learns of it soon."""
    try:
        await turns
    except vague as error:
        for _ in range(LOOKS):
            if group.broken is not None:
                raise GroupBroken(f"{group.broken}; {error}") from error
            await asyncio.sleep(LOOK_S)
        raise


def compare(told: Sequence[Mapping[str, str]], verb: str) -> None:
    """Raises StartedDifferently for the first rank that differs from the leader, naming what differs."""
    first = told[0]
    for rank, each in enumerate(told):
        for name in sorted(first.keys() | each.keys()):
            if each.get(name) != first.get(name):
                raise StartedDifferently(
                    f"rank {rank} {verb} {name} {each.get(name)}, rank 0 {verb} {first.get(name)}: all ranks"
                    " of a worker must have the same"
                )


def _shared(settings: WorkerSettings) -> dict[str, str]:
    """What must be the same on every rank, by flag."""
    return {
        each.flag: each.kind.show(getattr(settings, each.name))
        for each in settings_of(type(settings))
        if each.name not in OWN
    }


async def _gather_facts(group: RankGroup, mine: Mapping[str, Any]) -> list[Any]:
    return [json.loads(each) for each in await group.gather(json.dumps(mine).encode())]
