"""Answers of an engine on vLLM in a process of its own: alone, together, in chunks, and handed over by NIXL.

As a program it reads {"model", "device", "dtype", "page_tokens", "prompts", "tokens"} from standard input,
and writes an object to the file that is its argument.
"""

import json
import sys
import time
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any, Final

from baton.engine_interface import Row, Sequence
from baton.ids import Incarnation
from baton.inference.step_engine import StepEngine
from baton.rooms.request import Request, Sampling
from baton.transfer.nixl import NixlTransfer
from baton.transfer.nixl_library import install_memory_hooks
from baton.transfer.transfer_protocol import PutState, Region
from tests.transfer.puppet import Puppet
from tests.vllm.conftest import settings
from tests.vllm.driving import GREEDY, Driver

CHUNK: Final = 24
DRAWN: Final = Sampling(temperature=1.0, seed=7)
KV_BYTES: Final = 64 << 20
HERE, ELSEWHERE = Incarnation(1), 2
PUT_S: Final = 60.0


def main(file: Path, asked: dict[str, Any]) -> None:
    install_memory_hooks()
    from baton.vllm.engine_startup import start_rank

    given = {name: asked[name] for name in ("device", "dtype", "page_tokens")}
    engine = start_rank(settings(asked["model"], kv_cache_memory=KV_BYTES, **given), 1)
    engine.bind_thread()
    driver, prompts, tokens = Driver(engine), asked["prompts"], asked["tokens"]
    alone = [driver.answers([each], tokens)[0] for each in prompts]
    answers = {
        "alone": alone,
        "together": driver.answers(prompts, tokens),
        "in chunks": driver.answers(prompts, tokens, chunk=CHUNK),
        "with drafts": driver.answers(prompts, tokens, drafts=alone),
        "handed over": [hand_over(engine, each, tokens, file.with_suffix(".txt")) for each in prompts[-1:]],
    }
    drawn = {
        "alone": [driver.answers([each], tokens, sampling=DRAWN)[0] for each in prompts],
        "together": driver.answers(prompts, tokens, sampling=DRAWN),
    }
    from vllm.compilation.counter import compilation_counter

    facts = {
        "encoding": engine.cache.group.encoding,
        "graphs": compilation_counter.num_cudagraph_captured,
        "device": engine.cache.device,
    }
    file.write_text(json.dumps({"answers": answers, "drawn": drawn, "facts": facts}))


def hand_over(engine: StepEngine, prompt: Items[int], tokens: int, output: Path) -> list[int]:
    """Return the greedy answer behind `prompt`, whose pages go to another process and come back to others.

    Both ways are writes over NIXL, posted as soon as a step has returned. In between all pages hold NaN.
    """
    cache, page = engine.cache, engine.cache.group.page_bytes
    count = cache.group.pages_for(len(prompt))
    transfer = NixlTransfer(HERE)
    transfer.register(Region("kv", cache.address, cache.length, cache.device))
    other = Puppet(ELSEWHERE, None, cache.length, {}, output, cache.device)
    try:
        transfer.connect(other.endpoint())
        other.ask("connect", transfer.endpoint())
        sent = Sequence(Request("sent", tuple(prompt), tokens, sampling=GREEDY), [])
        [first] = engine.step([Row(sent, 0, len(prompt), (range(count),), sample=True)])
        assert isinstance(first, tuple), first
        posted = transfer.put(other.incarnation, "kv", [(0, 0, count * page)])
        _wait(transfer, lambda: transfer.poll(posted))
        cache.tensor.fill_(float("nan"))
        engine.bind_thread()  # waits for the device
        table = [cache.pages - 1 - index for index in range(cache.group.pages_for(len(prompt) + tokens))]
        runs = [(index * page, table[index] * page, page) for index in range(count)]
        returned = other.ask("put", HERE, "kv", runs)
        _wait(transfer, lambda: other.ask("poll", returned))
        got = Sequence(Request("got", tuple(prompt), tokens, sampling=GREEDY), [first[0].id])
        while len(got.output) < tokens:
            [taken] = engine.step([Row(got, got.length - 1, got.length, (table,), sample=True)])
            assert isinstance(taken, tuple), taken
            got.output.append(taken[0].id)
        return got.output
    finally:
        other.kill()
        transfer.close()


def _wait(transfer: NixlTransfer, state: Any) -> None:
    give_up = time.monotonic() + PUT_S
    while (now := state()) is PutState.PENDING:
        assert time.monotonic() < give_up, "the put does not end"
        transfer.progress()
    assert now is PutState.DONE, now


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.load(sys.stdin))
