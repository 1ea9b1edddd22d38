"""Part of the kit that describes the machine, and checks that Baton can start on it.

What breaks first on a new machine is not a kernel: it is a library of the wrong CUDA, a variable in the
environment, a process that was forked too late. Each is looked at by itself, and told by its cause.
"""

import ctypes
import os
import platform
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from tests.gpu.findings import CannotRun, Finding, FindingVerdict
from tests.gpu.kit import Kit, last_line

PACKAGES: Final = (
    "torch",
    "transformers",
    "nixl",
    "grpcio",
    "numpy",
    "vllm",
    "triton",
)
WORDS: Final = ("UCX_", "NIXL_", "PYTORCH_", "CUDA_", "NVIDIA_", "NCCL_")
"""Prefixes of variables that change how a GPU is used."""
MACHINE: Final = "the machine"
MIB: Final = 2**20
ASK_S: Final = 20.0
FORKS: Final = """
import os, sys
import baton.launch.fork_server as preloaded
preloaded._import_all(preloaded.worker_modules())
import torch
worker = os.fork()
if worker == 0:
    if torch.cuda._is_in_bad_fork():
        sys.exit("an import has asked CUDA: no worker is forked from here")
    assert torch.ones(3, device=sys.argv[1]).sum().item() == 3
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]))
"""
NOT_FORKED: Final = "no worker is forked from here"
"""Text of the finding when an import has used CUDA before a fork. Workers are then started by command, which
takes some seconds more and is no fault."""


def run(kit: Kit) -> None:
    note = kit.findings.note
    if note(MACHINE, lambda found: _tell(kit, found)).verdict is not FindingVerdict.MEASURED:
        return  # nothing that follows would say more
    note("installed packages are new enough", lambda found: _check_versions(found))
    if kit.on_gpu:
        note("NIXL is built for the CUDA that torch has", _check_cuda)
        note("the libraries that UCX needs for a GPU's memory are found", _check_libraries)
        note("no variable takes the ways between GPUs from UCX", _check_environment)
    note("this device's memory can be registered", lambda found: _check_registration(kit, found), 20)
    note("workers that are forked can compute here", lambda found: _check_forks(kit, found), 30)


def _tell(kit: Kit, found: Finding) -> None:
    import torch

    from baton.inference.device import DeviceNotFound, find_device

    try:
        find_device(kit.device)
    except DeviceNotFound as error:
        raise CannotRun(f"{error}; torch {torch.__version__} has CUDA {torch.version.cuda}") from error
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "packages": {name: told for name in PACKAGES if (told := _version(name))},
        "torch_cuda": torch.version.cuda,
        "device": "CPU",
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(WORDS)},
    }
    if kit.on_gpu:
        about = torch.cuda.get_device_properties(kit.device)
        free, total = torch.cuda.mem_get_info(kit.device)
        facts |= {
            "device": about.name,
            "capability": f"{about.major}.{about.minor}",
            "multiprocessors": about.multi_processor_count,
            "l2_mib": about.L2_cache_size // MIB,
            "memory_free_gib": round(free / 2**30, 1),
            "memory_gib": round(total / 2**30, 1),
            "driver": _driver(),
        }
    found.figures = facts


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _driver() -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return "no nvidia-smi says"
    asked = [program, "--query-gpu=driver_version,memory.used", "--format=csv,noheader"]
    ran = subprocess.run(asked, capture_output=True, text=True, timeout=ASK_S, check=False)
    return last_line(ran.stdout or ran.stderr)


def _check_versions(found: Finding) -> None:
    """Check the machine's packages against the versions in `pyproject.toml`."""
    from packaging.requirements import Requirement

    asked = [Requirement(each) for each in _dependencies()]
    wrong = []
    for each in asked:
        have = _version(each.name)
        if have is None:
            wrong.append(f"{each.name} is missing")
        elif not each.specifier.contains(have, prereleases=True):
            wrong.append(f"{each.name} {have} is not {each.specifier}")
    found.detail = f"{len(asked)} packages"
    assert not wrong, "; ".join(wrong)


def _dependencies() -> list[str]:
    import tomllib

    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    told: list[str] = tomllib.loads(project.read_text())["project"]["dependencies"]
    return told


def _check_cuda(found: Finding) -> None:
    import torch

    major = (torch.version.cuda or "").partition(".")[0]
    if not major:
        raise CannotRun(f"torch {torch.__version__} is a build without CUDA: install one with it")
    instead = f"install nixl-cu{major} (a bundle with it: make gpu-bundle ARGS='--cuda {major}')"
    try:
        from nixl import _api
    except ImportError as error:
        raise AssertionError(f"{error}: {instead}") from error
    loaded = _api.__name__.partition(".")[0]
    found.detail = f"torch has CUDA {torch.version.cuda}, {loaded} is loaded"
    assert loaded.endswith(major), f"{found.detail}: {instead}"


def _check_libraries(found: Finding) -> None:
    """libuct_cuda, by which UCX knows a GPU's memory, is left out without a word where one is missing."""
    import torch

    torch.zeros(1, device="cuda")  # its own libraries are loaded by now
    major = (torch.version.cuda or "13").partition(".")[0]
    missing = []
    for name in ("libcuda.so.1", "libnvidia-ml.so.1", f"libcudart.so.{major}"):
        try:
            ctypes.CDLL(name)
        except OSError as error:
            missing.append(str(error))
    from nixl import _bindings

    files = Path(_bindings.__file__).resolve().parent
    plugins = sorted(each.name for each in files.parent.glob(f"{files.name}.libs/ucx/libuct_cuda*.so*"))
    found.detail = ", ".join(plugins)
    assert plugins, f"no libuct_cuda beside {files}: this NIXL was built without CUDA"
    assert not missing, "; ".join(missing)


def _check_environment(found: Finding) -> None:
    tls = os.environ.get("UCX_TLS", "all")
    allocator = " ".join(
        os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    )
    names = [each.strip() for each in tls.removeprefix("^").split(",")]
    taken = not tls.startswith("^") and not {"all", "cuda", "cuda_copy"} & set(names)
    wrong = []
    if taken or (tls.startswith("^") and any(each.startswith("cuda") for each in names)):
        wrong.append(f"UCX_TLS={tls} leaves out the CUDA transports: add cuda (cuda_copy, cuda_ipc) to it")
    if re.search(r"expandable_segments\s*:\s*True", allocator) or "cudaMallocAsync" in allocator:
        wrong.append(
            f"PYTORCH_CUDA_ALLOC_CONF={allocator.strip()}: such memory may not be shared with another process"
        )
    found.detail = f"UCX_TLS={tls}"
    assert not wrong, "; ".join(wrong)


def _check_registration(kit: Kit, found: Finding) -> None:
    from baton.ids import Incarnation
    from baton.transfer.nixl import NixlTransfer
    from baton.transfer.refused_memory import explain_refused_memory
    from baton.transfer.transfer_protocol import Region
    from bench.pages.device_memory import take

    memory = take(MIB, kit.device)
    transfer = NixlTransfer(Incarnation(1))
    try:
        with explain_refused_memory(kit.device):
            transfer.register(Region("kv", memory.address, memory.length, kit.device))
            found.detail = f"{len(transfer.endpoint().metadata)} bytes of metadata"
    finally:
        transfer.close()


def _check_forks(kit: Kit, found: Finding) -> None:
    ran = kit.command("-c", FORKS, kit.device, most_s=120)
    said = last_line(ran.stderr) if ran.returncode else "from a process that has asked CUDA nothing"
    found.detail = said
    assert ran.returncode == 0 or said.endswith(NOT_FORKED), said


def name_of(machine: dict[str, Any]) -> str:
    """Return the name of the kit's files, from the device's name."""
    return re.sub(r"[^a-z0-9]+", "-", str(machine.get("device", "unknown")).lower()).strip("-")
