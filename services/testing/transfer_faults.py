"""Faults of the simulated in-process network, and how often each of them occurs."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """Plan of faults for transfers over a simulated network.

    One seed is one schedule: the same calls in the same order meet the same faults. Shares lie in [0, 1].
    Delays are in steps of the fabric, one for each `poll` and each `progress` of any endpoint. Raises
    ValueError for other values.
    """

    seed: int = 0
    delay_steps_max: int = 0
    """Most steps by which each byte range of a put is delayed, chosen at random. So the ranges of a put land
    one by one, and puts overtake each other."""
    hold_share: float = 0.0
    """Share of puts (one-sided writes) that land late, by `hold_steps`."""
    hold_steps: int = 0
    """Additional steps of the simulated network after which a late put lands. Its sender may have
    disconnected or closed by then."""
    fail_share: float = 0.0
    """Share of puts (one-sided writes) that end FAILED. Some of their byte ranges may have landed before."""
    blind_share: float = 0.0
    """Share of puts (one-sided writes) to a closed endpoint that land all the same, at its former addresses.

    Cross-memory attach does that, because it ignores endpoints. The memory must stay mapped until they have
    landed.
    """

    def __post_init__(self) -> None:
        for name in ("hold_share", "fail_share", "blind_share"):
            share = getattr(self, name)
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"{name} is a share between 0 and 1, not {share}")
        for name in ("delay_steps_max", "hold_steps"):
            steps = getattr(self, name)
            if steps < 0:
                raise ValueError(f"{name} is a number of steps, not {steps}")


NO_FAULTS: Final = FaultPlan()
"""Plan without faults: every put lands at the next step."""
