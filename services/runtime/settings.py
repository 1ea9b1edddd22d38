"""Settings of services and commands, read from flags, environment variables and defaults.

Each service has one frozen dataclass with fields made by `setting(…)`. It states the default, the help and
the kind once. Flags, variables and help texts follow from them. A flag wins over its `BATON_*` variable,
which wins over the default. A bad value or a misspelt name raises SettingsError, which names it and says what
is allowed.
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
"""Pattern of the environment variables that Kubernetes sets for each Service. Their names alone do not
suffice, because a misspelt setting may end in _PORT, too."""
VALUE_SHOWN_MAX: Final = 80
URL_PASSWORD: Final = re.compile(r"//[^\s/]*@")
"""Pattern of the user name and password in a URL, which error texts leave out."""

T = TypeVar("T")

Flags = Mapping[str, str | None]
"""Flags of a command as the user typed them, by field name. None stands for a flag that is not given."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Description of one setting: its name, default, help text and kind."""

    name: str
    default: Any
    help: str
    kind: SettingKind[Any]
    secret: bool = False
    """Whether the setting is accepted only as an environment variable, and never shown. All users of a
    machine can read command lines."""
    former_name: str = ""
    """Older name of the setting that is also accepted in flags and variables. Empty if there is none."""

    @property
    def flag(self) -> str:
        return _flag(self.name)

    @property
    def variable(self) -> str:
        return _variable(self.name)

    @property
    def flags(self) -> tuple[str, ...]:
        """Flag of the setting, followed by its older name if there is one."""
        return (self.flag, _flag(self.former_name)) if self.former_name else (self.flag,)

    @property
    def variables(self) -> tuple[str, ...]:
        """Environment variable of the setting, followed by its older name if there is one."""
        return (self.variable, _variable(self.former_name)) if self.former_name else (self.variable,)

    @property
    def default_text(self) -> str:
        return self.kind.show(self.default)


def setting(
    default: T,
    help: str,  # noqa: A002
    kind: SettingKind[T],
    *,
    secret: bool = False,
    former_name: str = "",
) -> T:
    """Return a dataclass field of a settings class. For type checkers it has the type of its value."""
    metadata = {"help": help, "kind": kind, "secret": secret, "former_name": former_name}
    return field(default=default, repr=not secret, metadata=metadata)


def settings_of(cls: type) -> tuple[Setting, ...]:
    """Return the descriptions of all settings of a settings class, in the order of its fields."""
    return tuple(Setting(name=each.name, default=each.default, **each.metadata) for each in fields(cls))


def variables_of(*classes: type) -> frozenset[str]:
    """Return the names of all `BATON_*` variables of these settings classes."""
    return frozenset(name for cls in classes for each in settings_of(cls) for name in each.variables)


def load(
    cls: type[T],
    flags: Mapping[str, str | None],
    environ: Mapping[str, str],
    also_known: Collection[str] = (),
) -> T:
    """Build the settings object `cls` from flags, environment variables and defaults.

    `flags`: texts by field name, None for a flag that is not given. `also_known`: `BATON_*` variables of
    other services, which are not refused as unknown. Raises SettingsError.
    """
    known = {s.name: s for s in settings_of(cls)}
    refuse_unknown(environ, variables_of(cls) | set(also_known))
    for name in flags:
        if name not in known:
            flag = _flag(name)
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
        for variable in each.variables:
            if variable in environ and name not in values:
                values[name] = _parse(each, variable, environ[variable])
    return cls(**values)


def refuse_unknown(environ: Mapping[str, str], known: Collection[str]) -> None:
    """Raise SettingsError if `environ` has a `BATON_*` variable that is not in `known`."""
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
    """Return the flags from which `load` builds equal settings in an empty environment, without secrets."""
    given: list[str] = []
    for each in settings_of(type(settings)):
        value = getattr(settings, each.name)
        if value != each.default and not each.secret:
            given += [each.flag, each.kind.show(value)]
    return given


def to_environ(settings: object) -> dict[str, str]:
    """Return the environment variables that `load` needs besides `to_flags`: those of the secrets."""
    return {
        each.variable: each.kind.show(getattr(settings, each.name))
        for each in settings_of(type(settings))
        if each.secret and getattr(settings, each.name) != each.default
    }


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return PREFIX + name.upper()


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
