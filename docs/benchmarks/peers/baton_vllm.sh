#!/usr/bin/env bash
# Baton with vLLM's engine: prefill on one core, decode on another.   usage: baton_vllm.sh PORT
#
# The environment is that of `make test-vllm`. MODEL_DIR: a model directory. DTYPE: bfloat16 or float32.
set -euo pipefail
: "${MODEL_DIR:?a model directory}" "${DTYPE:?bfloat16 or float32}"
ROOT=$(cd "$(dirname "$0")/../../.." && pwd)
exec "$ROOT/.venv/vllm/bin/baton" serve --engine vllm --page-tokens 32 \
  --model "$MODEL_DIR" --dtype "$DTYPE" --port "$1" --grpc-port 0
