#!/usr/bin/env bash
# vLLM disaggregated over NIXL: a prefill server on one core, a decode server on another, a router on both.
#   usage: vllm_disaggregated.sh PREFILL_CORE DECODE_CORE PORT [--nice-spinning]     (takes PORT to PORT + 4)
# The router answers once everything is in place.
set -euo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
. "$HERE/vllm_env.sh"
PREFILL=$1 DECODE=$2 PORT=$3
shift 3
export VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 VLLM_KV_CACHE_LAYOUT=HND
connector() { printf '{"kv_connector":"NixlConnector","kv_role":"%s","kv_buffer_device":"cpu"}' "$1"; }

VLLM_NIXL_SIDE_CHANNEL_PORT=$((PORT + 3)) \
  serve_on "$PREFILL" $((PORT + 1)) --kv-transfer-config "$(connector kv_producer)" &
PREFILL_PID=$!
VLLM_NIXL_SIDE_CHANNEL_PORT=$((PORT + 4)) \
  serve_on "$DECODE" $((PORT + 2)) --kv-transfer-config "$(connector kv_consumer)" &
DECODE_PID=$!

for port in $((PORT + 1)) $((PORT + 2)); do
  until curl -sf "http://127.0.0.1:$port/health" > /dev/null; do
    kill -0 "$PREFILL_PID" && kill -0 "$DECODE_PID" || exit 1
    sleep 1
  done
done
python "$HERE/vllm_settle.py" "$PREFILL_PID" "$PREFILL" "$@"
python "$HERE/vllm_settle.py" "$DECODE_PID" "$DECODE" "$@"
taskset -c "$PREFILL,$DECODE" python "$HERE/vllm_router.py" "$PORT" \
  "http://127.0.0.1:$((PORT + 1))" "http://127.0.0.1:$((PORT + 2))" &
wait -n  # whichever ends first: the system is not whole any more
