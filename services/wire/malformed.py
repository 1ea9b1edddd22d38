"""Refusal of a message that makes no sense."""

from baton.rooms.errors import Refusal


class Malformed(Refusal):
    """A message decodes, but makes no sense. The text names the field."""
