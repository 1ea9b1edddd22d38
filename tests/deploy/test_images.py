"""Tests that the images are what the manifests expect, and that the bootstrap's has what it needs.

Nothing is built here: there is no container runtime in the tests.
"""

import re

import pytest
from packaging.requirements import Requirement

from tests.deploy.chart import CASES, ROOT, Pod, pods
from tests.deploy.containerfile import TARGETS, containerfile, read
from tests.deploy.packages import REQUIREMENTS, WORKERS_ALONE, bootstrap_requirements, pins, project


def test_the_bootstraps_packages_are_the_projects_but_for_those_of_workers(rewrite: bool) -> None:
    groups = project()
    wanted = [each for each in [*groups[""], *groups["otel"]] if Requirement(each).name not in WORKERS_ALONE]
    if rewrite:
        head = [line for line in REQUIREMENTS.read_text().splitlines() if line.startswith("#")]
        REQUIREMENTS.write_text("\n".join([*head, *sorted(wanted)]) + "\n")
    assert bootstrap_requirements() == sorted(wanted), (
        "pyproject.toml has changed: pytest tests/deploy --rewrite"
    )


def test_every_image_runs_as_nobody_in_particular_and_gets_its_signals() -> None:
    _, stages = containerfile()
    users = {pod.spec["securityContext"]["runAsUser"] for case in CASES for pod in pods(case)}
    for target in TARGETS:
        stage = stages[target]
        assert stage.base == "base"
        assert stage.last("USER") == "10001:10001"
        assert users == {10001}
        assert stage.exec_form("ENTRYPOINT") == ["baton"]
        assert stage.last("STOPSIGNAL") == "SIGTERM"
        labels = stage.last("LABEL")
        for name in ("title", "description", "licenses", "version"):
            assert f"org.opencontainers.image.{name}=" in labels
        # Packages come from another stage, and nothing is installed here: no compiler, no package index.
        assert not stage.all("RUN")
        assert all(text.startswith("--from=build-") for text in stage.all("COPY"))


def test_every_base_is_named_by_its_digest_and_every_stage_is_one_of_ours() -> None:
    arguments, stages = containerfile()
    for stage in stages.values():
        if "$" in stage.base:
            assert stage.base == "${PYTHON}@${PYTHON_DIGEST}"
            name, _, tag = arguments["PYTHON"].rpartition(":")
            assert name.startswith("docker.io/")
            assert re.match(r"3\.1[1-9]-slim-\w+$", tag)
            assert arguments["PYTHON_DIGEST"] == "", "who builds says it, or there is no image"
        else:
            assert stage.base in stages
    assert "latest" not in (ROOT / "deploy" / "Containerfile").read_text()


def test_a_shell_as_first_process_is_found() -> None:
    _, stages = read("FROM scratch AS x\nENTRYPOINT baton bootstrap\n")
    with pytest.raises(ValueError, match="Expecting value"):
        stages["x"].exec_form("ENTRYPOINT")


def installs(name: str) -> list[str]:
    """Return the pip commands of a stage."""
    _, stages = containerfile()
    lines = [line for text in stages[name].all("RUN") for line in text.split("&&")]
    return [line for line in lines if re.search(r"\bpip\b.* (install|wheel) ", line)]


def test_what_is_installed_is_listed_by_its_hashes_or_is_baton_itself() -> None:
    _, stages = containerfile()
    assert "PIP_NO_DEPS=1" in stages["build"].last("ENV")
    for name in stages:
        for line in installs(name):
            own = "/wheels/*.whl" in line or "pip wheel --no-build-isolation" in line
            assert own or re.search(r"--require-hashes( -r requirements/[\w-]+\.txt)+", line), line


def test_the_tensor_library_and_nixl_are_in_the_workers_images_alone() -> None:
    def lists(name: str) -> set[str]:
        return set(re.findall(r"requirements/([\w-]+)\.txt", " ".join(installs(name))))

    assert lists("build-bootstrap") == {"bootstrap"}
    assert lists("build-worker") == {"torch-cpu", "run", "demo"}
    assert lists("build-worker-cuda") == {"torch", "torch-cuda", "run"}
    assert lists("build-worker-vllm") == {"torch-cpu", "vllm-cpu"}
    assert not {"torch", *WORKERS_ALONE} & pins("bootstrap").keys()


@pytest.mark.parametrize(
    "name", ["build-bootstrap", "build-worker", "build-worker-cuda", "build-worker-vllm"]
)
def test_a_change_of_the_source_downloads_nothing_again(name: str) -> None:
    """A changed layer rebuilds all layers behind it, so files that change least are copied first."""
    _, stages = containerfile()
    said = stages[name].said
    source = said.index(("COPY", "--from=build-baton /wheels /wheels"))
    assert not any("requirements/" in text for _, text in said[source:])


def test_what_an_image_is_made_of_is_sent_to_its_build_and_nothing_else() -> None:
    _, stages = containerfile()
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert lines[0] == "*"
    sent = {line[1:] for line in lines if line.startswith("!")}
    copied: set[str] = set()
    for stage in stages.values():
        for text in stage.all("COPY"):
            if not text.startswith("--from="):
                copied |= set(text.split()[:-1])
    assert sent == copied
    assert all((ROOT / name).exists() for name in sent)


def test_the_ports_that_are_exposed_are_the_pods() -> None:
    _, stages = containerfile()

    def of(pod: Pod) -> set[str]:
        return {str(each["containerPort"]) for each in pod.main["ports"]}

    for pod in pods("default"):
        targets = ["bootstrap"] if pod.component == "bootstrap" else ["worker", "worker-cuda", "worker-vllm"]
        for target in targets:
            assert set(stages[target].last("EXPOSE").split()) == of(pod)
