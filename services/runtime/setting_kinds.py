"""Kinds of settings: how the text of a flag or environment variable becomes a value, and back.

For every kind `parse(show(value)) == value`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")

SIZE_UNITS: Final = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
    "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40,
}  # fmt: skip
DURATION_UNITS_MS: Final = {"": 1, "MS": 1, "S": 1_000, "M": 60_000, "MIN": 60_000, "H": 3_600_000}
QUANTITY: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)
CPU_MAX: Final = 8191
ORIGIN: Final = re.compile(
    r"(?!http://[^/]*:80$|https://[^/]*:443$)[a-z][a-z0-9+.-]*://[a-z0-9_.:\[\]-]+", re.ASCII
)
HEADER_NAME: Final = re.compile(r"[A-Za-z0-9-]{1,64}", re.ASCII)
NAME_CHARS_MAX: Final = 128
HOST_PATTERN: Final = re.compile(r"[A-Za-z0-9._:%-]{1,255}", re.ASCII)
HOST_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?", re.ASCII)


class BadValue(ValueError):
    """The text is not a value of this kind of setting. The caller names the setting in its own error."""


@dataclass(frozen=True, slots=True)
class SettingKind(Generic[T]):
    """One kind of setting value, such as a port or a duration, with its conversion from and to text."""

    metavar: str
    """Word that stands for the setting's value in `--help`, behind the flag."""
    allowed: str
    """Description of a setting's allowed values, with an example where needed. It ends the error text "… is
    not allowed: use"."""
    parse: Callable[[str], T]
    """Function that converts a text to a value. Raises ValueError for a text that is not allowed."""
    show: Callable[[T], str] = str


def _text(text: str) -> str:
    if "\0" in text or "\n" in text:
        raise BadValue
    return text


def _whole(text: str, least: int, most: int) -> int:
    if not re.fullmatch(r"-?\d{1,12}", text, re.ASCII) or not least <= int(text) <= most:
        raise BadValue
    return int(text)


def _quantity(text: str, units: dict[str, int]) -> int:
    match = QUANTITY.fullmatch(text.strip())
    if match is None or match[2].upper() not in units:
        raise BadValue
    value = float(match[1]) * units[match[2].upper()]
    if not 1 <= value <= 2**53:
        raise BadValue
    return int(value)


def _show_size(value: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value % scale == 0:
            return f"{value // scale}{unit}"
    return str(value)


def _show_duration(value: int) -> str:
    return f"{value // 1000}s" if value % 1000 == 0 else f"{value}ms"


def split_address(text: str) -> tuple[str, int]:
    """Split `host:port` or `[IPv6 host]:port` into host and port. Raises BadValue."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise BadValue
    if not colon or not HOST_PATTERN.fullmatch(host):
        raise BadValue
    return host, _whole(port, 1, 65535)


def join_address(host: str, port: int) -> str:
    """Join host and port to one text, as `host:port` or `[IPv6 host]:port`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _address(text: str) -> str:
    return join_address(*split_address(text))


def _addresses(text: str) -> tuple[str, ...]:
    addresses = tuple(_address(each.strip()) for each in text.split(","))
    if len(set(addresses)) < len(addresses):
        raise BadValue
    return addresses


def _share(text: str) -> float:
    if not re.fullmatch(r"\d(\.\d{1,9})?", text, re.ASCII) or float(text) > 1:
        raise BadValue
    return float(text)


def _show_share(value: float) -> str:
    return f"{value:.9f}".rstrip("0").rstrip(".")


def _switch(text: str) -> bool:
    if text.lower() in ("true", "1", "yes", "on"):
        return True
    if text.lower() in ("false", "0", "no", "off"):
        return False
    raise BadValue


def _cpus(text: str) -> tuple[int, ...]:
    cpus: set[int] = set()
    for part in text.split(",") if text.strip() else ():
        first, dash, last = part.strip().partition("-")
        low = _whole(first, 0, CPU_MAX)
        high = _whole(last, 0, CPU_MAX) if dash else low
        if high < low:
            raise BadValue
        cpus.update(range(low, high + 1))
    return tuple(sorted(cpus))


def _show_cpus(cpus: tuple[int, ...]) -> str:
    runs: list[tuple[int, int]] = []
    for cpu in cpus:
        if runs and runs[-1][1] == cpu - 1:
            runs[-1] = (runs[-1][0], cpu)
        else:
            runs.append((cpu, cpu))
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _host_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not all(HOST_NAME.fullmatch(name) for name in names):
        raise BadValue
    return names


def _header(text: str) -> str:
    """Return an HTTP header's name in lower case. Raises BadValue if it is not a valid name."""
    if text and not HEADER_NAME.fullmatch(text):
        raise BadValue
    return text.lower()


def _origins(text: str) -> tuple[str, ...]:
    origins = tuple(each.strip() for each in text.split(",") if each.strip())
    if not all(each == "*" or ORIGIN.fullmatch(each) for each in origins):
        raise BadValue
    return origins


def choices(*allowed: str) -> SettingKind[str]:
    """Return the kind of setting whose value is one of the words `allowed`."""

    def parse(text: str) -> str:
        if text not in allowed:
            raise BadValue
        return text

    return SettingKind("|".join(allowed), f"one of {', '.join(allowed)}", parse)


def matching(pattern: str, metavar: str, allowed: str) -> SettingKind[str]:
    """Return the kind of setting whose text as a whole matches the regular expression `pattern`."""

    def parse(text: str) -> str:
        if not re.fullmatch(pattern, text, re.ASCII):
            raise BadValue
        return text

    return SettingKind(metavar, allowed, parse)


def optional(kind: SettingKind[T], absent: U) -> SettingKind[T | U]:
    """Return the kind of setting with a value of `kind`, or with an empty text that stands for `absent`."""

    def show(value: T | U) -> str:
        return "" if value == absent else kind.show(value)  # type: ignore[arg-type]

    allowed = f"{kind.allowed}, or nothing"
    return SettingKind(kind.metavar, allowed, lambda text: kind.parse(text) if text else absent, show)


def number(least: int, most: int = 10**12 - 1) -> SettingKind[int]:
    """Return the kind of setting for whole numbers from `least` to `most`, both included."""
    span = f"a whole number >= {least}" if most == 10**12 - 1 else f"a whole number from {least} to {most}"
    return SettingKind("N", span, lambda text: _whole(text, least, most))


TEXT: Final = SettingKind("TEXT", "text on one line", _text)
POSITIVE: Final = number(1)
PORT: Final = SettingKind(
    "PORT", "a port from 0 (any free one) to 65535", lambda text: _whole(text, 0, 65535)
)
SIZE: Final = SettingKind(
    "SIZE",
    "a positive number of bytes, with KB, MB, GB, TB, KiB, MiB, GiB or TiB (also Ki, Mi, Gi, Ti) if wanted,"
    " such as 512MiB",
    lambda text: _quantity(text, SIZE_UNITS),
    _show_size,
)
DURATION_MS: Final = SettingKind(
    "TIME",
    "a positive time with ms, s, m or h, such as 3s or 500ms (a bare number is milliseconds)",
    lambda text: _quantity(text, DURATION_UNITS_MS),
    _show_duration,
)
ADDRESS: Final = SettingKind("HOST:PORT", "host:port, such as 127.0.0.1:8100", _address)
ADDRESSES: Final = SettingKind(
    "HOST:PORT,…",
    "different host:port, separated by commas, such as 10.0.0.1:8100,10.0.0.2:8100",
    _addresses,
    ",".join,
)
FILE: Final = matching(r"[^\0\n]+", "FILE", "the path of a file")
HOST: Final = matching(HOST_PATTERN.pattern, "HOST", "an address or host name without a port")
NAME: Final = matching(
    f"[A-Za-z0-9._-]{{0,{NAME_CHARS_MAX}}}",
    "NAME",
    f"up to {NAME_CHARS_MAX} letters, digits, dots, dashes or underscores",
)
HOST_NAMES: Final = SettingKind(
    "NAMES", "host names without ports, separated by commas, such as llm.example,llm", _host_names, ",".join
)
ORIGINS: Final = SettingKind(
    "ORIGINS",
    "origins as browsers send them (in lower case, without a path, with a port where it is not the scheme's"
    " own), separated by commas, such as https://app.example,http://localhost:3000, or *",
    _origins,
    ",".join,
)
HEADER: Final = SettingKind(
    "NAME", "a name of an HTTP header, such as X-Tenant, or nothing for none", _header, str
)
SHARE: Final = SettingKind("SHARE", "a number from 0 to 1, such as 0.05", _share, _show_share)
SWITCH: Final = SettingKind("true|false", "true or false", _switch, lambda value: str(value).lower())
CPUS: Final = SettingKind("CPUS", "a list of cores such as 0,2-3, or nothing for all", _cpus, _show_cpus)
