"""Where does each setting's value come from?

Each service has one frozen dataclass whose fields are made by `setting(…)`: the default, the help and
the kind are stated once, and the flags, the variables and the help text follow from them. A flag wins
over its `BATON_*` variable, which wins over the default. Nothing is ignored: a bad value or a
misspelt name is a `SettingsError` that names it and says what is allowed.
"""

import difflib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, TypeVar

from baton.runtime.errors import SettingsError
from baton.runtime.setting_kinds import SettingKind

PREFIX: Final = "BATON_"
SERVICE_LINK: Final = re.compile(
    r"\w+_(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_(TCP|UDP|SCTP)\w*)=|\w+_PORT=(tcp|udp|sctp)://"
)
"""How NAME=VALUE begins where Kubernetes tells of a Service. A misspelt setting may end in _PORT as well."""
VALUE_SHOWN_MAX: Final = 80
URL_PASSWORD: Final = re.compile(r"//[^\s/]*@")
"""Who uses a URL, which is not for everybody who reads the log."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setting:
    """What a dataclass field made by `setting` is called, means and allows."""

    name: str
    default: Any
    help: str
    kind: SettingKind[Any]
    secret: bool = False
    """Given by its variable alone, and never shown: everyone on a machine can read its command lines."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def default_text(self) -> str:
        return self.kind.show(self.default)


def setting(default: T, help: str, kind: SettingKind[T], *, secret: bool = False) -> T:  # noqa: A002
    """A field of a settings class. Typed as its value, which is what a reader of the class sees."""
    return field(default=default, repr=not secret, metadata={"help": help, "kind": kind, "secret": secret})


def settings_of(cls: type) -> tuple[Setting, ...]:
    """The settings of a settings class, in the order they are written."""
    return tuple(
        Setting(f.name, f.default, f.metadata["help"], f.metadata["kind"], f.metadata["secret"])
        for f in fields(cls)
    )


def variables_of(*classes: type) -> frozenset[str]:
    """The `BATON_*` names that these classes read."""
    return frozenset(s.variable for cls in classes for s in settings_of(cls))


def load(
    cls: type[T],
    flags: Mapping[str, str | None],
    environ: Mapping[str, str],
    also_known: Collection[str] = (),
) -> T:
    """Build `cls` from flags (by field name; None or missing: not given), variables and defaults.

    `also_known` are the `BATON_*` names that other services read: they are no mistake here.
    Raises SettingsError.
    """
    known = {s.name: s for s in settings_of(cls)}
    refuse_unknown(environ, {s.variable for s in known.values()} | set(also_known))
    for name in flags:
        if name not in known:
            flag = "--" + name.replace("_", "-")
            raise SettingsError(f"{flag} is unknown{_nearest(flag, [s.flag for s in known.values()])}")
    values: dict[str, Any] = {}
    for name, each in known.items():
        given = flags.get(name)
        if given is not None and each.secret:
            raise SettingsError(
                f"{each.flag} is no flag, since command lines can be read: set {each.variable}"
            )
        if given is not None:
            values[name] = _parse(each, each.flag, given)
        elif each.variable in environ:
            values[name] = _parse(each, each.variable, environ[each.variable])
    return cls(**values)


def refuse_unknown(environ: Mapping[str, str], known: Collection[str]) -> None:
    """Raise SettingsError for a `BATON_*` variable that nobody reads."""
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in known:
            continue
        if SERVICE_LINK.match(f"{variable}={environ[variable]}"):
            raise SettingsError(
                f"{variable} is not a setting; it looks like a Kubernetes service link: "
                "set enableServiceLinks: false in the pod's spec"
            )
        raise SettingsError(f"the variable {variable} is unknown{_nearest(variable, known)}")


def to_flags(settings: object) -> list[str]:
    """The command line that makes `load` build an equal object, secrets aside, from an empty environment."""
    given: list[str] = []
    for each in settings_of(type(settings)):
        value = getattr(settings, each.name)
        if value != each.default and not each.secret:
            given += [each.flag, each.kind.show(value)]
    return given


def to_environ(settings: object) -> dict[str, str]:
    """The variables that `load` needs beside `to_flags`: the secrets, for a child's environment."""
    return {
        each.variable: each.kind.show(getattr(settings, each.name))
        for each in settings_of(type(settings))
        if each.secret and getattr(settings, each.name) != each.default
    }


def _parse(each: Setting, source: str, text: str) -> Any:
    try:
        return each.kind.parse(text)
    except ValueError:
        if each.secret:
            raise SettingsError(f"{source}: what it holds is not allowed: use {each.kind.allowed}") from None
        plain = URL_PASSWORD.sub("//…@", text)
        shown = plain if len(plain) <= VALUE_SHOWN_MAX else plain[:VALUE_SHOWN_MAX] + "…"
        raise SettingsError(f"{source}: {shown!r} is not allowed: use {each.kind.allowed}") from None


def _nearest(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""
