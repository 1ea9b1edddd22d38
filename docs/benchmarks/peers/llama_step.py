"""What does llama.cpp take for a token, with one thread?   usage: llama_step.py FILE.gguf [CONTEXT [RUNS]]

By `xllamacpp`, its build for Python, whose server tells the time itself. Prints one JSON object.
"""

import json
import statistics
import sys
from urllib.request import Request, urlopen

import xllamacpp

TOKENS = 64


def main(file: str, context: int = 512, runs: int = 5) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx = context + 2 * TOKENS
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    asked = {
        "prompt": list(range(7, 7 + context)),
        "n_predict": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": True,
    }
    url = f"{server.listening_address}/completion"
    taken = []
    for _ in range(1 + runs):
        request = Request(url, json.dumps(asked).encode(), {"Content-Type": "application/json"})  # noqa: S310
        with urlopen(request, timeout=600) as answer:  # noqa: S310
            taken.append(json.load(answer)["timings"]["predicted_per_token_ms"])
    seen = taken[1:]  # the first computes the prompt
    print(json.dumps({"context": context, "median_ms": statistics.median(seen), "least_ms": min(seen)}))  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
