"""Which faults does an in-process network have, and how often?"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """One seed is one schedule: the same calls in the same order meet the same faults.

    Shares lie in [0, 1]; delays are counted in the fabric's steps, of which each `poll` and each
    `progress` of any endpoint is one. Raises ValueError on anything else.
    """

    seed: int = 0
    delay_steps_max: int = 0
    """Each run of a put lands after 1 to 1 + this many steps, whatever was posted before it: runs of one put
    land one by one, and puts overtake each other."""
    hold_share: float = 0.0
    """Of puts: held, and landed late."""
    hold_steps: int = 0
    """How much later a held put lands; its sender may have disconnected or closed long ago."""
    fail_share: float = 0.0
    """Of puts: end FAILED, after some of their runs may have landed."""
    blind_share: float = 0.0
    """Of puts toward an endpoint that has closed: land all the same, at the addresses that it had told, as
    cross-memory attach does, which asks no endpoint. Its memory must stay mapped until they have."""

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
"""Every put lands at the next step, none is held."""
