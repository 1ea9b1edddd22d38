"""How long are prompts and answers, when they are not all alike?

512               always 512
128-1024          any length from 128 to 1024
128@3,1024        three of four are 128 long, one is 1024
"""

import random
import re
from dataclasses import dataclass
from typing import Final

PART: Final = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?(?:@(\d{1,5}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of tokens and how often each is drawn."""

    parts: tuple[tuple[int, int, int], ...]
    """(shortest, longest, weight)"""

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Raises ValueError."""
        parts = []
        for each in text.split(","):
            match = PART.fullmatch(each.strip())
            if match is None:
                raise ValueError(f"{text!r}: it has to be like 512, 128-1024 or 128@3,1024")
            low = int(match[1])
            high = int(match[2] or low)
            weight = int(match[3] or 1)
            if not 1 <= low <= high or weight < 1:
                raise ValueError(f"{text!r}: a length and a weight are at least 1, and a range ascends")
            parts.append((low, high, weight))
        return cls(tuple(parts))

    @property
    def longest(self) -> int:
        return max(high for _, high, _ in self.parts)

    def draw(self, rng: random.Random) -> int:
        low, high, _ = rng.choices(self.parts, [weight for *_, weight in self.parts])[0]
        return rng.randint(low, high)

    def __str__(self) -> str:
        return ",".join(
            (str(low) if low == high else f"{low}-{high}") + ("" if weight == 1 else f"@{weight}")
            for low, high, weight in self.parts
        )
