"""API keys from a setting, and from a file that may change while the process runs.

A presented key is compared with all valid keys in constant time, as digests under a secret of this process.
No key is ever shown.
"""

import hmac
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from baton.runtime.errors import StartupError
from baton.runtime.file_changes import FileChanges
from baton.runtime.logging import Log
from baton.runtime.setting_kinds import BadValue, SettingKind

log = Log(__name__)

KEYS_MAX: Final = 1000
"""Most API keys of a server, because the key of each request is compared with all of them."""
FILE_BYTES_MAX: Final = 1 << 20
KEY: Final = re.compile(r"[!-~]{16,512}", re.ASCII)
ALLOWED: Final = "16 to 512 visible ASCII characters"

Caller = bytes
"""Digest that identifies a caller by its API key, without revealing the key."""


def _parse(text: str) -> tuple[str, ...]:
    keys = tuple(key.strip() for key in text.split(",") if key.strip())
    if not all(KEY.fullmatch(key) for key in keys) or not 1 <= len(keys) <= KEYS_MAX:
        raise BadValue  # an empty list would mean an open API by mistake
    return keys


API_KEYS: Final[SettingKind[tuple[str, ...]]] = SettingKind(
    "KEYS", f"1 to {KEYS_MAX} keys of {ALLOWED}, separated by commas", _parse, ",".join
)


FILE_FLAG: Final = "--api-key-file"
ADMIN_FILE_FLAG: Final = "--admin-api-key-file"


class ApiKeys:
    """API keys that clients may authenticate with, from a setting and from a file.

    The file is read again when it changes.
    """

    def __init__(
        self,
        given: Sequence[str],
        file: Path | None,
        changes: Callable[[Sequence[Path]], FileChanges] = FileChanges,
        flag: str = FILE_FLAG,
    ) -> None:
        """Take the given API keys and read those in the file.

        `changes`: creates a detector of changes of files. `flag`: the setting that names the file, for
        errors.
        Raises StartupError if there is no key at all, or if the file cannot be read or holds anything but
        keys.
        """
        self._secret = secrets.token_bytes(32)
        self._given = tuple(map(self._digest_of, given))
        self._file = file
        self._flag = flag
        self._changes = changes([] if file is None else [file])
        keys = [] if file is None else _all_good(file, flag)
        if not keys and not given:
            raise StartupError(f"{flag} {file} holds no key: nobody could ask for anything")
        self._read = tuple(map(self._digest_of, keys))
        self._first = (*self._given, *self._read)[0]
        self._several = False
        self._count()

    @property
    def several(self) -> bool:
        """Whether there has been more than one API key at any time since the start.

        Results of an earlier key stay in caches and timelines after the key is removed.
        """
        self._look()
        return self._several

    def caller_of(self, key: str) -> Caller | None:
        """Return the digest that identifies the caller with this API key, or None if the key is not valid."""
        self._look()
        presented = self._digest_of(key)
        found = None
        for good in (*self._given, *self._read):
            if hmac.compare_digest(good, presented):
                found = good
        return found

    def _look(self) -> None:
        if self._file is not None and self._changes.seen():
            self._read_anew(self._file)

    def _count(self) -> None:
        self._several = self._several or any(key != self._first for key in (*self._given, *self._read))

    def _digest_of(self, key: str) -> Caller:
        return hmac.digest(self._secret, key.encode("utf-8", "surrogatepass"), "sha256")

    def _read_anew(self, file: Path) -> None:
        """Read the changed file of API keys.

        Lines that are not keys are left out, so that removed keys become invalid in any case. If the file
        cannot be read, the former keys stay valid.
        """
        try:
            lines = _lines(file, self._flag)
        except StartupError as error:
            message = "the changed API keys cannot be read: the former ones stay"
            log.error(message, cause=str(error))  # noqa: TRY400
            return
        good = [line for _, line in lines if KEY.fullmatch(line)]
        self._read = tuple(map(self._digest_of, good))
        log.info("the changed API keys were read", keys=len(good))
        had_one = not self._several
        self._count()
        if had_one and self._several:
            log.info("there are several keys now: each is a tenant of its own", file=str(file))
        if len(good) < len(lines):
            number = next(number for number, line in lines if not KEY.fullmatch(line))
            log.error("a line of the API keys is not a key and was left out", line=number)


def first_key(given: Sequence[str], file: str, flag: str = FILE_FLAG) -> str:
    """Return one of the valid API keys, with which the launcher makes its own requests. Return "" if there is
    none. Raises StartupError."""
    return next(iter((*given, *(_all_good(Path(file), flag) if file else ()))), "")


def has_several_keys(given: Sequence[str], file: str) -> bool:
    """Return whether a setting and a file together have more than one API key. Raises StartupError."""
    return len({*given, *(_all_good(Path(file), FILE_FLAG) if file else ())}) > 1


def _all_good(file: Path, flag: str) -> list[str]:
    """Return the API keys in a file. Raises StartupError, which names the line, for a line that is no key."""
    lines = _lines(file, flag)
    for number, line in lines:
        if not KEY.fullmatch(line):
            raise StartupError(f"{flag} {file}, line {number}: a key is {ALLOWED}")
    return [line for _, line in lines]


def _lines(file: Path, flag: str) -> list[tuple[int, str]]:
    """Return the lines of a file of API keys, with their line numbers. Raises StartupError.

    Empty lines and comments are left out.
    """
    try:
        with file.open("rb") as opened:
            text = opened.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise StartupError(f"{flag} {file} cannot be read: {error.strerror}") from None
    stripped = [line.strip() for line in text.decode("utf-8", "replace").splitlines()]
    lines = [(number, line) for number, line in enumerate(stripped, 1) if line and not line.startswith("#")]
    if len(text) > FILE_BYTES_MAX or len(lines) > KEYS_MAX:
        raise StartupError(f"{flag} {file} holds more than {KEYS_MAX} keys or {FILE_BYTES_MAX} bytes")
    return lines
