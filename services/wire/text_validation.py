"""Validation of names, addresses and other texts in messages, by the same rules as for settings.

A worker's name and address come from its settings. A message made by other means has to obey the same rules.
Names appear in logs, metrics, timelines, terminals and pages, and processes connect to the addresses.
"""

import re
from typing import Final

from baton.runtime.setting_kinds import ADDRESS, NAME, SettingKind
from baton.wire.malformed import Malformed

SHOWN_CHARS_MAX: Final = 80
"""Most characters of an invalid text that the error repeats."""
REQUEST_ID_CHARACTER: Final = "[A-Za-z0-9._:/+=@-]"
REQUEST_ID_CHARS_MAX: Final = 256
"""Most characters of a request id in a message. Clients may give up to 128; a suffix numbers the prompts of
one request."""
REQUEST_ID: Final = re.compile(f"{REQUEST_ID_CHARACTER}{{0,{REQUEST_ID_CHARS_MAX}}}")
LABEL: Final = re.compile(r"[ -~]{0,128}")
"""Pattern of a label in a message: a short text that is only compared and displayed, such as a model's
fingerprint."""
REPLACEMENT: Final = "\ufffd"


def name_from_wire(text: str, field: str) -> str:
    """Check the name of a worker or process. `field`: its path in the message. Raises Malformed."""
    return _of_kind(NAME, text, field)


def address_from_wire(text: str, field: str) -> str:
    """Check the address of a worker, as host:port. `field`: its path in the message. Raises Malformed."""
    return _of_kind(ADDRESS, text, field)


def request_id_from_wire(text: str) -> str:
    """Check a request id, which may be empty. Raises Malformed."""
    if len(text) > REQUEST_ID_CHARS_MAX:
        raise Malformed(f"request_id has more than {REQUEST_ID_CHARS_MAX} characters")
    if not REQUEST_ID.fullmatch(text):
        raise Malformed("request_id has to be letters, digits or ._:/+=@- characters")
    return text


def label_from_wire(text: str, field: str) -> str:
    """Check a label (see LABEL). `field`: its path in the message. Raises Malformed."""
    if not LABEL.fullmatch(text):
        raise Malformed(f"{field} has to be up to 128 printable ASCII characters")
    return text


def shown_from_wire(text: str, chars_max: int) -> str:
    """Return a text made safe for display: one line, no control characters, cut to `chars_max` characters."""
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
