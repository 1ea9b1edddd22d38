"""Validation of peers' transfer endpoints and of the byte ranges of a write (a put).

A peer's endpoint arrives over gRPC and is not trusted. It is checked here, once, before a backend uses it.
Every range of a put has to lie inside the source region and inside the peer's region.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

from baton.transfer.transfer_protocol import Endpoint, OutOfRegion, Region, Run, TransferError

ADDRESS_END: Final = 1 << 64
REGIONS_MAX: Final = 16
AGENT_CHARS_MAX: Final = 128
METADATA_BYTES_MAX: Final = 1 << 20
DEVICE: Final = re.compile(r"cpu|cuda:(\d{1,3})", re.ASCII)


def check_region(region: Region) -> None:
    """Raise TransferError unless `region` has a name, a length, a 64-bit address range and a known device."""
    if not region.name:
        raise TransferError("a region has no name")
    if region.length < 1:
        raise TransferError(f"region {region.name!r} has {region.length} bytes")
    if region.address < 1 or region.address + region.length > ADDRESS_END:
        raise TransferError(
            f"region {region.name!r} lies outside 64 bits: {region.address:#x} + {region.length}"
        )
    if DEVICE.fullmatch(region.device) is None:
        raise TransferError(
            f'region {region.name!r}: device is "cpu" or "cuda:N", not {region.device[:32]!r}'
        )


def device_index(device: str) -> int | None:
    """Return N for the device "cuda:N", or None for main memory. `device` was checked by `check_region`."""
    found = DEVICE.fullmatch(device)
    return int(found[1]) if found and found[1] else None


def check_endpoint(peer: Endpoint) -> None:
    """Check every field of the endpoint that a peer sent. Raises TransferError, which names the invalid
    field."""
    if not 1 <= peer.incarnation < ADDRESS_END:
        raise TransferError(f"endpoint: incarnation {peer.incarnation} is not a positive 64-bit number")
    if not peer.agent or len(peer.agent) > AGENT_CHARS_MAX or not peer.agent.isprintable():
        raise TransferError(f"endpoint: agent name {peer.agent[:AGENT_CHARS_MAX]!r} is not usable")
    if not 1 <= len(peer.metadata) <= METADATA_BYTES_MAX:
        raise TransferError(f"endpoint {peer.agent}: {len(peer.metadata)} bytes of metadata")
    if len(peer.regions) > REGIONS_MAX:
        raise TransferError(
            f"endpoint {peer.agent}: {len(peer.regions)} regions, at most {REGIONS_MAX} are taken"
        )
    if len({region.name for region in peer.regions}) != len(peer.regions):
        raise TransferError(f"endpoint {peer.agent}: two regions of one name")
    for region in peer.regions:
        check_region(region)


def region_named(name: str, regions: Mapping[str, Region], whose: str) -> Region:
    """Return the memory region called `name`. Raises TransferError if there is none.

    `whose`: owner of the regions, for the error text.
    """
    region = regions.get(name)
    if region is None:
        raise TransferError(f"{whose} has no region {name!r}")
    return region


def check_runs(runs: Sequence[Run], source: Region, target: Region) -> None:
    """Check the byte ranges (runs) of one put (one-sided write) against its two memory regions.

    Raises OutOfRegion if a run is empty or exceeds `source` or `target`. Raises TransferError if there are no
    runs.
    """
    if not runs:
        raise TransferError("a put of no runs")
    source_length, target_length = source.length, target.length
    for at, to, length in runs:
        if length < 1 or not 0 <= at <= source_length - length or not 0 <= to <= target_length - length:
            raise OutOfRegion(
                f"run {at} -> {to}, {length} bytes, does not lie in region "
                f"{source.name!r}: {source_length} bytes here, {target_length} at the peer"
            )
