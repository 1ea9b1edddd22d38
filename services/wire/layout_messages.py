"""Conversion of a worker's KV layout, topology and checksum mode to protobuf messages and back.

A message with values that make no sense raises `Malformed` (`malformed-is-contained`).
"""

from itertools import pairwise

from baton.pages.kv_checksum import KvChecksum
from baton.pages.layout import (
    DTYPE_BYTES,
    GROUPS_MAX,
    NOT_QUANTIZED,
    PLAIN,
    PLANES_MAX,
    KvGroup,
    KvKind,
    KvLayout,
    KvPlane,
)
from baton.topology import Topology
from baton.wire.baton.v1 import workers_pb2
from baton.wire.malformed import Malformed
from baton.wire.text_validation import label_from_wire


def layout_to_wire(layout: KvLayout) -> workers_pb2.KvLayout:
    return workers_pb2.KvLayout(
        model=layout.model,
        context_length=layout.context_length,
        quantize=layout.quantize,
        groups=[
            workers_pb2.KvGroup(
                kind=group.kind.value,
                dtype=group.dtype,
                encoding=group.encoding,
                page_tokens=group.page_tokens,
                layers=group.layers,
                heads=group.heads,
                planes=[
                    workers_pb2.KvPlane(name=plane.name, elements=plane.elements) for plane in group.planes
                ],
            )
            for group in layout.groups
        ],
    )


def layout_from_wire(wire: workers_pb2.KvLayout) -> KvLayout:
    """Convert a message to a KV layout. Raises Malformed if its values contradict each other or are out of
    range."""
    if not 1 <= len(wire.groups) <= GROUPS_MAX:
        raise Malformed(f"layout has {len(wire.groups)} groups, from 1 to {GROUPS_MAX} are wanted")
    groups = tuple(map(_group_from_wire, wire.groups))
    layers = [(group.kind, layer) for group in groups for layer in group.layers]
    if not layers:
        raise Malformed("layout has an empty dimension")
    if len(set(layers)) < len(layers):
        raise Malformed("layout.groups of one kind name a layer twice")
    model, quantize = (
        label_from_wire(wire.model, "layout.model"),
        label_from_wire(wire.quantize, "layout.quantize"),
    )
    return KvLayout(model, groups, wire.context_length, quantize or NOT_QUANTIZED)


def _group_from_wire(wire: workers_pb2.KvGroup) -> KvGroup:
    try:
        kind = KvKind(wire.kind)
    except ValueError as error:
        raise Malformed(f"layout.kind has the unknown value {wire.kind!r}") from error
    if wire.dtype not in DTYPE_BYTES:
        raise Malformed(f"layout.dtype has the unknown value {wire.dtype!r}")
    if not (wire.page_tokens and wire.heads and wire.planes and all(each.elements for each in wire.planes)):
        raise Malformed("layout has an empty dimension")
    if len(wire.planes) > PLANES_MAX:
        raise Malformed(f"layout.planes are {len(wire.planes)}, at most {PLANES_MAX} are wanted")
    for name in ("layers", "heads"):
        if any(one >= other for one, other in pairwise(getattr(wire, name))):
            raise Malformed(f"layout.{name} are not in ascending order, each once")
    planes = tuple(
        KvPlane(label_from_wire(each.name, "layout.planes.name"), each.elements) for each in wire.planes
    )
    encoding = label_from_wire(wire.encoding, "layout.encoding") or PLAIN
    return KvGroup(
        kind, wire.dtype, wire.page_tokens, tuple(wire.layers), tuple(wire.heads), planes, encoding
    )


def topology_to_wire(topology: Topology) -> workers_pb2.Topology:
    return workers_pb2.Topology(
        tensor_parallel=topology.tensor,
        pipeline_parallel=topology.pipeline,
        context_parallel=topology.context,
    )


def topology_from_wire(wire: workers_pb2.Topology) -> Topology:
    """Convert a message to a topology (ranks per parallel dimension). A dimension that is not given counts as
    1.

    Raises Malformed if it has more ranks than a worker may have.
    """
    try:
        return Topology(wire.tensor_parallel or 1, wire.pipeline_parallel or 1, wire.context_parallel or 1)
    except ValueError as error:
        raise Malformed(f"topology: {error}") from error


def checksum_from_wire(wire: str) -> KvChecksum:
    """Return the KV checksum mode that a worker registers. A worker that names none uses the oldest mode."""
    try:
        return KvChecksum(wire or KvChecksum.RECORD.value)
    except ValueError as error:
        raise Malformed(f"kv_checksum has the unknown value {wire!r}") from error
