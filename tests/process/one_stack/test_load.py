"""Tests of a stack's traffic: it moves the pages of its prompts, no more, and sleeps when idle."""

import asyncio
import json
from pathlib import Path

import psutil

from tests.http import web
from tests.process.stack import Stack

OUTPUT_TOKENS = 8
IDLE_SECONDS = 2.0
IDLE_SHARE_MAX = 0.05
IDLE_TRIES = 8


def _body(model: str, prompt: list[int]) -> dict[str, object]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "return_token_ids": True,
    }


def test_transferred_bytes_are_the_bytes_of_the_prompts_pages(
    idle_stack: Stack, demo_model_dir: Path
) -> None:
    """A page holds 16 tokens of all layers: whole pages travel, no more and no fewer."""
    prefill = idle_stack.services["prefill-0"]
    model = web().get(f"{idle_stack.url}/v1/models").json()["data"][0]["id"]
    config = json.loads((demo_model_dir / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    token_bytes = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim * 4
    before = prefill.total("baton_kv_transfer_bytes_total")
    lengths = (1, 15, 16, 17, 100, 257)
    for length in lengths:
        body = _body(model, [1_000 + length] * length)  # of which no two begin alike
        assert web().post(f"{idle_stack.url}/v1/completions", json=body, timeout=120).status_code == 200
    pages = sum(-(-length // 16) for length in lengths)
    assert prefill.total("baton_kv_transfer_bytes_total") - before == pages * 16 * token_bytes


async def test_an_idle_stack_sleeps(idle_stack: Stack) -> None:
    """All services together use less than 5 % of one core's processor time. Soon after the start they may
    still be given memory, which ends."""
    processes = [psutil.Process(service.process.pid) for service in idle_stack.services.values()]
    shares: list[float] = []
    while len(shares) < IDLE_TRIES and (not shares or shares[-1] >= IDLE_SHARE_MAX):
        before = [process.cpu_times() for process in processes]
        await asyncio.sleep(IDLE_SECONDS)
        after = [process.cpu_times() for process in processes]
        used = sum(
            end.user + end.system - start.user - start.system
            for start, end in zip(before, after, strict=True)
        )
        shares.append(used / IDLE_SECONDS)
    assert shares[-1] < IDLE_SHARE_MAX, shares


def test_each_service_is_a_process_of_its_own(idle_stack: Stack) -> None:
    pids = {service.process.pid for service in idle_stack.services.values()}
    assert len(pids) == 3
    commands = [psutil.Process(pid).cmdline() for pid in pids]
    assert {word for command in commands for word in command} >= {"bootstrap", "prefill", "decode"}
