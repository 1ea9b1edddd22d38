"""Load test of an OpenAI-compatible server: the requests that it sends, and its results."""

import json
import random
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Final

import httpx

from baton.cli.load_client import LoadResult, run_load
from baton.runtime.errors import StartupError

FIRST_ID: Final = 100
"""Smallest token id in random prompts. Smaller ones are special tokens in many vocabularies."""
WORDS: Final = (
    *("the", "of", "and", "to", "in", "a", "is", "that"),
    *("for", "it", "was", "on", "are", "as", "with", "at"),
)
"""Words of random text prompts. With a space before, each is one token in most vocabularies."""
TEXT_ONLY: Final = ("HTTP 400", "HTTP 415", "HTTP 422")
"""Beginnings of the failures that mean that a server accepts no token ids as a prompt."""


class NotMeasurable(StartupError):
    """The server does not answer the requests of the load test. The text has the server's message."""


class ApiEndpoint(StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self is ApiEndpoint.CHAT else "/v1/completions"


@dataclass(frozen=True, slots=True)
class Workload:
    """Kind of requests that a load test sends. The same seed makes the same requests."""

    prompt_tokens: int = 512
    output_tokens: int = 64
    endpoint: ApiEndpoint = ApiEndpoint.COMPLETIONS
    shared_prefix: float = 0.0
    """Share of each prompt, from 0 to 1, that is the same in all prompts."""
    vocabulary: int = 32_000
    """Upper bound of the token ids in random prompts; ids are smaller."""
    ignore_eos: bool = True
    as_text: bool = False
    """Whether prompts of the completions API are words instead of token ids. Chat prompts are always words.
    """
    seed: int = 0

    def bodies(self, model: str, count: int, run: str) -> list[bytes]:
        """Return `count` request bodies. Beyond the shared prefix, two runs have no prompt in common."""
        draw = range(FIRST_ID, self.vocabulary)
        name = f"{self.seed} {self.prompt_tokens}/{self.output_tokens}"
        shared = round(self.prompt_tokens * self.shared_prefix)
        prefix = random.Random(f"{name} prefix").choices(draw, k=shared)  # noqa: S311
        rng = random.Random(f"{name} run {run}")  # noqa: S311
        prompts = (prefix + rng.choices(draw, k=self.prompt_tokens - shared) for _ in range(count))
        return [json.dumps(self._body(model, ids)).encode() for ids in prompts]

    def _body(self, model: str, ids: list[int]) -> dict[str, Any]:
        body: dict[str, Any] = {"model": model, "max_tokens": self.output_tokens, "temperature": 0}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.ignore_eos:
            body["ignore_eos"] = True
        text = " ".join(WORDS[each % len(WORDS)] for each in ids)
        if self.endpoint is ApiEndpoint.CHAT:
            return body | {"messages": [{"role": "user", "content": text}]}
        return body | {"prompt": text if self.as_text else ids}


async def find_model(client: httpx.AsyncClient) -> str:
    """Return the id of the first model that the server lists. Raises NotMeasurable."""
    try:
        reply = await client.get("/v1/models")
        return str(reply.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise NotMeasurable(f"no server answers at {client.base_url}: {error}") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise NotMeasurable(f"{client.base_url}/v1/models names no model: give one by --model") from None


async def measure(
    client: httpx.AsyncClient,
    workload: Workload,
    requests: int,
    concurrency: int,
    *,
    model: str = "",
    warm_up: int = 4,
    run: str = "0",
    timeout_s: float = 600.0,
) -> tuple[dict[str, Any], LoadResult]:
    """Run the load test. Return its settings, and the result of its requests. Raises NotMeasurable.

    `concurrency`: number of requests at a time. A server that refuses token ids gets words, about one token
    each.
    """
    name = model or await find_model(client)

    async def send(run: str, count: int) -> LoadResult:
        bodies = workload.bodies(name, count, run)
        return await run_load(client, workload.endpoint.path, bodies, concurrency, timeout_s)

    probe = await send("probe", 1)
    refused = any(each.startswith(TEXT_ONLY) for each in probe.failures)
    if refused and workload.endpoint is ApiEndpoint.COMPLETIONS:
        workload = replace(workload, as_text=True)
        probe = await send("probe", 1)
    if not probe.answers:
        raise NotMeasurable(f"the first request was not answered: {probe.failures[0]}")
    await send("warm-up", warm_up)
    result = await send(run, requests)
    if not result.answers:
        raise NotMeasurable(f"no request was answered: {result.failures[0]}")
    load = asdict(workload) | {"concurrency": concurrency}
    return {"url": str(client.base_url), "model": name, "load": load}, result
