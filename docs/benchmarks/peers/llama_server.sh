#!/usr/bin/env bash
# llama.cpp's server, one process, as many threads as it has cores.   usage: llama_server.sh CORES PORT
#
# PEER_VENV    where install.sh put xllamacpp and gguf
# MODEL_FILE   a GGUF file; one with plain numbers is made of it once, in PEER_VENV
# DTYPE        bfloat16, which becomes float16 of as many bytes, or float32
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
: "${PEER_VENV:?where install.sh put its packages}" "${MODEL_FILE:?a GGUF file}" "${DTYPE:?bfloat16 or float32}"
CORES=$1 PORT=$2
unset OMP_NUM_THREADS

NUMBERS=${DTYPE/bfloat16/float16}
PLAIN="$PEER_VENV/cache/$(basename "$MODEL_FILE" .gguf)-$NUMBERS.gguf"
if [ ! -e "$PLAIN" ]; then
  mkdir -p "$PEER_VENV/cache"
  "$PEER_VENV/bin/python" "$HERE/gguf_plain.py" "$MODEL_FILE" "$PLAIN" "$NUMBERS"
fi
exec taskset -c "$CORES" "$PEER_VENV/bin/python" "$HERE/llama_server.py" \
  "$PLAIN" "$(awk -F, '{print NF}' <<< "$CORES")" "$PORT"
