"""Flags of vLLM and SGLang, each with the flag of Baton to give instead.

docs/migrating.md has the same table. A test compares the two.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from baton.runtime.errors import SettingsError

COMMANDS: Final = frozenset({"serve", "bootstrap", "prefill", "decode"})
MEMORY: Final = "give --kv-cache-memory, in bytes for each rank"
RANKS: Final = "give --tp (of baton serve --prefill-tp and --decode-tp)"
STAGES: Final = "give --pp to prefill (of baton serve --prefill-pp)"
SIDES: Final = "run baton prefill and baton decode, or baton serve for both"
PRIORITY: Final = "leave it out: waiting requests are served by priority, low values first"
GRAPHS: Final = "leave it out: --engine vllm records graphs, on GPUs alone"
MACHINES: Final = "give --machines, --machine and --rendezvous"

INSTEAD: Final[Mapping[str, str]] = {
    "--api-key": "give --api-key-file, or BATON_API_KEYS",
    "--block-size": "give --page-tokens",
    "--chunked-prefill-size": "give --chunk-tokens",
    "--disable-cuda-graph": GRAPHS,
    "--disable-radix-cache": "give --prefix-cache false",
    "--disaggregation-bootstrap-port": "give --advertise and --grpc-port to each worker",
    "--disaggregation-ib-device": "set UCX_NET_DEVICES",
    "--disaggregation-mode": SIDES,
    "--disaggregation-transfer-backend": "leave it out: pages travel over NIXL with UCX",
    "--dist-init-addr": MACHINES,
    "--enable-cache-report": "leave it out: cached tokens are always reported",
    "--enable-metrics": "leave it out: metrics are always served",
    "--enable-priority-scheduling": PRIORITY,
    "--enable-trace": "give --otlp-endpoint",
    "--enforce-eager": GRAPHS,
    "--gpu-memory-utilization": MEMORY,
    "--kv-cache-memory-bytes": MEMORY,
    "--kv-transfer-config": SIDES,
    "--master-addr": MACHINES,
    "--max-model-len": "give --context-length",
    "--max-num-batched-tokens": "give --chunk-tokens",
    "--max-num-seqs": "give --max-running",
    "--max-running-requests": "give --max-running",
    "--max-total-tokens": MEMORY,
    "--mem-fraction-static": MEMORY,
    "--nnodes": MACHINES,
    "--no-enable-prefix-caching": "give --prefix-cache false",
    "--kv-events-config": "give --kv-events-endpoint, --kv-events-replay-endpoint and --kv-events-topic",
    "--node-rank": MACHINES,
    "--otlp-traces-endpoint": "give --otlp-endpoint",
    "--page-size": "give --page-tokens",
    "--pd-disaggregation": SIDES,
    "--pipeline-parallel-size": STAGES,
    "--pp-size": STAGES,
    "--sampling-defaults": "give --generation-config none, or auto, which is the default",
    "--schedule-low-priority-values-first": PRIORITY,
    "--scheduling-policy": PRIORITY,
    "--speculative-algorithm": "give --speculate ngram or model:DIR on decode",
    "--speculative-config": "give --speculate ngram or model:DIR on decode",
    "--speculative-draft-model-path": "give --speculate model:DIR on decode",
    "--ssl-certfile": "give --http-tls-cert",
    "--ssl-keyfile": "give --http-tls-key",
    "--tensor-parallel-size": RANKS,
    "--tp-size": RANKS,
}


def refuse_peers_flags(words: Sequence[str]) -> None:
    """Raise SettingsError for the first flag of vLLM or SGLang in a command line.

    `words`: the command line after `baton`. Its first word is the command.
    """
    if not words or words[0] not in COMMANDS:
        return
    for word in words[1:]:
        flag = word.partition("=")[0]
        if flag in INSTEAD:
            raise SettingsError(f"{flag} is not a flag of baton {words[0]}: {INSTEAD[flag]}")
