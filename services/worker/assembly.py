"""Objects that the turns of a rank use, assembled in one value: memory, engine thread, transfer, clock and
others.

Production, the simulation, tests and benchmarks fill in `RankPorts`, and hand it to `DecodeWork` or to
`PrefillWork`, which make the rest of the rank from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from baton.engine_interface import Grammars
from baton.ids import Incarnation
from baton.pages.holdings import STATE_GAP_TOKENS, Holdings
from baton.pages.kv_checksum import KvChecksum
from baton.pages.kv_event_log import KvEventLog
from baton.pages.layout import KvLayout
from baton.pages.pool import PagePool
from baton.pages.prefix_tree import PrefixTree
from baton.pages.record import SLOT_BYTES
from baton.pages.slots import SlotPool
from baton.runtime.clock import Clock
from baton.runtime.host_memory import HostMemory, Movable
from baton.transfer.exposure import Exposure
from baton.transfer.transfer_protocol import SLOTS, kv_region
from baton.wire.model_bounds import ModelBounds
from baton.worker.grammar_states import GrammarStates
from baton.worker.mailbox import Mailbox
from baton.worker.reporter import Reporter
from baton.worker.step_thread import StepThread


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of a rank that peers may write to, and the bookkeeping of which room owns which pages and
    slot."""

    caches: Sequence[Movable]
    """Memory of the KV pages, as one region for each KV group."""
    slots: HostMemory
    """Host memory of all metadata slots."""
    holdings: Holdings

    @classmethod
    def of(
        cls,
        caches: Sequence[Movable],
        pages: Sequence[int],
        layout: KvLayout,
        room_limit: int,
        *,
        keeps_prefixes: bool = False,
        state_gap_tokens: int = STATE_GAP_TOKENS,
    ) -> "RankMemory":
        """Make the memory of a rank: metadata slots, and holdings without rooms.

        `pages`: number of pages in each of `caches`. `room_limit`: most rooms at a time, each with a slot.
        `keeps_prefixes`: whether the pages of finished rooms are cached, for rooms that begin with the same
        tokens. `state_gap_tokens`: see `Holdings`.
        """
        slots = HostMemory(room_limit * SLOT_BYTES)
        pools = [PagePool(count) for count in pages]
        sizes = [0 if group.is_state else group.page_tokens for group in layout.groups]
        has_more = sizes[0] and all(count > 1 for count, size in zip(pages, sizes, strict=True) if not size)
        prefixes = PrefixTree(sizes) if keeps_prefixes and has_more else None
        return cls(caches, slots, Holdings(pools, SlotPool(slots.view), prefixes, state_gap_tokens))

    def log_prefixes(self) -> KvEventLog | None:
        """Log the changes of the prefix cache from now on, while it is empty. Return the log, or None without
        a prefix cache."""
        prefixes = self.holdings.prefixes
        if not self.keeps_prefixes:
            return None
        prefixes.listener = log = KvEventLog(prefixes.block_tokens)
        return log

    @property
    def keeps_prefixes(self) -> bool:
        """Whether the pages of finished rooms are cached, for rooms that begin with the same tokens."""
        return self.holdings.prefixes.block_tokens > 0

    @property
    def room_limit(self) -> int:
        """Most rooms at a time, each with a metadata slot."""
        return len(self.holdings.slots)

    @property
    def regions(self) -> dict[str, Movable]:
        """Memory regions of this rank that peers may write to, by the name that peers use for a region."""
        return {**{kv_region(group): cache for group, cache in enumerate(self.caches)}, SLOTS: self.slots}


@dataclass(slots=True, eq=False, kw_only=True)
class RankPorts:
    """Objects and facts that the turns of a rank use, on a prefill and on a decode worker alike."""

    incarnation: Incarnation
    """Incarnation of the worker, the same for all its ranks."""
    layouts: Sequence[KvLayout]
    """KV layouts of all ranks of the worker, in rank order."""
    rank: int = 0
    """Index of this rank in `layouts`. Rank 0 is the leader."""
    bounds: ModelBounds
    """Limits of the model on requests, such as its vocabulary and context length."""
    checksum: KvChecksum = KvChecksum.RECORD
    """Kind of checksum that each hand-over is checked with (`--kv-checksum`)."""
    step_thread: StepThread
    """Thread on which the engine's steps run."""
    grammars: Grammars | None = None
    """Compiler of grammars for constrained output. None on a rank that does not sample."""
    memory: RankMemory
    exposure: Exposure
    """Transfer endpoint that exposes `memory` to peers under an id."""
    mailbox: Mailbox
    """Mailbox into which gRPC handlers put commands. The next turn takes them."""
    reporter: Reporter
    """Sender that reports the lines of rooms' timelines to the bootstrap."""
    clock: Clock
    grammar_states: GrammarStates = field(init=False)
    """Grammar states that are still being compiled, and the rooms that wait for them."""

    def __post_init__(self) -> None:
        self.grammar_states = GrammarStates(self.grammars, self.mailbox.wake)

    @property
    def layout(self) -> KvLayout:
        """KV layout of this rank."""
        return self.layouts[self.rank]
