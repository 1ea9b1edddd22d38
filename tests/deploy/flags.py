"""Flags and variables of a rendered container, as its service reads them."""

from typing import Any, Final

from baton.bootstrap.settings import BootstrapSettings
from baton.both.settings import BothSettings
from baton.cli.main import KNOWN
from baton.decode.settings import DecodeSettings
from baton.prefill.settings import PrefillSettings
from baton.runtime.settings import load
from tests.deploy.chart import Pod

CLASSES: Final = {cls.role: cls for cls in (BootstrapSettings, PrefillSettings, DecodeSettings, BothSettings)}

INJECTED: Final = {
    "POD_NAME": "baton-prefill-0",
    "POD_IP": "10.0.0.7",
    "LWS_LEADER_ADDRESS": "baton-prefill-0.baton-prefill.baton",
    "LWS_GROUP_SIZE": "4",
    "LWS_WORKER_INDEX": "1",
}
"""Variables that the downward API and LeaderWorkerSet's controller set."""


def arguments(pod: Pod) -> list[str]:
    """Return the command line, with the variables that Kubernetes fills in."""
    given = []
    for text in pod.main["args"]:
        for name, value in INJECTED.items():
            text = text.replace(f"$({name})", value)
        assert "$(" not in text, f"{pod.owner}: nobody defines what {text} names"
        given.append(text)
    return given


def variables(pod: Pod) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in pod.main["env"]}


def settings(pod: Pod) -> Any:
    """Return the service's settings. Raises SettingsError for an unknown or invalid one."""
    role, *flags = arguments(pod)
    split = [flag.removeprefix("--").split("=", 1) for flag in flags]
    assert all(len(each) == 2 for each in split), f"{pod.owner}: a flag without a value"
    assert len({name for name, _ in split}) == len(split), f"{pod.owner}: a flag twice"
    given: dict[str, str | None] = {name.replace("-", "_"): value for name, value in split}
    return load(CLASSES[role], given, variables(pod), KNOWN)
