"""Facts that a worker registers: its address, its cache, its model, and what has to be equal on all workers.

They do not change while the worker's process lives. Workers, the wire and the router all read them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Final

from baton.ids import Incarnation
from baton.rooms.errors import Cause
from baton.rooms.phases import Side
from baton.rooms.reasons import LOST
from baton.topology import ONE_RANK, Topology

CANARY_ROOMS: Final = 1
"""Number of rooms that a worker can have beyond `rooms_max`. They are for canaries (test requests of the
router), so that these displace no client's room."""
CANARY_TOKENS: Final = 25
"""Number of KV positions that a canary takes. A canary is the router's test request, which a worker must pass
to get rooms."""
WEIGHT_TOTAL: Final = 100
"""Sum of the prefill weight and the decode weight of a process that serves both. The weights say how its time
is divided."""


@dataclass(frozen=True, slots=True)
class StackFacts:
    """Facts that must be equal on all workers of the stack (the workers of one router). The last six have one
    value for each KV group."""

    schema: str = ""
    """Identifier of the byte format of the metadata record that prefill sends with the pages."""
    kv_checksum: str = ""
    quantize: str = ""
    kind: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    encoding: tuple[str, ...] = ()
    """Names of the page encodings, by KV group. Engines that write the bytes of a page differently have
    different encodings."""
    layers: tuple[int, ...] = ()
    """Number of layers, by KV group."""
    heads: tuple[int, ...] = ()
    """Number of KV heads, by KV group."""
    planes: tuple[str, ...] = ()

    def in_words(self) -> dict[str, str]:
        """Return all facts as texts, by the name of their field. Workers are compared in this order."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: value if isinstance(value, str) else "; ".join(map(str, value))
            for name, value in sorted(values.items())
        }


@dataclass(frozen=True, slots=True)
class OtherSide:
    """Worker of the other side in a process that serves both prefill and decode."""

    incarnation: Incarnation
    process: str
    """Name of the process that runs both the prefill and the decode worker."""
    prefill_weight: int = WEIGHT_TOTAL // 2
    """Share of the process's time that is meant for prefill when it registers, in percent. The rest is for
    decode."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """Facts that a worker registers. They do not change while its process lives."""

    name: str
    """Name of the worker, unique among the live processes of the stack, whatever their side."""
    side: Side
    incarnation: Incarnation
    address: str
    """Address of the worker's gRPC server, as host:port."""
    model: str
    """Fingerprint of the model's configuration and weights."""
    stack: StackFacts
    tokens_max: int
    """Number of KV positions in the worker's whole cache."""
    rooms_max: int
    """Most rooms of clients' requests that the worker holds at once."""
    context_length: int = 0
    """Most tokens of a sequence, prompt and output together; 0 if not given."""
    page_tokens: int = 1
    """Number of tokens in a block: the fewest positions for which every KV group has whole pages. For any two
    workers of the stack, the larger block is a multiple of the smaller one."""
    group_page_tokens: tuple[int, ...] = ()
    """Tokens per page, by KV group. Empty for a model with one group, whose page is the block."""
    topology: Topology = ONE_RANK
    pid: int = 0
    """Id of the worker's process, by which its starter on the same machine reports its exit; 0 if not
    given."""
    keeps_prefixes: bool = True
    """Whether the worker has a prefix cache: pages of ended sequences stay cached for prompts that begin
    alike."""
    computes: bool = False
    """Whether this decode worker can compute prompts itself, without a prefill worker."""
    engine: str = ""
    """Name of the engine that computes the worker's steps. Empty if not given."""
    batch_invariant: bool = False
    """Whether the engine promises that a sequence's tokens do not depend on the other sequences in its
    batch."""
    whole_prompts: bool = False
    """Whether the engine computes a prompt in one step only, not in chunks."""
    other_side: OtherSide | None = None
    """Worker of the other side in the same process. None if the process serves one side only."""
    secret_digest: bytes = field(default=b"", repr=False)
    """Digest of the secret by which prefill workers recognize this decode worker. The secret cannot be
    derived from it."""
    exit_digest: bytes = b""
    """SHA-256 of a secret. The process's starter shows the secret when it reports the process's exit. Empty
    if there is no such starter."""

    def loss(self, why: str) -> Cause:
        """Return the cause with which the rooms of this worker end when it is lost."""
        return Cause(LOST[self.side], f"{self.side.value} worker {self.name}: {why}")


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """Engine of a stack, with the properties that its workers have together."""

    name: str
    """Name of the engine that computes. Empty if not given."""
    dtype: str
    """Number format of the stored keys and values, such as bfloat16."""
    batch_invariant: bool
    """Whether every worker promises that a sequence's tokens do not depend on the other sequences in its
    batch."""
    whole_prompts: bool
    """Whether some worker computes a prompt in one step only, so that some requests are refused."""


def served_engine(workers: Iterable[WorkerFacts]) -> ServedEngine | None:
    """Return the properties of the engine that all of these workers have together. None if there are no
    workers."""
    known = [*workers]
    if not known:
        return None
    return ServedEngine(
        next((each.engine for each in known if each.engine), ""),
        next(iter(known[0].stack.dtype), ""),
        all(each.batch_invariant for each in known),
        any(each.whole_prompts for each in known),
    )
