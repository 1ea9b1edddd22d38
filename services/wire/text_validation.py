"""Names, addresses and other texts of messages, by the rules that settings obey.

A worker's name and address come from its settings. Who writes a message by other means is bound by the same
rules: names stand in logs, metrics, timelines, terminals and pages, and addresses are connected to.
"""

import re
from typing import Final

from baton.runtime.setting_kinds import ADDRESS, NAME, SettingKind
from baton.wire.malformed import Malformed

SHOWN_CHARS_MAX: Final = 80
"""Most of a refused text that its refusal repeats."""
REQUEST_ID_CHARACTER: Final = "[A-Za-z0-9._:/+=@-]"
REQUEST_ID_CHARS_MAX: Final = 256
"""Callers give up to 128; prompts of one request are numbered."""
REQUEST_ID: Final = re.compile(f"{REQUEST_ID_CHARACTER}{{0,{REQUEST_ID_CHARS_MAX}}}")
LABEL: Final = re.compile(r"[ -~]{0,128}")
"""A word that is compared, and shown where it differs: a fingerprint, a schema, a kind."""
REPLACEMENT: Final = "\ufffd"


def name_from_wire(text: str, field: str) -> str:
    """The name of a worker or of a process. `field`: its path in the message. Raises Malformed."""
    return _of_kind(NAME, text, field)


def address_from_wire(text: str, field: str) -> str:
    """The address of a worker, as host:port. `field`: its path in the message. Raises Malformed."""
    return _of_kind(ADDRESS, text, field)


def request_id_from_wire(text: str) -> str:
    """The id of a request; it may be empty. Raises Malformed."""
    if len(text) > REQUEST_ID_CHARS_MAX:
        raise Malformed(f"request_id has more than {REQUEST_ID_CHARS_MAX} characters")
    if not REQUEST_ID.fullmatch(text):
        raise Malformed("request_id has to be letters, digits or ._:/+=@- characters")
    return text


def label_from_wire(text: str, field: str) -> str:
    """A word that is compared with another's. Raises Malformed."""
    if not LABEL.fullmatch(text):
        raise Malformed(f"{field} has to be up to 128 printable ASCII characters")
    return text


def shown_from_wire(text: str, chars_max: int) -> str:
    """A text for people, on one line and without control characters, cut to `chars_max`."""
    cut = text[:chars_max]
    if cut.isprintable():
        return cut
    return "".join(each if each.isprintable() else " " if each.isspace() else REPLACEMENT for each in cut)


def _of_kind(kind: SettingKind[str], text: str, field: str) -> str:
    try:
        if text:
            return kind.parse(text)
    except ValueError:
        pass
    raise Malformed(f"{field}: {text[:SHOWN_CHARS_MAX]!r} is not allowed: use {kind.allowed}")
