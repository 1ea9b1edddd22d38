"""Conversion of registration messages: facts of a worker for the registry, and routers for its ranks."""

from collections.abc import Mapping, Sequence

from baton.ids import Incarnation, Opener
from baton.rooms.phases import Side
from baton.rooms.worker_facts import WEIGHT_TOTAL, OtherSide, StackFacts, WorkerFacts
from baton.wire.baton.v1 import group_pb2, workers_pb2
from baton.wire.conversions import Malformed, check_peer, side_to_wire
from baton.wire.layout_messages import checksum_from_wire, layout_from_wire, topology_from_wire
from baton.wire.receiver_secret import DIGEST_BYTES
from baton.wire.text_validation import label_from_wire, name_from_wire


def worker_from_wire(wire: workers_pb2.RegisterRequest) -> WorkerFacts:
    """Convert a registration message to a worker's facts. Raises Malformed."""
    side = next((side for side in Side if side_to_wire(side) == wire.side), None)
    if side is None:
        raise Malformed("side is not set")
    check_peer(wire.worker, "worker")
    if not (wire.tokens_max and wire.rooms_max):
        raise Malformed("tokens_max and rooms_max must be at least 1")
    layout = layout_from_wire(wire.layout)
    return WorkerFacts(
        name=wire.worker.name,
        side=side,
        incarnation=Incarnation(wire.worker.incarnation),
        address=wire.worker.address,
        model=layout.model,
        context_length=layout.context_length,
        stack=StackFacts(
            schema=label_from_wire(wire.schema, "schema"),
            kv_checksum=checksum_from_wire(wire.kv_checksum).value,
            quantize=layout.quantize,
            kind=tuple(group.kind.value for group in layout.groups),
            dtype=tuple(group.dtype for group in layout.groups),
            encoding=tuple(group.encoding for group in layout.groups),
            layers=tuple(len(group.layers) for group in layout.groups),
            heads=tuple(len(group.heads) for group in layout.groups),
            planes=tuple(", ".join(map(str, group.planes)) for group in layout.groups),
        ),
        tokens_max=wire.tokens_max,
        rooms_max=wire.rooms_max,
        page_tokens=layout.block_tokens,
        group_page_tokens=layout.page_tokens,
        topology=topology_from_wire(wire.topology),
        pid=wire.pid,
        keeps_prefixes=wire.keeps_prefixes,
        computes=wire.computes and side is Side.DECODE,
        engine=label_from_wire(wire.engine, "engine"),
        batch_invariant=wire.batch_invariant,
        whole_prompts=wire.whole_prompts,
        other_side=_other_side_from_wire(wire),
        secret_digest=wire.worker.secret_digest,
        exit_digest=_exit_digest_from_wire(wire.exit_digest),
    )


def _exit_digest_from_wire(digest: bytes) -> bytes:
    """Check the digest of the secret with which the worker's starter can report its exit. Raises
    Malformed."""
    if len(digest) not in (0, DIGEST_BYTES):
        raise Malformed(f"exit_digest must have {DIGEST_BYTES} bytes, or none")
    return digest


def _other_side_from_wire(wire: workers_pb2.RegisterRequest) -> OtherSide | None:
    """Return the facts of the worker's other side if its process serves both prefill and decode, else None.

    Raises Malformed.
    """
    if not wire.HasField("other_side"):
        return None
    other = wire.other_side
    if not other.incarnation or other.incarnation == wire.worker.incarnation:
        raise Malformed("other_side.incarnation must be another one than the worker's")
    return OtherSide(
        Incarnation(other.incarnation),
        process_from_wire(other.process),
        weight_from_wire(other.prefill_weight),
    )


def process_from_wire(name: str) -> str:
    """Check the process name that the two workers of a process for both prefill and decode share. Raises
    Malformed."""
    return name_from_wire(name, "process")


def weight_from_wire(prefill_weight: int) -> int:
    """Check a prefill weight, from 0 to 100. Raises Malformed."""
    if not 0 <= prefill_weight <= WEIGHT_TOTAL:
        raise Malformed(f"prefill_weight must be 0 to {WEIGHT_TOTAL}")
    return prefill_weight


def routers_to_wire(
    routers: Mapping[Opener, str], gone: Sequence[Opener], *, is_only_one: bool
) -> group_pb2.Bootstraps:
    """Convert the routers of a worker to the message for its ranks.

    `routers`: address of each router by its opener. `gone`: openers whose processes are gone. `is_only_one`:
    whether the leader knows one address only.
    """
    message = group_pb2.Bootstraps(gone=gone, is_only_one=is_only_one)
    for opener, address in routers.items():
        message.bootstraps.add(opener=opener, address=address)
    return message


def routers_from_wire(wire: group_pb2.Bootstraps) -> tuple[dict[Opener, str], list[Opener], bool]:
    """Convert that message to the three arguments of `routers_to_wire`."""
    routers = {Opener(each.opener): each.address for each in wire.bootstraps}
    return routers, [*map(Opener, wire.gone)], wire.is_only_one
