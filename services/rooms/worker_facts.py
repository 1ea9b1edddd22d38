"""Facts that a worker registers with: its address, its cache, its model, and what the stack has to share.

They do not change during an incarnation. Workers, the wire and the router all read them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Final

from baton.ids import Incarnation
from baton.rooms.phases import Side
from baton.topology import ONE_RANK, Topology

CANARY_ROOMS: Final = 1
"""Rooms that a worker can hold beyond `rooms_max`, so that a canary never displaces a client's room."""
CANARY_TOKENS: Final = 25
"""KV positions that a canary takes. A worker with fewer would never be ready."""
WEIGHT_TOTAL: Final = 100
"""Sum of a process's prefill and decode weights: parts of its time."""


@dataclass(frozen=True, slots=True)
class StackFacts:
    """Facts that must be equal across the stack. The last six have one value for each group of the KV
    layout."""

    schema: str = ""
    """Schema of the metadata record."""
    kv_checksum: str = ""
    quantize: str = ""
    kind: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    encoding: tuple[str, ...] = ()
    """Encoding of pages, by group. Engines that write pages differently differ in it."""
    layers: tuple[int, ...] = ()
    """Number of layers, by group."""
    heads: tuple[int, ...] = ()
    """Number of heads, by group."""
    planes: tuple[str, ...] = ()

    def in_words(self) -> dict[str, str]:
        """Return each value as text by its field, in the order in which they are compared."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: value if isinstance(value, str) else "; ".join(map(str, value))
            for name, value in sorted(values.items())
        }


@dataclass(frozen=True, slots=True)
class OtherSide:
    """The other worker of a process that serves both sides."""

    incarnation: Incarnation
    process: str
    """Name of the process, common to both workers."""
    prefill_weight: int = WEIGHT_TOTAL // 2
    """Share of the process's time for prefill as it registers, of 100."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Facts that a worker registers with. They do not change during an incarnation."""

    name: str
    """Name of the worker, unique among the live processes of the stack, whatever their side."""
    side: Side
    incarnation: Incarnation
    address: str
    """Address of its gRPC server, host:port."""
    model: str
    """Fingerprint of the model's configuration and weights."""
    stack: StackFacts
    tokens_max: int
    """KV positions of its whole cache."""
    rooms_max: int
    """Clients' rooms that it holds at once."""
    context_length: int = 0
    """Most tokens of a sequence; 0 if not given."""
    page_tokens: int = 1
    """Tokens per block: the fewest positions for which every group has whole pages. For any two workers of
    the stack, one's block is a multiple of the other's."""
    group_page_tokens: tuple[int, ...] = ()
    """Tokens per page, by KV group. Empty for a model with one group, whose page is the block."""
    topology: Topology = ONE_RANK
    pid: int = 0
    """Process id, for a starter on the same machine; 0 if not given."""
    keeps_prefixes: bool = True
    """Whether pages of ended sequences stay cached for prompts with the same prefix."""
    computes: bool = False
    """Whether a decode worker computes prompts itself if no prefill worker does."""
    engine: str = ""
    """Engine that computes its steps. Empty if not told."""
    batch_invariant: bool = False
    """Whether it promises that tokens do not depend on what is computed together."""
    whole_prompts: bool = False
    """Whether it computes a prompt in one step only."""
    other_side: OtherSide | None = None
    """The other side of its process; None if it serves this side only."""
    secret_digest: bytes = field(default=b"", repr=False)
    """Digest of the secret by which prefill workers recognize this decode worker. The secret cannot be
    derived from it."""
    exit_digest: bytes = b""
    """SHA-256 of the secret with which the starter of its process reports the exit. Empty if there is no such
    starter."""


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """What the workers of a stack promise together."""

    name: str
    """Engine that computes. Empty if not told."""
    dtype: str
    """Number format of keys and values."""
    batch_invariant: bool
    """Whether tokens depend on no worker on what is computed together."""
    whole_prompts: bool
    """Whether some worker computes a prompt in one step only, and so serves less."""


def served_engine(workers: Iterable[WorkerFacts]) -> ServedEngine | None:
    """Return what `workers`, which fit each other, promise together. None without workers."""
    known = [*workers]
    if not known:
        return None
    return ServedEngine(
        next((each.engine for each in known if each.engine), ""),
        next(iter(known[0].stack.dtype), ""),
        all(each.batch_invariant for each in known),
        any(each.whole_prompts for each in known),
    )
