"""llama.cpp's server.   usage: llama_server.py FILE.gguf THREADS PORT

By `xllamacpp`, its build for Python. It keeps no prompts: here none comes twice.
"""

import signal
import sys

import xllamacpp

SEQUENCES = 16
CONTEXT = 2048
"""Tokens of each."""


def main(file: str, threads: int, port: int) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = SEQUENCES
    params.n_ctx = SEQUENCES * CONTEXT
    params.kv_unified = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_prompt = False
    params.cache_ram_mib = 0
    server = xllamacpp.Server(params)
    print(f"listens on {server.listening_address}", flush=True)  # noqa: T201
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
