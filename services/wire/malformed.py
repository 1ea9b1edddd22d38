"""Error for a message that decodes but has invalid values."""

from baton.rooms.errors import Refusal


class Malformed(Refusal):
    """A message decodes, but has invalid or contradictory values. The text names the field."""
