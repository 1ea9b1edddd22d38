"""Is the committed gRPC code what the .proto files say? Generates it, or with --check compares.

    python proto/generate.py            write services/wire/baton/
    python proto/generate.py --check    exit 1 and name the stale files

The .proto files import each other as `baton/v1/….proto`, as users of other languages expect; the
Python package lives under `baton.wire`, so the generated imports are moved there.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
TARGET = ROOT.parent / "services" / "wire"
_IMPORT = re.compile(r"\b(from|import) baton\.v1\b")
_QUALIFIED = re.compile(r"(?<![\w./\"'])baton\.v1\.(\w+_pb2)\b")


def generate(into: Path) -> list[Path]:
    """Compile every .proto under proto/ into `into`. Returns the paths written, relative to it."""
    protos = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.proto"))
    outs = [f"--{kind}_out={into}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    # The plug-ins of mypy-protobuf lie beside the interpreter.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", *outs, *protos]
    environ = os.environ | {"PATH": path}
    subprocess.run(command, check=True, env=environ, timeout=120, capture_output=True)  # noqa: S603
    written = sorted(each for each in into.rglob("*_pb2*") if each.suffix in {".py", ".pyi"})
    for each in written:
        text = _IMPORT.sub(r"\1 baton.wire.baton.v1", each.read_text())
        each.write_text(_QUALIFIED.sub(r"baton.wire.baton.v1.\1", text))
    for package in sorted({each.parent for each in written} | {into / "baton"}):
        (package / "__init__.py").touch()
        written.append(package / "__init__.py")
    return [each.relative_to(into) for each in written]


def stale() -> list[Path]:
    """Files whose committed text is not what the .proto files generate."""
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        names = set(generate(fresh))
        committed = (path for path in (TARGET / "baton").rglob("*.py*") if path.suffix != ".pyc")
        return sorted(
            name
            for name in names | {path.relative_to(TARGET) for path in committed}
            if not (fresh / name).exists()
            or not (TARGET / name).exists()
            or (fresh / name).read_text() != (TARGET / name).read_text()
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if not parser.parse_args().check:
        generate(TARGET)
        return 0
    names = stale()
    for name in names:
        sys.stderr.write(f"services/wire/{name} is stale: run `make proto`\n")
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main())
