#!/bin/sh
# Does Baton work on this machine's GPU, and how fast? Nine minutes at most, eleven more if this Python has
# vLLM, without a network.
#
#   sh run.sh                        on the first GPU
#   sh run.sh --device cpu           on a CPU: smaller, a test of the kit itself
#   sh run.sh --only engine          one part of it
#
# Needs a Python (PYTHON=python3) with pip, torch 2.11 or newer and transformers. Installs what they lack into
# the folder `site` beside this file, and nothing anywhere else. Results: the folder `results` beside it, or
# --out DIRECTORY.
set -eu
begun=$(date +%s)
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
site=${BATON_SITE:-$here/site}

"$python" -c 'import torch, transformers' 2>/dev/null || {
  echo "run.sh: $python has no torch and transformers: say with PYTHON=... which one has" >&2
  exit 2
}
if [ ! -e "$site/.installed" ]; then
  "$python" -m pip --version >/dev/null 2>&1 || {
    echo "run.sh: $python has no pip: its ensurepip makes it ($python -m ensurepip)" >&2
    exit 2
  }
  echo "run.sh: installing into $site" >&2
  rm -rf "$site"
  if ! "$python" -m pip --disable-pip-version-check install --quiet --no-index --no-deps --no-compile \
    --no-cache-dir --no-warn-script-location --target "$site" "$here"/wheels/*.whl; then
    echo "run.sh: $("$python" -V) on $(uname -m) does not take these packages:" >&2
    echo "run.sh: make gpu-bundle ARGS='--python ... --platform ...' makes them for it" >&2
    exit 2
  fi
  touch "$site/.installed"
fi

unset PYTHONHOME PYTHONSAFEPATH PYTHONDONTWRITEBYTECODE 2>/dev/null || true
PYTHONPATH="$here/baton:$site"
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
HF_HUB_OFFLINE=1
export PYTHONPATH OMP_NUM_THREADS HF_HUB_OFFLINE
case " $*" in *" --out"*) ;; *) set -- "$@" --out "$here/results" ;; esac
budget=$((1200 - ($(date +%s) - begun)))
case " $*" in *" --budget-s"*) ;; *) set -- "$@" --budget-s "$budget" ;; esac
cd "$here/baton"
exec "$python" -m tests.gpu "$@"
