"""Tests of the exchange of KV groups between ranks."""

import pytest

from baton.inference.group_exchange import decode_groups, encode_groups
from baton.pages.layout import KvPlane, full_group, state_group
from baton.runtime.errors import StartupError


def test_groups_arrive_as_they_were_sent() -> None:
    groups = [
        full_group("bfloat16", 16, (0, 2), (0, 1), 64),
        state_group("float32", 512, (1,), (0,), (KvPlane("block", 80),), "vllm-gdn"),
    ]
    assert decode_groups(encode_groups(groups)) == groups


def test_more_than_a_tensor_holds_is_refused() -> None:
    with pytest.raises(StartupError, match="at most 65536 are sent"):
        encode_groups([full_group("bfloat16", 16, tuple(range(20_000)), (0,), 64)])
