#!/usr/bin/env bash
# vLLM in one process (prefill and decode share a core).   usage: vllm_single.sh CORES PORT
set -euo pipefail
. "$(dirname "$0")/vllm_env.sh"
serve_on "$1" "$2"
