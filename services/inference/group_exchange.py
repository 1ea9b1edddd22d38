"""Exchange of KV groups between the ranks of a worker, as JSON in tensors of one size."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

import torch

from baton.pages.layout import KvGroup, KvKind, KvPlane
from baton.runtime.errors import StartupError

GROUPS_BYTES: Final = 2**16
"""Bytes of a tensor with one rank's groups."""


def encode_groups(groups: Sequence[KvGroup]) -> torch.Tensor:
    """Return `groups` as a tensor of GROUPS_BYTES bytes. Raises StartupError if they are larger."""
    text = json.dumps([{**asdict(group), "kind": group.kind.value} for group in groups]).encode()
    if len(text) > GROUPS_BYTES:
        raise StartupError(f"the KV groups of a rank take {len(text)} bytes, at most {GROUPS_BYTES} are sent")
    return torch.tensor(list(text.ljust(GROUPS_BYTES)), dtype=torch.uint8)


def decode_groups(table: torch.Tensor) -> list[KvGroup]:
    """Return the groups that another rank has encoded."""
    return [
        KvGroup(
            KvKind(each["kind"]),
            each["dtype"],
            each["page_tokens"],
            tuple(each["layers"]),
            tuple(each["heads"]),
            tuple(KvPlane(**plane) for plane in each["planes"]),
            each["encoding"],
        )
        for each in json.loads(bytes(table.tolist()))
    ]
