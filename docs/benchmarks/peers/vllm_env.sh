# Sourced by the other scripts: vLLM's CPU build, offline, on loopback.
#
# PEER_VENV   where install.sh put it
# MODEL_DIR   a directory with config.json, tokenizer and safetensors
# DTYPE       bfloat16 or float32
# VLLM_CPU_KVCACHE_SPACE   GiB of each server's KV cache (1)
# VLLM_SEQUENCES           most that a server computes together (16)
: "${PEER_VENV:?where install.sh put vLLM}" "${MODEL_DIR:?a model directory}" "${DTYPE:?bfloat16 or float32}"
export PATH="$PEER_VENV/bin:$PATH"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo
export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
export VLLM_CACHE_ROOT=${VLLM_CACHE_ROOT:-$PEER_VENV/cache}
unset OMP_NUM_THREADS

# What its documentation recommends to preload: tcmalloc (Debian: libtcmalloc-minimal4) and Intel's OpenMP.
TCMALLOC=${TCMALLOC:-$(ldconfig -p | sed -n 's/.*=> \(.*libtcmalloc_minimal\.so\.4\)$/\1/p' | head -1)}
IOMP=$(ls "$PEER_VENV"/lib/libiomp5.so 2>/dev/null || true)
PRELOAD=$(printf '%s\n' "$TCMALLOC" "$IOMP" | sed '/^$/d' | paste -sd:)
[ -n "$TCMALLOC" ] || echo "vllm_env: no libtcmalloc_minimal.so.4: vLLM will run without it" >&2

COMMON=(--served-model-name model --dtype "$DTYPE" --host 127.0.0.1 --max-model-len 2048
  --max-num-seqs "${VLLM_SEQUENCES:-16}" --no-enable-prefix-caching --disable-log-stats --disable-uvicorn-access-log)

# serve_on CORES PORT ARGUMENT…: one server, kept to its cores
serve_on() {
  local cores=$1 port=$2
  shift 2
  env VLLM_CPU_OMP_THREADS_BIND="$cores" LD_PRELOAD="$PRELOAD" \
    taskset -c "$cores" vllm serve "$MODEL_DIR" "${COMMON[@]}" --port "$port" "$@"
}
