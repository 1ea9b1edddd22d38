"""The refusal of a message that makes no sense."""

from baton.rooms.errors import Refusal


class Malformed(Refusal):
    """A message that decodes but makes no sense; names the field."""
