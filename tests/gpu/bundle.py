"""The bundle for a machine with a GPU, torch and transformers, and no network: `make gpu-bundle`.

`make gpu-bundle`.

    python -m tests.gpu.bundle --python 3.12 --platform x86_64 --cuda 13 --out build/gpu-bundle

One folder of MIB_MAX at most: the source, the packages that torch and transformers do not bring, by the very
files that `requirements/` lists, and `run.sh`. NIXL's wheel has only what Baton uses of it: `nixl_ep`, three
quarters of it, is another library; headers are for who compiles.
"""

import argparse
import base64
import csv
import hashlib
import io
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Set
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).resolve().parents[2]
RUN: Final = "run.sh"
WHEELS, SOURCE = "wheels", "baton"
MIB_MAX: Final = 60
THERE: Final = ("torch", "transformers")
"""Packages that the machine already has, with their dependencies, since other versions might not fit them.
Dependencies of those depend on versions, and are carried where Baton needs them."""
TESTING: Final = ("pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis")
"""Packages that the tests marked `gpu` and `tests/conftest.py` need."""
NIXL: Final = "nixl-cu"
LEFT_OUT: Final = re.compile(r"nixl_ep(_cu\d+)?/|[^/]+\.data/headers/|[^/]+\.libs/ucx/libucx_perftest")
"""Files of NIXL's wheel that are left out."""
TREES: Final = ("baton", "services", "bench", "tests", "proto", "requirements")
CARRIED: Final = (*TREES, "pyproject.toml", "LICENSE", "README.md")
"""Files and folders of the source that a bundle carries."""
GLIBCS: Final = (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)
"""Minor versions that wheels are built for: pip takes each by its own name."""
PYTHONS: Final = ("3.11", "3.12", "3.13")
MACHINES: Final = ("x86_64", "aarch64")

Pins = dict[str, str]
"""Lines of `requirements/` that pin a package, by its name."""


class TooLarge(Exception):
    """The bundle has more than MIB_MAX."""


def packages(python: str, machine: str, cuda: str) -> Pins:
    """Return the bundle's pins for that Python and processor. No network is used: dependencies are read off
    the packages installed here."""
    about = environment(python, machine)
    project = [name_of(each) for each in _dependencies() if _holds(Requirement(each), about)]
    there = {*THERE, *(name for each in THERE for name in needs(each, about))}
    other = {f"{NIXL}{each}" for each in ("12", "13") if each != cuda}
    wanted = closure([*project, *TESTING], about, there | other)
    pins = pins_in([ROOT / "requirements" / name for name in ("run.txt", "dev.txt", "build.txt")], about)
    missing = sorted(wanted - pins.keys())
    if missing:
        raise LookupError(f"requirements/ lists no {', '.join(missing)}: make lock")
    return {name: pins[name] for name in sorted(wanted)}


def environment(python: str, machine: str) -> Mapping[str, str]:
    """Return the values of environment markers for the machine that the bundle is for, which may be another
    one."""
    return {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": machine,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "",
    }


def closure(names: Iterable[str], about: Mapping[str, str], without: Set[str]) -> set[str]:
    """These packages and all that they need, by what those that are installed here say, but for those
    `without` which it goes, and what only they need."""
    found: set[str] = set()
    waiting = [*names]
    while waiting:
        name = waiting.pop()
        if name not in found | without:
            found.add(name)
            waiting += needs(name, about)
    return found


def needs(name: str, about: Mapping[str, str]) -> list[str]:
    """Return a package's own dependencies. Empty for one that is not installed here, as of another system."""
    try:
        asked = requires(name) or []
    except PackageNotFoundError:
        return []
    return [name_of(each) for each in asked if _holds(Requirement(each), about)]


def pins_in(files: Iterable[Path], about: Mapping[str, str]) -> Pins:
    """Return the pins of files for that Python and processor, by name."""
    pins: Pins = {}
    for file in files:
        for block in re.split(r"\n(?=\S)", file.read_text().strip()):
            line = block.partition(" \\")[0]
            if not line.startswith("#") and _holds(Requirement(line), about):
                pins[name_of(line)] = block
    return pins


def name_of(requirement: str) -> str:
    return str(canonicalize_name(Requirement(requirement).name))


def slim(wheel: Path, folder: Path) -> Path:
    """`wheel` without what is LEFT_OUT, and with a RECORD of what it has, in `folder`."""
    target = folder / wheel.name
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    with (
        zipfile.ZipFile(wheel) as whole,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as less,
    ):
        (listing,) = [each for each in whole.namelist() if re.fullmatch(r"[^/]+\.dist-info/RECORD", each)]
        for each in whole.infolist():
            if each.filename == listing or each.is_dir() or LEFT_OUT.match(each.filename):
                continue
            contents = whole.read(each)
            less.writestr(each, contents, zipfile.ZIP_DEFLATED)
            digest = base64.urlsafe_b64encode(hashlib.sha256(contents).digest()).rstrip(b"=").decode()
            rows.writerow([each.filename, f"sha256={digest}", len(contents)])
        rows.writerow([listing, "", ""])
        less.writestr(listing, record.getvalue())
    return target


def make(python: str, machine: str, cuda: str, out: Path) -> int:
    """Writes the folder `out` anew. Returns its bytes. Raises CalledProcessError where pip cannot get a
    package, TooLarge."""
    if out.exists():
        if not (out / RUN).exists():
            raise FileExistsError(f"{out} is there and no bundle: say where else with --out")
        shutil.rmtree(out)
    (out / WHEELS).mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="baton-bundle-") as folder:
        got = Path(folder, "got")
        _download(packages(python, machine, cuda), python, machine, Path(folder), got)
        for wheel in sorted(got.iterdir()):
            if canonicalize_name(wheel.name.partition("-")[0]).startswith(NIXL):
                slim(wheel, out / WHEELS)
            else:
                shutil.copy2(wheel, out / WHEELS)
    _copy_source(out / SOURCE)
    shutil.copy2(Path(__file__).with_name(RUN), out / RUN)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    if size > MIB_MAX * 2**20:
        raise TooLarge(f"{out} has {size / 2**20:.1f} MiB, and {MIB_MAX} are wanted at most")
    return size


def _download(pins: Pins, python: str, machine: str, folder: Path, into: Path) -> None:
    listed = folder / "listed.txt"
    listed.write_text("\n".join(pins.values()) + "\n")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command += [
        "--require-hashes",
        "--only-binary",
        ":all:",
        "--implementation",
        "cp",
        "--python-version",
        python,
    ]
    for minor in GLIBCS:
        command += ["--platform", f"manylinux_2_{minor}_{machine}"]
    command += ["--platform", f"manylinux2014_{machine}", "--platform", f"manylinux1_{machine}"]
    subprocess.run(
        [*command, "--dest", str(into), "--requirement", str(listed)], check=True, stderr=subprocess.PIPE
    )


def _copy_source(target: Path) -> None:
    """Copy all files that git knows and does not ignore, committed or not."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *CARRIED],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file() or (ROOT / name).is_symlink():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name, follow_symlinks=False)


def _dependencies() -> list[str]:
    import tomllib

    told: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return told


def _holds(requirement: Requirement, about: Mapping[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate(dict(about))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.bundle", description=__doc__)
    parser.add_argument("--python", choices=PYTHONS, default="3.12", help="of the machine with the GPU")
    parser.add_argument("--platform", choices=MACHINES, default="x86_64", help="its processor")
    parser.add_argument(
        "--cuda", choices=("12", "13"), default="13", help="of its torch (torch.version.cuda)"
    )
    parser.add_argument("--out", type=Path, default=Path("build", "gpu-bundle"))
    given = parser.parse_args(arguments)
    try:
        size = make(given.python, given.platform, given.cuda, given.out)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or b"").decode(errors="replace").strip().splitlines()
        wrong = [line for line in said if line.startswith("ERROR")] or said[-1:]
        sys.stderr.write(f"gpu-bundle: pip cannot get it: {wrong[-1] if wrong else error}\n")
        return 1
    except (TooLarge, LookupError, OSError) as error:
        sys.stderr.write(f"gpu-bundle: {error}\n")
        return 1
    count = len(list((given.out / WHEELS).iterdir()))
    sys.stdout.write(
        f"{given.out}: {size / 2**20:.1f} MiB, {count} packages for Python {given.python}, {given.platform}, "
        f"CUDA {given.cuda}. There: sh {RUN}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
