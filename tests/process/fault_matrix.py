"""Faults of each process, one after another on real stacks, by what clients see.

Real stacks, one fault after another.

`python -m tests.process.fault_matrix` runs all of it (an hour on two cores) and prints one JSON object;
`--table` prints the rows of docs/verification.md, `--only decode` or `--only pairs/decode-0/kill` runs
a part. Six clients ask greedy requests over and over, from before the fault until the stack has recovered:
each stream has to be what the reference library draws, to the token. Only connections to a bootstrap that
died may break. Their streams are continued by `Last-Event-ID`. Afterwards every gauge has to be back where it
was. With `--engine vllm` the workers compute on vLLM, and the reference is vLLM's own `LLM`. Run it then by
the Python of `make test-vllm`, `.venv/vllm/bin/python`.

pairs   two prefill and two decode workers of one rank each
groups  one prefill worker of two pipeline ranks, one decode worker of two tensor ranks, no other pair
hosts   as pairs, each worker on a host of its own (network namespaces: needs root), KV over TCP
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
from transformers import LlamaConfig

from baton.models.model_files import DEMO, prepare, resolve
from baton.runtime.model_options import LoadFormat
from tests.engine.tiny_models import save
from tests.http import web
from tests.models.eight_heads import EIGHT_HEADS, VOCABULARY, eight_heads, with_tokenizer
from tests.process.hosts import Hosts, hosts, missing
from tests.process.load import Asked, any_prompts, asked
from tests.process.stack import SPLIT, Stack, running_stack
from tests.process.stream_reader import NO_ANSWER, Broken, Failed, Refused, StreamReader, plain_http
from tests.vllm.oracle import vllm_greedy

CLIENTS: Final = 6
LENGTHS: Final = (40, 90, 150, 250, 330, 480)
OUTPUT_TOKENS: Final = 250
ANSWER_S: Final = 300.0
BEGUN: Final = 20
"""Tokens that each stream has had when the fault comes."""
KILLS: Final = 5
BETWEEN_KILLS_S: Final = 3.0
SLOW_S: Final = 10.0
SLOW_BEAT_S: Final = (0.09, 0.01)
"""Seconds for which a slow process is stopped and continued, in turns."""
SETTLED_ANSWERS: Final = 6
"""Answers after the recovery, so that what is left broken is seen."""
STANDSTILL: Final = "the streams do not go on"
TCP: Final = {"UCX_TLS": "tcp"}
VLLM: Final[dict[str, Any]] = {"engine": "vllm", "page_tokens": "32"}
VLLM_HEAD_DIM: Final = 32
"""The least that vLLM's attention on a CPU has."""

Fault = Callable[["Scene", str], None]


@dataclass
class Client:
    """A client that sends one prompt again and again, and checks every token."""

    stack: Stack
    model: str
    prompt: Sequence[int]
    want: Sequence[int]
    may_break: bool
    """The bootstrap dies: a connection may break with it, and its stream is continued."""
    answers: int = 0
    broken: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    longest_gap_s: float = 0.0
    had: int = 0
    """Tokens of the stream that runs."""
    _last_s: float = 0.0
    """Time of the last event, or of the request."""

    def run(self, leave: threading.Event) -> None:
        while not leave.is_set():
            self._ask()

    def _ask(self) -> None:
        """Send the request, and again with the id of the last event after each break that may come."""
        fields = {"model": self.model, "prompt": list(self.prompt), "max_tokens": len(self.want)}
        fields |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "stream": True}
        connect = plain_http("/v1/completions", json.dumps(fields).encode(), ANSWER_S)
        reader = StreamReader(connect, self._note_event)
        self.had, ends = 0, time.monotonic() + ANSWER_S
        while not reader.done:
            self._last_s = time.monotonic()
            try:
                reader.read(self.stack.url, reader.ids[-1] if reader.ids else "")
            except Failed as error:
                if not self._may_go_on(f"ended after {self.had} tokens: {error}", ends):
                    return
            except Broken as error:
                if not self._may_go_on(f"broke after {self.had} tokens: {error}", ends):
                    return
            except Refused as error:
                no_answer = str(error) == NO_ANSWER
                if no_answer and not self._may_go_on(f"{error}, after {self.had} tokens", ends):
                    return
                if not no_answer and not self._note_refusal(str(error)):
                    return
        self.answers += 1
        got = tokens_of(reader.events)
        if got != list(self.want):
            pairs = enumerate(zip(got, self.want, strict=False))
            place = next((at for at, (a, b) in pairs if a != b), len(got))
            self.wrong.append(f"parts from the reference at {place} of {len(self.want)}")

    def _note_event(self, reader: StreamReader) -> None:
        now = time.monotonic()
        self.longest_gap_s, self._last_s = max(self.longest_gap_s, now - self._last_s), now
        self.had += len(tokens_of(reader.events[-1:]))

    def _may_go_on(self, problem: str, ends: float) -> bool:
        """Count a break, and wait a moment. Return whether the stream is to be continued."""
        self.broken += 1
        if not self.may_break or time.monotonic() > ends:
            self.wrong.append(problem)
            return False
        time.sleep(0.2)
        return True

    def _note_refusal(self, code: str) -> bool:
        """Count a refusal while a side is away, and wait a moment. Return whether the stream has begun."""
        self.refused += 1
        if code != "no_worker":
            self.wrong.append(f"refused: {code}")
        time.sleep(0.2)
        return self.had > 0


def tokens_of(events: Sequence[dict[str, Any]]) -> list[int]:
    choices = (choice for event in events for choice in event["choices"])
    return [id_ for choice in choices for id_ in choice.get("token_ids") or ()]


@dataclass
class Scene:
    """A stack with a fault in it."""

    stack: Stack
    workers: int

    def pid(self, target: str) -> int:
        if "/" in target:
            name, rank = target.split("/")
            return self.stack.services[name].ranks()[int(rank)].pid
        return self.stack.services[target].process.pid

    def send(self, target: str, number: signal.Signals) -> None:
        os.kill(self.pid(target), number)

    def revive(self, target: str) -> None:
        """Restart an ended process by the same command line, as a platform does."""
        name = target.split("/")[0]
        self.stack.services[name].process.wait(ANSWER_S)
        self.stack.restart(name)

    def doom(self, target: str) -> None:
        """Stop counting the worker as ready."""
        if target != "bootstrap":
            self.stack.forget(target.split("/")[0])


def kill(scene: Scene, target: str) -> None:
    """Kill a process. A rank's launcher restarts its group by itself."""
    scene.doom(target)
    scene.send(target, signal.SIGKILL)
    if "/" not in target:
        scene.revive(target)


def kill_often(scene: Scene, target: str) -> None:
    for number in range(KILLS):
        if number:
            time.sleep(BETWEEN_KILLS_S)
        if "/" in target:
            with_rank_up(scene, target)
        kill(scene, target)


def with_rank_up(scene: Scene, target: str) -> None:
    """Wait until the rank's launcher has started its process again."""
    deadline = time.monotonic() + ANSWER_S
    while not Path(f"/proc/{scene.pid(target)}").exists():
        if time.monotonic() > deadline:
            raise AssertionError(f"{target} did not come back\n{scene.stack.tails()}")
        time.sleep(0.1)


def terminate(scene: Scene, target: str) -> None:
    """Send SIGTERM. A leader then drains its whole worker with its launcher. A following rank goes on as long
    as its leader does."""
    name, _, rank = target.partition("/")
    if rank in ("", "0"):
        scene.doom(target)
    scene.send(target, signal.SIGTERM)
    if rank in ("", "0"):
        scene.revive(target)
    else:
        time.sleep(BETWEEN_KILLS_S)
        assert scene.stack.services[name].process.poll() is None, f"{name} ended with one of its ranks"


def pause(scene: Scene, target: str, seconds: float) -> None:
    scene.send(target, signal.SIGSTOP)
    time.sleep(seconds)
    scene.send(target, signal.SIGCONT)


def slow(scene: Scene, target: str) -> None:
    still_s, going_s = SLOW_BEAT_S
    ends = time.monotonic() + SLOW_S
    while time.monotonic() < ends:
        scene.send(target, signal.SIGSTOP)
        time.sleep(still_s)
        scene.send(target, signal.SIGCONT)
        time.sleep(going_s)


def cut(scene: Scene, target: str, seconds: float) -> None:
    assert scene.stack.hosts is not None
    scene.stack.hosts.cut(target)
    time.sleep(seconds)
    scene.stack.hosts.mend(target)


HERE: Final[dict[str, Fault]] = {
    "kill": kill,
    "kill-5": kill_often,
    "term": terminate,
    "stop-2": partial(pause, seconds=2.0),
    "stop-20": partial(pause, seconds=20.0),
    "slow": slow,
}
CUTS: Final[dict[str, Fault]] = {"cut-5": partial(cut, seconds=5.0), "cut-60": partial(cut, seconds=60.0)}
SHAPES: Final[dict[str, tuple[Sequence[str], dict[str, Fault]]]] = {
    "pairs": (("bootstrap", "prefill-0", "decode-0"), HERE),
    "groups": (("prefill-0/0", "prefill-0/1", "decode-0/0", "decode-0/1"), HERE),
    "hosts": (("prefill-0", "decode-0"), CUTS),
}


@dataclass
class Found:
    """Result of one fault."""

    shape: str
    target: str
    fault: str
    answers: int
    broken: int
    """Connections that ended early, or found no bootstrap. Their streams were continued."""
    refused: int
    """Requests that were told, before they had begun, that a side has no worker."""
    longest_gap_s: float
    """Longest time between two tokens of a stream, or from the request to the first token, seconds."""
    recovered_s: float
    """Time from the fault's end until everything is ready, seconds."""
    problems: list[str]


def dies(target: str, fault: str) -> bool:
    return target == "bootstrap" and fault in ("kill", "kill-5", "term")


def run_one(scene: Scene, known: Asked, shape: str, target: str, name: str, fault: Fault) -> Found:
    start = scene.stack.idle_gauges()
    model = web().get(f"{scene.stack.url}/v1/models").json()["data"][0]["id"]
    clients = [
        Client(scene.stack, model, prompt, answer, dies(target, name))
        for prompt, answer in zip(known.prompts, known.answers, strict=True)
    ]
    problems: list[str] = []
    recovered_s = 0.0
    with _asking(clients):
        try:
            scene.stack.wait_until(
                lambda: all(each.answers or each.had >= BEGUN for each in clients), ANSWER_S, STANDSTILL
            )
            fault(scene, target)
            ended = time.monotonic()
            scene.stack.wait_ready(scene.workers)
            recovered_s = time.monotonic() - ended
            done = sum(each.answers for each in clients)
            scene.stack.wait_until(
                lambda: sum(each.answers for each in clients) >= done + SETTLED_ANSWERS, ANSWER_S, STANDSTILL
            )
        except AssertionError as error:
            problems.append(str(error))
    problems += [f"client {index}: {told}" for index, each in enumerate(clients) for told in each.wrong]
    try:
        scene.stack.wait_idle(start)
    except (AssertionError, httpx.TransportError) as error:
        problems.append(f"not at idle: {str(error).partition(chr(10) + '----')[0]}")
    return Found(
        shape=shape,
        target=target,
        fault=name,
        answers=sum(each.answers for each in clients),
        broken=sum(each.broken for each in clients),
        refused=sum(each.refused for each in clients),
        longest_gap_s=round(max(each.longest_gap_s for each in clients), 1),
        recovered_s=round(recovered_s, 1),
        problems=problems,
    )


@contextmanager
def _asking(clients: Sequence[Client]) -> Iterator[None]:
    leave = threading.Event()
    threads = [threading.Thread(target=each.run, args=(leave,)) for each in clients]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        leave.set()
        for thread in threads:
            thread.join(ANSWER_S)


@contextmanager
def scene_of(shape: str, model: Path, engine: str) -> Iterator[Scene]:
    """Context of a stack in the form of `shape`, whose workers compute on `engine`."""
    key = model / "reasoning-key"
    key.write_text("a key that outlives the bootstrap\n")
    # Lives as short as a user's: a fault has to be noticed by the defaults.
    run = partial(
        running_stack,
        str(model),
        bootstrap={"lease_ms": "3000", "reasoning_key_file": str(key)},
        dtype="float32",
        kv_cache_memory="16MiB",
        by_commands=engine == "vllm",
        **(VLLM if engine == "vllm" else {}),
    )
    chunks = {"chunk_tokens": "64"}
    with ExitStack() as stack:
        if shape == "groups":
            running = run(
                prefill=[{"pp": "2", **chunks}], decode=[{"tp": "2", **SPLIT}], group_timeout_ms="10000"
            )
        else:
            apart: Hosts | None = stack.enter_context(hosts()) if shape == "hosts" else None
            environ = {} if apart is None else TCP
            running = run(prefill=[chunks] * 2, decode=[SPLIT] * 2, environ=environ, hosts=apart)
        yield Scene(stack.enter_context(running), 2 if shape == "groups" else 4)


def model_of(engine: str, folder: Path) -> tuple[Path, Asked]:
    """Return the directory of the model in `folder`, and the requests with the answers of its reference."""
    demo, prompts = prepare(resolve(DEMO, LoadFormat.AUTO), lambda _: None), any_prompts(LENGTHS, VOCABULARY)
    if engine == "torch":
        model = eight_heads(folder / "model", demo)
        return model, asked(model, prompts, OUTPUT_TOKENS)
    config = LlamaConfig(**EIGHT_HEADS.to_dict() | {"head_dim": VLLM_HEAD_DIM})
    model = with_tokenizer(save(config, folder / "model"), demo)
    return model, Asked(prompts, vllm_greedy(model, prompts, OUTPUT_TOKENS, folder))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.process.fault_matrix", description=__doc__)
    parser.add_argument("--only", default="", help="what a row's SHAPE/TARGET/FAULT has to contain")
    parser.add_argument("--table", action="store_true", help="rows of Markdown in place of JSON")
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch", help="engine of the workers")
    args = parser.parse_args()
    found: list[Found] = []
    left_out = {}
    with tempfile.TemporaryDirectory(prefix="baton-matrix-") as folder:
        model, known = model_of(args.engine, Path(folder))
        for shape, (targets, faults) in SHAPES.items():
            chosen = [
                (target, name)
                for target in targets
                for name in faults
                if args.only in f"{shape}/{target}/{name}"
            ]
            why = missing() if shape == "hosts" else None
            if why is not None and chosen:
                left_out[shape] = why
            elif chosen:
                with scene_of(shape, model, args.engine) as scene:
                    for target, name in chosen:
                        found.append(run_one(scene, known, shape, target, name, faults[name]))
                        sys.stderr.write(json.dumps(asdict(found[-1])) + "\n")
    if args.table:
        sys.stdout.write("".join(f"{row(each)}\n" for each in found))
    else:
        told = {"faults": [asdict(each) for each in found], "left_out": left_out}
        sys.stdout.write(json.dumps({**told, "ok": not any(each.problems for each in found)}) + "\n")
    return 1 if left_out or any(each.problems for each in found) else 0


def row(found: Found) -> str:
    """Return the row of docs/verification.md's table."""
    seen = "; ".join(found.problems) or "identical, gauges back"
    cells = (
        found.shape,
        found.target,
        found.fault,
        str(found.answers),
        str(found.broken),
        f"{found.longest_gap_s} s",
        f"{found.recovered_s} s",
        seen,
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
