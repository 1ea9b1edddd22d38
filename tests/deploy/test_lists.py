"""Tests that requirements/ lists all that pyproject.toml asks for, by file hashes."""

import re
import tomllib
from importlib.metadata import distribution
from typing import Final

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from baton.engine.loading.library_loading import LIBRARY_NEEDED
from tests.deploy.chart import ROOT
from tests.deploy.packages import LISTS, Pin, bootstrap_requirements, pins, project

LOWEST: Final = "lowest"
"""The list of `make test-lowest`: the lowest version of each package, which no other list has."""
VLLM: Final = "vllm-cpu"
"""The list of `make test-vllm`: versions that vLLM allows."""
NAMES: Final = sorted(path.stem for path in LISTS.glob("*.txt"))
RUN: Final = ("torch", "torch-cuda", "run")
HASH: Final = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def of(*names: str) -> dict[str, list[Pin]]:
    found: dict[str, list[Pin]] = {}
    for name in names:
        for package, each in pins(name).items():
            found.setdefault(package, []).extend(each)
    return found


def holds(listed: dict[str, list[Pin]], wanted: Requirement) -> bool:
    """Whether what is listed for this platform is one version that `wanted` allows."""
    here = [
        each.requirement
        for each in listed.get(canonicalize_name(wanted.name), ())
        if each.requirement.marker is None or each.requirement.marker.evaluate()
    ]
    versions = {str(each.specifier).removeprefix("==") for each in here}
    return len(versions) == 1 and wanted.specifier.contains(versions.pop(), prereleases=True)


@pytest.mark.parametrize("name", NAMES)
def test_each_line_is_one_version_by_the_hashes_of_its_files(name: str) -> None:
    for package, found in pins(name).items():
        for pin in found:
            [one] = pin.requirement.specifier
            assert one.operator == "==", package
            assert pin.requirement.url is None
            assert pin.hashes, package
            assert all(HASH.fullmatch(each) for each in pin.hashes), package
    text = (LISTS / f"{name}.txt").read_text()
    assert not re.search(r"https?:|file:|@|--(extra-)?index|--find-links|\\s/", text), (
        "of no host and no path"
    )


def test_the_projects_own_ranges_are_held_and_everything_that_runs_is_there_without_the_tests() -> None:
    groups = project()
    listed = of(*RUN)
    wanted = [each for group in ("", "certs", "gguf", "otel") for each in groups[group]]
    assert [each for each in wanted if not holds(listed, Requirement(each))] == []
    assert [each for each in bootstrap_requirements() if not holds(of("bootstrap"), Requirement(each))] == []
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert [each for each in told if not holds(of("build"), Requirement(each))] == []
    whole = of(*RUN, "dev")
    assert [each for each in groups["dev"] if not holds(whole, Requirement(each))] == []
    assert not {"pytest", "mypy", "ruff", "playwright"} & listed.keys()


def test_workers_on_vllms_engine_run_with_versions_that_baton_allows() -> None:
    """torch is listed by itself, and its companions are not."""
    groups, listed = project(), of("torch-cpu", VLLM)
    wanted = [each for group in ("", "certs", "gguf", "otel", "vllm") for each in groups[group]]
    missing = [each for each in map(Requirement, wanted) if not holds(listed, each)]
    assert {each.name for each in missing} == {"vllm"}, "its build for CPUs has another name"
    [bound] = [each for each in map(Requirement, groups["vllm"]) if each.name == "vllm"]
    [pin] = listed["vllm-cpu"]
    [version] = [each.version for each in pin.requirement.specifier]
    assert bound.specifier.contains(version), "the extra's vLLM is the tested one"
    assert not {"torch", "torchaudio", "torchvision", "triton"} & pins(VLLM).keys()


@pytest.mark.parametrize("name", ["bootstrap", "run"])
def test_what_a_listed_package_needs_here_is_listed(name: str) -> None:
    """`--no-deps` installs the listed packages only, so their dependencies have to be listed, too."""
    listed = of(*RUN) if name == "run" else of(name)
    missing = []
    for package in pins(name):
        if not holds(listed, Requirement(package)):
            continue  # for another platform
        for text in distribution(package).requires or ():
            each = Requirement(text)
            if each.marker is None or each.marker.evaluate({"extra": ""}):
                missing += [] if holds(listed, each) else [f"{package}: {text}"]
    assert missing == []


def test_the_lists_agree_with_each_other() -> None:
    whole = of(*(name for name in NAMES if name not in (LOWEST, VLLM)))
    for package, found in whole.items():
        by_marker: dict[str, set[str]] = {}
        for pin in found:
            version = str(pin.requirement.specifier).partition("+")[0]  # without what it was built for
            by_marker.setdefault(str(pin.requirement.marker), set()).add(version)
        assert all(len(each) == 1 for each in by_marker.values()), package


def test_each_lower_bound_is_the_version_that_is_tested() -> None:
    groups = project()
    for text in [each for group in ("", "certs", "gguf", "otel") for each in groups[group]]:
        wanted = Requirement(text)
        if wanted.name == "torch":
            continue  # an index has builds for CPUs alone of few of its versions
        [bound] = [each.version for each in wanted.specifier if each.operator == ">="]
        by_vllm = wanted.name == "transformers"  # the torch engine needs a newer one
        [pin] = of(VLLM if by_vllm else LOWEST)[canonicalize_name(wanted.name)]
        [tested] = [each.version for each in pin.requirement.specifier]
        assert Version(tested) == Version(bound), (
            f"{wanted.name}: bound {bound}, `make test-lowest` has {tested}"
        )
    [pin] = of(LOWEST)["transformers"]
    assert str(pin.requirement.specifier) == f"=={LIBRARY_NEEDED}.0", "what the torch engine needs is tested"
