"""Sizes and kinds of trouble of each seed.

Most seeds have one or two kinds of trouble, so that each is also seen without the others; some have all.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from baton.pages.kv_checksum import KvChecksum
from baton.testing.transfer_faults import NO_FAULTS, FaultPlan
from baton.topology import Topology
from tests.sim.network import CALM, Weather


@dataclass(frozen=True, slots=True)
class Troubles:
    """Troubles of a run. Numbers are occurrences, unless a field says otherwise."""

    crashes: int = 0
    """A worker's process dies and comes back as another incarnation."""
    told_share: float = 1.0
    """Share of crashes whose exit is reported to the bootstrap by the worker's starter."""
    rank_crashes: int = 0
    rank_aborts: int = 0
    """A room fails on the first or on the last rank of a worker alone."""
    late_share: float = 0.0
    """Share of records and seals that one rank of the receiver gets long after the others."""
    late_steps: int = 0
    flip_share: float = 0.0
    """Share of page writes in which one bit is flipped."""
    pauses: int = 0
    """Number of times that all of a worker's processes stop for a while."""
    rank_pauses: int = 0
    group_s: float = 2.0
    """Seconds after which a group counts as broken if one rank is missing."""
    rank_stalls: int = 0
    """A rank that does not lead stands still, for less long than its group waits."""
    late_renewals: bool = False
    """Renewals of leases come late, and their answers later still and in another order. No gap between two
    that arrive is as long as a lease."""
    busy_bootstraps: int = 0
    """Times at which messages to the bootstrap wait in its queue, for a multiple of a lease."""
    silences: int = 0
    """A sender is paused, or cut off from a receiver, so long that its rooms' memory has to be revoked."""
    bootstrap_crashes: int = 0
    bootstrap_pauses: int = 0
    cuts: int = 0
    """A way between two hosts carries nothing for a while, in one direction or both."""
    resets: int = 0
    drains: int = 0
    weights: int = 0
    """A process that serves both sides is given another weight."""
    storms: int = 0
    """Number of times that many clients hang up at once."""
    step_failure_share: float = 0.0
    slow_ranks: int = 0
    handler_rounds: int = 0
    """Rounds of the event loop until a handler has its message."""
    turn_s: float = 0.0
    """Seconds of a worker's core per turn."""
    skew: bool = False
    hangup_share: float = 0.0
    """Share of clients that hang up at some time, or have read enough."""
    cancel_share: float = 0.0
    """Share of rooms that are cancelled by their number, through the bootstrap's API."""


@dataclass(frozen=True, slots=True)
class Profile:
    name: str
    prefills: tuple[Topology, ...]
    """Shape of each prefill worker."""
    decodes: tuple[Topology, ...]
    prefill_page_tokens: int
    decode_page_tokens: int
    pages: int
    """Pages of each rank, in units of 4 tokens."""
    places: int
    max_running: int
    queue: int
    chunk_tokens: int
    window_bytes: int
    arrivals_s: float
    """Time over which the rooms' requests arrive, seconds."""
    reuse: bool = True
    """Whether workers cache the pages of ended sequences for those that begin alike."""
    alike: float = 0.2
    """Share of prompts that begin like others."""
    several: float = 0.0
    """Share of requests with several choices."""
    outputs: tuple[int, ...] = (1, 1, 2, 3, 5, 8)
    """Tokens that requests ask for."""
    classes: tuple[int, ...] = (0,)
    """Priority classes of requests. The lowest is served first."""
    local: float = 0.0
    """Share of rooms that decode's leader claims to compute itself."""
    bootstraps: int = 1
    orphan_ms: int = 0
    """Time for which the workers keep the rooms of a bootstrap that died, in milliseconds."""
    both: int = 0
    """Number of pairs of workers that share one process each, the first ones."""
    states: int = 0
    """Pages of each rank for states. 0: the model has none."""
    drafts_by: int = 0
    """Tokens by which decode workers look up drafts. Most answers repeat themselves then."""
    kv_heads: tuple[int, ...] = (1, 2)
    checksum: KvChecksum = KvChecksum.RECORD
    slow: float = 1.0
    """Factor of a step's duration."""
    weather: Weather = CALM
    writes: FaultPlan = NO_FAULTS
    troubles: Troubles = field(default_factory=Troubles)


NAMES: Final = (
    "calm",
    "network",
    "writes",
    "crashes",
    "pauses",
    "cuts",
    "bootstrap",
    "full",
    "hangups",
    "engine",
    "ranks",
    "aborts",
    "seals",
    "drain",
    "fence",
    "late",
    "prefixes",
    "everything",
    "sums",
    "thirds",
    "handlers",
    "packed",
    "renewals",
    "stalls",
    "choices",
    "growth",
    "drafts",
    "local",
    "both",
    "routers",
    "adoption",
    "states",
)
MIXED: Final = NAMES[1 : NAMES.index("everything")]
"""Kinds of trouble that "everything" combines."""


_GROWTH: Final[Mapping[str, tuple[Any, ...]]] = {
    "crashes": (0, 0, 1, 2),
    "told_share": (0.0, 1.0),
    "rank_crashes": (0, 0, 1),
    "rank_aborts": (0, 0, 10),
    "cuts": (0, 0, 1),
    "silences": (0, 0, 0, 1),
    "drains": (0, 0, 1),
    "step_failure_share": (0.0, 0.0, 0.005),
    "slow_ranks": (0, 1),
    "hangup_share": (0.0, 0.2),
    "cancel_share": (0.0, 0.0, 0.1),
}
TROUBLES: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {
    "crashes": {"crashes": (1, 2, 4), "told_share": (0.0, 0.5, 1.0)},
    "pauses": {"pauses": (1, 2, 4)},
    "cuts": {"cuts": (1, 2, 4)},
    "bootstrap": {"bootstrap_crashes": (1, 2), "bootstrap_pauses": (0, 1)},
    "hangups": {"storms": (0, 1, 3), "hangup_share": (0.2, 0.6), "cancel_share": (0.0, 0.1)},
    "engine": {"step_failure_share": (0.002, 0.02)},
    "ranks": {"rank_crashes": (0, 1), "rank_pauses": (0, 1, 2), "slow_ranks": (0, 1, 2), "skew": (True,)},
    "drain": {"drains": (1, 2, 3), "cuts": (0, 0, 1), "bootstrap_crashes": (0, 0, 1)},
    # A sender falls silent while rooms fail: quarantine, and in the end revocation.
    "fence": {"silences": (2, 3), "crashes": (0, 1), "hangup_share": (0.0, 0.3), "told_share": (0.0,)},
    "late": {"hangup_share": (0.6,), "silences": (0, 1), "cancel_share": (0.0, 0.2)},
    "aborts": {"rank_aborts": (10, 40), "slow_ranks": (0, 1), "hangup_share": (0.0, 0.2)},
    "seals": {"late_share": (0.05, 0.3), "late_steps": (50, 500, 5_000), "hangup_share": (0.0, 0.3)},
    "sums": {"flip_share": (0.0, 0.01, 0.05), "step_failure_share": (0.0, 0.01), "hangup_share": (0.0, 0.2)},
    "handlers": {"handler_rounds": (30, 100, 200), "turn_s": (0.005, 0.01, 0.02)},
    "thirds": {"late_share": (0.0, 0.3), "late_steps": (50, 500), "rank_aborts": (0, 20)},
    "renewals": {
        "busy_bootstraps": (1, 2, 4),
        "late_renewals": (True, True, True, False),
        "crashes": (0, 0, 1),
    },
    "choices": {
        "crashes": (0, 1, 2),
        "rank_aborts": (0, 10),
        "step_failure_share": (0.0, 0.01),
        "hangup_share": (0.2, 0.5),
        "drains": (0, 0, 1),
    },
    # Caches that a few answers fill: rooms are retracted, and while their requests wait, workers die.
    "growth": _GROWTH,
    # Rooms that decode computes itself, beside some that are granted, in caches that lack pages or do not.
    "local": {**_GROWTH, "hangup_share": (0.0, 0.3)},
    # Processes that serve both sides, whose weights change while they die, drain and lack pages.
    "both": {**_GROWTH, "weights": (2, 4, 8), "drains": (0, 1, 2), "hangup_share": (0.0, 0.3)},
    # Answers that go round, whose drafts are taken and missed, in caches that lack pages or do not.
    "drafts": {
        "crashes": (0, 0, 1, 2),
        "rank_aborts": (0, 0, 10),
        "silences": (0, 0, 0, 1),
        "drains": (0, 0, 1),
        "step_failure_share": (0.0, 0.0, 0.005),
        "slow_ranks": (0, 1),
        "skew": (False, True),
        "hangup_share": (0.0, 0.3),
    },
    # Two bootstraps over the same workers. One that dies takes its own rooms along, and no others.
    "routers": {
        "bootstrap_crashes": (1, 2, 3),
        "crashes": (0, 0, 1),
        "told_share": (0.0, 1.0),
        "drains": (0, 0, 1),
        "hangup_share": (0.0, 0.3),
    },
    # Rooms of a bootstrap that dies are adopted by another, or end alone.
    "adoption": {
        "bootstrap_crashes": (1, 2, 3),
        "cuts": (0, 0, 1, 2),
        "resets": (0, 0, 1),
        "crashes": (0, 0, 1),
        "told_share": (0.0, 1.0),
        "drains": (0, 0, 1),
        "hangup_share": (0.0, 0.3),
    },
    "states": {**_GROWTH, "hangup_share": (0.0, 0.3), "rank_pauses": (0, 0, 1)},
    "stalls": {"rank_stalls": (1, 2, 3), "group_s": (60.0,), "slow_ranks": (0, 1)},
}
"""Values that each kind of seed draws from, by field."""

ONE: Final = Topology()
GROUPS: Final = (
    ONE,
    Topology(2),
    Topology(2),
    Topology(pipeline=2),
    Topology(pipeline=2),
    Topology(pipeline=3),
    Topology(2, 2),
    Topology(4),
)
"""The toy has two KV heads and three layers: four ranks hold each head twice, two stages are uneven."""
STAGELESS: Final = (ONE, Topology(2), Topology(4))
"""Topologies of a decode worker. None has pipeline stages, since the page sums of stages would have to be
told apart."""
SIZES: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {
    # Few places, which the bootstraps fill with rooms that the others do not know of yet.
    "routers": {"bootstraps": (2, 2, 3), "places": (2, 4, 12)},
    # Answers that take long, so that clients come back before they are over.
    "adoption": {
        "bootstraps": (2, 2, 3),
        "orphan_ms": (2_000, 8_000),
        "outputs": ((1, 2, 5, 8), (8, 24, 40)),
        "slow": (1.0, 30.0),
        "several": (0.0, 0.4),
    },
    "choices": {"several": (0.5, 0.9)},
    "states": {"states": (4, 6, 16), "pages": (24, 96), "local": (0.0, 0.3), "several": (0.0, 0.3)},
    "drafts": {
        "drafts_by": (2, 8),
        "pages": (16, 28, 96),
        "outputs": ((1, 8, 24, 40),),
        "several": (0.0, 0.4),
    },
    "local": {
        "local": (0.3, 0.7, 1.0),
        "pages": (16, 28, 96),
        "alike": (0.2, 0.5, 0.9),
        "outputs": ((1, 1, 2, 3, 5, 8), (1, 8, 24)),
        "several": (0.0, 0.0, 0.4),
    },
    "both": {
        "both": (1, 2),
        "local": (0.0, 0.3),
        "pages": (20, 48, 96),
        "alike": (0.2, 0.9),
        "outputs": ((1, 1, 2, 3, 5, 8), (1, 8, 24)),
    },
    "growth": {
        "pages": (16, 20, 28),
        "outputs": ((1, 8, 24, 40),),
        "classes": ((0,), (-1, 0, 0, 1)),
        "several": (0.0, 0.0, 0.4),
        "decodes": (
            (ONE,),
            (ONE, ONE),
            (Topology(2),),
            (Topology(2), Topology(pipeline=2)),
            (Topology(2, 2),),
        ),
    },
}
"""Values of sizes that some kinds of seed draw from, by field."""
SIX_HEADS: Final = (1, 2, 4, 7, 8, 9)
THIRDS: Final = (ONE, Topology(2), Topology(3), Topology(3), Topology(3, 2), Topology(6))
"""Shapes for six KV heads: a half and a third of them overlap in one or two heads."""
GROUPED: Final = frozenset({"ranks", "aborts", "seals", "stalls"})
"""Profiles that are about several ranks."""


def profile(seed: int, rooms: int, name: str | None = None) -> Profile:
    """Return the profile of a seed. `name`: kind of trouble in place of the seed's own."""
    draw = random.Random(f"{seed}/profile")
    name = name or NAMES[seed % len(NAMES)]
    groups = GROUPS[1:] if name in GROUPED else draw.choice(((ONE,), (ONE,), GROUPS))
    prefills = tuple(draw.choice(groups) for _ in range(draw.choice((1, 1, 1, 2, 2, 3))))
    decodes = tuple(draw.choice(groups) for _ in range(draw.choice((1, 1, 1, 2, 2, 3))))
    shape = Profile(
        name=name,
        prefills=prefills,
        decodes=decodes,
        prefill_page_tokens=draw.choice((4, 4, 4, 4, 2, 8)),
        decode_page_tokens=draw.choice((4, 4, 4, 4, 2, 8)),
        pages=draw.choice((48, 96, 160)),
        places=draw.choice((8, 12, 16)),
        max_running=draw.choice((3, 8, 16)),
        queue=2 * rooms,
        chunk_tokens=draw.choice((12, 48, 96)),
        window_bytes=draw.choice((256, 1024, 4096)),
        arrivals_s=rooms * draw.choice((0.002, 0.006, 0.012)),
        writes=FaultPlan(
            seed=seed,
            delay_steps_max=draw.choice((0, 4, 40)),
        ),
        reuse=random.Random(f"{seed}/reuse").random() < 0.8,
    )
    if name == "calm":
        return shape
    if name == "everything":
        for each in MIXED:
            if draw.random() < 0.5:
                shape = _with(shape, each, draw, seed)
        return replace(shape, name=name)
    shape = _with(shape, name, draw, seed)
    if name != "packed" and draw.random() < 0.3:
        shape = _with(shape, draw.choice(("network", "writes", "hangups")), draw, seed)
    return shape


def _with(shape: Profile, name: str, draw: random.Random, seed: int) -> Profile:
    match name:
        case "network":
            weather = Weather(
                slow_share=draw.choice((0.0, 0.02, 0.1)),
                lost_share=draw.choice((0.0, 0.005, 0.02)),
                unanswered_share=draw.choice((0.0, 0.005, 0.02)),
                twice_share=draw.choice((0.0, 0.1, 0.3)),
            )
            troubles = replace(shape.troubles, resets=draw.randrange(4))
            return replace(shape, weather=weather, troubles=troubles)
        case "writes":
            writes = replace(
                shape.writes,
                hold_share=draw.choice((0.0, 0.01, 0.05)),
                hold_steps=draw.choice((100, 1_000, 20_000)),
                fail_share=draw.choice((0.0, 0.002, 0.02)),
            )
            return replace(shape, writes=writes)
        case "late":
            # Writes that land long after their room was given up, in pages that others want.
            writes = replace(
                shape.writes, hold_share=draw.choice((0.2, 0.5)), hold_steps=draw.choice((300, 2_000, 8_000))
            )
            weather = replace(shape.weather, unanswered_share=0.02)
            shape = replace(shape, writes=writes, weather=weather, pages=draw.choice((16, 24)))
        case "prefixes":
            # Beginnings that most share, in caches that hold a few of them.
            return replace(shape, reuse=True, alike=draw.choice((0.5, 0.9)), pages=draw.choice((16, 24, 48)))
        case "full":
            pages, places = draw.choice((10, 12, 16)), draw.choice((2, 4))
            return replace(shape, pages=pages, places=places, queue=draw.choice((8, 40)))
        case "packed":
            # More places than pages: rooms wait on the workers, for longer than any phase may last.
            places, queue = draw.choice((14, 18)), draw.choice((4, 40))
            return replace(shape, pages=10, places=places, queue=queue, slow=120.0)
        case "sums":
            decodes = tuple(draw.choice(STAGELESS) for _ in shape.decodes)
            shape = replace(shape, checksum=KvChecksum.PAGES, decodes=decodes)
        case "thirds":
            prefills = tuple(draw.choice(THIRDS) for _ in shape.prefills)
            decodes = tuple(draw.choice(THIRDS) for _ in shape.decodes)
            shape = replace(shape, kv_heads=SIX_HEADS, prefills=prefills, decodes=decodes)
        case "both":
            others = draw.choice((0, 0, 1))  # of one side alone, beside two processes of both
            shape = replace(shape, prefills=(ONE,) * (2 + others), decodes=(ONE,) * (2 + others))
        case "fence":
            while len(shape.prefills) < 2:
                shape = replace(shape, prefills=(*shape.prefills, draw.choice(shape.prefills)))
    shape = replace(shape, **{key: draw.choice(values) for key, values in SIZES.get(name, {}).items()})
    choices = {key: draw.choice(values) for key, values in TROUBLES[name].items()}
    return replace(shape, troubles=replace(shape.troubles, **choices))
