"""Facts that a worker registers with: its address, its cache, its model, and what the stack has to share.

They do not change during an incarnation. Workers, the wire and the router all read them.
"""

from dataclasses import dataclass, field, fields
from typing import Final

from baton.ids import Incarnation
from baton.rooms.phases import Side
from baton.topology import ONE_RANK, Topology

CANARY_ROOMS: Final = 1
"""Rooms that a worker can hold beyond `rooms_max`: a canary takes no place that a client is given."""
CANARY_TOKENS: Final = 25
"""KV positions that a canary takes of a worker: with less it would never be ready."""
WEIGHT_TOTAL: Final = 100
"""Sum of a process's prefill and decode weights: parts of its time."""


@dataclass(frozen=True, slots=True)
class StackFacts:
    """What must be equal across the stack. The last five hold one value for each group of the KV layout."""

    schema: str = ""
    """Of the metadata record."""
    kv_checksum: str = ""
    quantize: str = ""
    kind: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    """How many."""
    heads: tuple[int, ...] = ()
    """How many."""
    planes: tuple[str, ...] = ()

    def in_words(self) -> dict[str, str]:
        """Each value by its field, in the order in which they are compared."""
        told = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: value if isinstance(value, str) else "; ".join(map(str, value))
            for name, value in sorted(told.items())
        }


@dataclass(frozen=True, slots=True)
class OtherSide:
    """Of a worker whose process serves both sides: what registers as the other one."""

    incarnation: Incarnation
    process: str
    """What both are called together."""
    prefill_weight: int = WEIGHT_TOTAL // 2
    """Of 100: how much of its time the process is meant to have for prefill, as it registers."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker says of itself when it registers. It does not change during an incarnation."""

    name: str
    """One process at a time has it in the whole stack, whatever its side."""
    side: Side
    incarnation: Incarnation
    address: str
    """host:port of its gRPC server."""
    model: str
    """Fingerprint of configuration and weights."""
    stack: StackFacts
    tokens_max: int
    """KV positions that its whole cache holds."""
    rooms_max: int
    """Rooms of clients that it holds at once."""
    context_length: int = 0
    """Most tokens of a sequence; 0: not said."""
    page_tokens: int = 1
    """Of a block: the fewest positions of which every group has whole pages. Of any two workers of the stack,
    one's is a multiple of the other's."""
    group_page_tokens: tuple[int, ...] = ()
    """Of a page of each group; empty: there is one, and that is its block."""
    topology: Topology = ONE_RANK
    pid: int = 0
    """Of its process, for whoever started it on the same machine; 0: not told."""
    keeps_prefixes: bool = True
    """Pages of ended sequences are kept for prompts that begin alike."""
    computes: bool = False
    """Of a decode worker: it computes the prompt of a room itself where no prefill worker does."""
    other_side: OtherSide | None = None
    """None: its process serves this side alone."""
    secret_digest: bytes = field(default=b"", repr=False)
    """Of a decode worker: by which senders know who speaks to them. Nobody can show the secret itself by
    it."""
    exit_digest: bytes = b""
    """SHA-256 of the secret by which the starter of its process reports the exit; empty: nobody can."""
