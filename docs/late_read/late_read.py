"""Late reads of vLLM's NixlConnector: a decode leg that comes after the prefill leg's lease has run out.

    python late_read.py MODEL [--wait 32] [--lease SECONDS] [--kv-buffer-device cpu]

Needs vLLM and nixl, and nothing of Baton. Starts one prefill and one decode process of vLLM on this machine
and prints a JSON object for each experiment:

    alone            the decode process alone, without a hand-over
    at once          the decode leg follows the prefill leg at once
    late             the decode leg comes `--wait` seconds after the prefill leg
    decode stopped   the decode leg is sent at once; the decode process is stopped (SIGSTOP) for `--wait`

Prefill serves other prompts meanwhile. Ends with exit code 0 however the texts compare.
"""

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "Japan": "Tokyo",
    "Greece": "Athens",
    "Egypt": "Cairo",
}
PROMPT = " ".join(f"The capital of {country} is {city}." for country, city in CAPITALS.items())
PROMPT += " The capital of France is"
OTHER_PROMPT = (
    "One kilogram of sugar, two eggs, a cup of milk and some butter. Mix the flour with the butter, add the "
    "eggs one by one, and bake the cake for forty minutes in a hot oven until it is brown. Then let it cool, "
    "and cut the cake into small pieces. My cat likes to sit"
)
OUTPUT_TOKENS = 16
OTHERS = 12
"""Other prompts that prefill serves during the wait. They take every block of its small cache once."""
AT_A_TIME = 4
BLOCK_TOKENS = 32
BLOCKS = 20
ANSWER_S = 300.0
"""Seconds that a process may take to start, or to answer."""
PREFILL_LEG = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Parameters that a router of vLLM sends with a prefill leg."""

Answer = dict[str, Any]


class Side:
    """A process of vLLM with its NixlConnector, which answers one line of JSON with another."""

    def __init__(self, options: argparse.Namespace, role: str, port: int) -> None:
        """Start the process. `role`: vLLM's `kv_role`. `port`: of the connector's side channel."""
        command = [sys.executable, __file__, options.model, "--role", role, "--port", str(port)]
        command += ["--kv-buffer-device", options.kv_buffer_device, "--dtype", options.dtype]
        command += [] if options.lease is None else ["--lease", str(options.lease)]
        with (
            Path(options.logs, f"{role}.log").open("w") if options.logs else Path(os.devnull).open("w") as log
        ):
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def send(self, prompts: list[str], max_tokens: int, kv: Answer | None = None) -> None:
        line = json.dumps({"prompts": prompts, "max_tokens": max_tokens, "kv_transfer_params": kv})
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def receive(self) -> list[Answer]:
        """Return the answers to the last prompts. Raises EOFError if the process has ended, TimeoutError."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_S)
        if not ready:
            raise TimeoutError(f"no answer within {ANSWER_S:.0f} s: --logs DIRECTORY shows why")
        line = self.process.stdout.readline()
        if not line:
            raise EOFError("a process of vLLM has ended: --logs DIRECTORY shows why")
        answers: list[Answer] = json.loads(line)
        return answers

    def generate(self, prompts: list[str], max_tokens: int, kv: Answer | None = None) -> list[Answer]:
        self.send(prompts, max_tokens, kv)
        return self.receive()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


class Pair:
    """One prefill and one decode process."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._wait_s = options.wait
        self.prefill = Side(options, "kv_producer", options.first_port)
        self.decode = Side(options, "kv_consumer", options.first_port + 1)

    def wait_started(self) -> None:
        self.prefill.receive()
        self.decode.receive()

    def end(self) -> None:
        self.prefill.end()
        self.decode.end()

    def alone(self) -> Answer:
        return self.decode.generate([PROMPT], OUTPUT_TOKENS)[0]

    def at_once(self) -> Answer:
        return self.decode.generate([PROMPT], OUTPUT_TOKENS, self._prefill_leg())[0]

    def late(self) -> Answer:
        leg = self._prefill_leg()
        self._wait_and_serve_others()
        return self.decode.generate([PROMPT], OUTPUT_TOKENS, leg)[0]

    def decode_stopped(self) -> Answer:
        leg = self._prefill_leg()
        os.kill(self.decode.process.pid, signal.SIGSTOP)
        try:
            self.decode.send([PROMPT], OUTPUT_TOKENS, leg)
            self._wait_and_serve_others()
        finally:
            os.kill(self.decode.process.pid, signal.SIGCONT)
        return self.decode.receive()[0]

    def _prefill_leg(self) -> Answer:
        parameters: Answer = self.prefill.generate([PROMPT], 1, PREFILL_LEG)[0]["kv_transfer_params"]
        return parameters

    def _wait_and_serve_others(self) -> None:
        time.sleep(self._wait_s)
        for _ in range(OTHERS // AT_A_TIME):
            self.prefill.generate([OTHER_PROMPT] * AT_A_TIME, 1)


def serve(options: argparse.Namespace) -> None:
    """Be one of the two processes: answer each line of the standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints goes to the log
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(options.port),
        "VLLM_NO_USAGE_STATS": "1",
    }
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    lease = {} if options.lease is None else {"kv_lease_duration": options.lease}
    llm = LLM(
        model=options.model,
        dtype=options.dtype,
        max_model_len=256,
        max_num_seqs=8,
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=BLOCKS,
        enable_prefix_caching=False,
        enforce_eager=True,
        kv_transfer_config={
            "kv_connector": "NixlConnector",
            "kv_role": options.role,
            "kv_buffer_device": options.kv_buffer_device,
            "kv_connector_extra_config": lease,
        },
    )
    print(json.dumps([]), file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        kv = work["kv_transfer_params"]
        params = SamplingParams(
            temperature=0,
            max_tokens=work["max_tokens"],
            ignore_eos=True,
            extra_args={"kv_transfer_params": kv} if kv else None,
        )
        done = llm.generate(work["prompts"], params, use_tqdm=False)
        found = [
            {
                "text": each.outputs[0].text,
                "token_ids": list(each.outputs[0].token_ids),
                "finish_reason": each.outputs[0].finish_reason,
                "kv_transfer_params": each.kv_transfer_params,
            }
            for each in done
        ]
        print(json.dumps(found), file=answers, flush=True)


def run(options: argparse.Namespace) -> None:
    """Start the pair, and print the answer of each experiment."""
    pair = Pair(options)
    try:
        pair.wait_started()
        for experiment in (pair.alone, pair.at_once, pair.late, pair.decode_stopped):
            answer = {"experiment": experiment.__name__.replace("_", " "), **experiment()}
            del answer["kv_transfer_params"]
            print(json.dumps(answer), flush=True)
    finally:
        pair.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="a directory or a name of the Hub, as vLLM takes it")
    parser.add_argument("--wait", type=float, default=32, help="seconds (default: 32)")
    parser.add_argument("--lease", type=int, help="kv_lease_duration, seconds (default: vLLM's, 30)")
    parser.add_argument("--kv-buffer-device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--dtype", default="float32", help="vLLM's dtype (default: float32)")
    parser.add_argument("--first-port", type=int, default=5600, help="first of the connectors' two ports")
    parser.add_argument("--logs", help="directory for the logs of both processes")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    (serve if options.role else run)(options)


if __name__ == "__main__":
    main()
