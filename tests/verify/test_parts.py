"""Is a part of `make verify` sound only if it ran and found nothing?"""

from typing import Any

import pytest

from tests.verify.parts import Kernels

RAN: dict[str, Any] = {"passed": 3, "skipped": 0, "failed": {}}


@pytest.mark.parametrize(
    ("found", "sound"),
    [
        (RAN, True),
        (RAN | {"passed": 0, "skipped": 3}, True),
        (RAN | {"failed": {"a test": "why"}}, False),
        (RAN | {"passed": 0}, False),
        ({}, False),
    ],
    ids=["passed", "no kernel for this CPU", "one failed", "none there", "not run"],
)
def test_kernels_are_sound_where_some_ran_and_none_failed(found: dict[str, Any], sound: bool) -> None:
    assert Kernels(found=found).sound is sound
