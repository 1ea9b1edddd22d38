"""What do several answers to one prompt cost beside one: in bytes of KV, and until the first token?"""

import json
import random
import statistics
import time
from typing import Annotated, Any, Final

import httpx
import typer

from services.cli.bench.report import AsJson, Runs

REQUEST_S: Final = 300.0
WARM_UP: Final = 2


def choices(
    runs: Runs = 10,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Of each request; every prompt is another.")
    ] = 1000,
    output_tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 4,
    answers: Annotated[int, typer.Option("--n", min=2, max=128, help="Answers beside one.")] = 8,
    url: Annotated[str, typer.Option(help="A stack on this host that runs already.")] = "",
    flags: Annotated[str, typer.Option(help="Of `baton serve`, when it is started here.")] = "",
    _: AsJson = True,
) -> None:
    """Requests with one answer and with several, one at a time and in turns.

    `ratio`: the time until the first token of any answer, several beside one. `ratio_every`: until each of
    them has its first token, beside the one's.
    """
    from services.cli.bench.handover_stack import running

    with running(url, flags) as address:
        measured = _measure(address, runs, prompt_tokens, output_tokens, answers)
    one, several = measured[1], measured[answers]
    body = {
        "benchmark": "choices",
        "runs": runs,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "n": answers,
        "bytes": {str(n): sorted({each["bytes"] for each in asked}) for n, asked in measured.items()},
        "first_token_ms": {str(n): _median_ms(asked, "first") for n, asked in measured.items()},
        "every_first_token_ms": {str(n): _median_ms(asked, "every") for n, asked in measured.items()},
        "whole_ms": {str(n): _median_ms(asked, "whole") for n, asked in measured.items()},
        "ratio": round(_median_ms(several, "first") / _median_ms(one, "first"), 3),
        "ratio_every": round(_median_ms(several, "every") / _median_ms(one, "every"), 3),
    }
    print(json.dumps(body))


Measured = dict[str, int]
"""Of one request: bytes of KV that were sent, and microseconds until the first token, until the last answer's
first token, and until its end."""


def _measure(
    url: str, runs: int, prompt_tokens: int, output_tokens: int, answers: int
) -> dict[int, list[Measured]]:
    from services.cli.bench.room_times import TOKENS, filed_room, times_of

    words = random.Random(time.monotonic_ns())  # noqa: S311 prompts that no cache has seen
    measured: dict[int, list[Measured]] = {1: [], answers: []}
    with httpx.Client(base_url=url, timeout=REQUEST_S, trust_env=False) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        for run in range(WARM_UP + runs):
            for n in measured if run % 2 else reversed(measured):
                name = f"bench-{time.monotonic_ns()}"
                body = {
                    "model": model,
                    "prompt": words.choices(TOKENS, k=prompt_tokens),
                    "n": n,
                    "max_tokens": output_tokens,
                    "temperature": 1.0,
                    "ignore_eos": True,
                    "stream": True,
                    "return_token_ids": True,
                }
                asked = _ask(client, name, body)
                asked["bytes"] = times_of({}, filed_room(client, name)).length
                if run >= WARM_UP:
                    measured[n].append(asked)
    return measured


def _ask(client: httpx.Client, name: str, body: dict[str, Any]) -> Measured:
    from services.cli.bench.room_times import now_us

    sent_us = now_us()
    first_us: dict[int, int] = {}
    with client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": name}) as reply:
        if reply.status_code != httpx.codes.OK:
            reply.read()
            raise RuntimeError(f"HTTP {reply.status_code}: {reply.text[:500]}")
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                at_us = now_us() - sent_us
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    if choice["token_ids"]:
                        first_us.setdefault(choice["index"], at_us)
    if len(first_us) != body["n"]:
        raise RuntimeError(f"{len(first_us)} answers came, {body['n']} were asked for")
    return {"first": min(first_us.values()), "every": max(first_us.values()), "whole": now_us() - sent_us}


def _median_ms(asked: list[Measured], name: str) -> float:
    return round(statistics.median(each[name] for each in asked) / 1000, 3)
