"""Are the images what the manifests take them for, and is what the bootstrap needs in its own?

Nothing is built here: there is no container runtime in the tests.
"""

import re

import pytest
from packaging.requirements import Requirement

from tests.deploy.chart import CASES, ROOT, Pod, pods
from tests.deploy.containerfile import TARGETS, containerfile, read
from tests.deploy.packages import REQUIREMENTS, WORKERS_ALONE, bootstrap_requirements, project


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


def test_every_base_has_a_version_and_every_stage_is_one_of_ours() -> None:
    arguments, stages = containerfile()
    for stage in stages.values():
        if stage.base == "${PYTHON}":
            name, _, tag = arguments["PYTHON"].rpartition(":")
            assert name.startswith("docker.io/")
            assert re.match(r"3\.1[1-9]-slim-\w+$", tag)
        else:
            assert stage.base in stages
    assert "latest" not in (ROOT / "deploy" / "Containerfile").read_text()


def test_a_shell_as_first_process_is_found() -> None:
    _, stages = read("FROM scratch AS x\nENTRYPOINT baton bootstrap\n")
    with pytest.raises(ValueError, match="Expecting value"):
        stages["x"].exec_form("ENTRYPOINT")


def test_the_tensor_library_and_nixl_are_in_the_workers_images_alone() -> None:
    _, stages = containerfile()
    installs = {name: " ".join(stage.all("RUN")) for name, stage in stages.items()}
    assert "torch" not in installs["build-bootstrap"]
    assert "--no-deps ." in installs["build-bootstrap"]
    [torch] = [each for each in project()[""] if Requirement(each).name == "torch"]
    assert f"'{torch}'" in installs["build-worker"]
    assert "'.[gguf,otel]'" in installs["build-worker"]
    assert "'.[gguf,otel]'" in installs["build-worker-cuda"]


@pytest.mark.parametrize("name", ["build-worker", "build-worker-cuda"])
def test_a_change_of_the_source_downloads_nothing_large_again(name: str) -> None:
    """A layer is built anew with all behind it: what is copied first is what changes least."""
    _, stages = containerfile()
    said = stages[name].said
    source = said.index(("COPY", "services services"))
    before = " ".join(text for word, text in said[:source] if word == "RUN")
    for each in project()[""]:
        if Requirement(each).name in WORKERS_ALONE:
            assert f"'{each}'" in before
    assert "-r deploy/bootstrap-requirements.txt" in before


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
        targets = ["bootstrap"] if pod.component == "bootstrap" else ["worker", "worker-cuda"]
        for target in targets:
            assert set(stages[target].last("EXPOSE").split()) == of(pod)
