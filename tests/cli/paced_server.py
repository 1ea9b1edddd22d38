"""Server of the completions API with a known pace, which benchmarks have to measure.

python -m tests.cli.paced_server PORT [NAME=VALUE …]
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


@dataclass
class ServerPace:
    first_ms: float = 20.0
    gap_ms: float = 5.0
    chunk: int = 1
    """Tokens in one chunk."""
    takes_ids: int = 1
    begins: int = 1
    """Tokens that it counts before a text's words."""
    fails: int = 0
    """Number of requests of which the last fails; 0 for none."""
    breaks: int = 0
    """Number of requests of which the last fails in the middle of its stream; 0 for none."""
    cached: int = 0
    status: int = 429
    """Status of failing requests."""
    retry_after_s: int = -1
    """Retry-After header of failing requests, seconds. A negative value sends none."""


class PacedServer:
    """Server that answers with as many tokens as a request asks for."""

    def __init__(self, pace: ServerPace) -> None:
        self.pace = pace
        self.bodies: list[dict[str, Any]] = []

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self.health),
                Route("/v1/models", self.models),
                Route("/v1/completions", self.complete, methods=["POST"]),
                Route("/v1/chat/completions", self.complete, methods=["POST"]),
            ]
        )

    async def health(self, _: Request) -> Response:
        return Response()

    async def models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": "paced"}]})

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        chat = "messages" in body
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        if not isinstance(prompt, str) and not self.pace.takes_ids:
            return JSONResponse({"error": {"message": "prompt: texts only"}}, status_code=400)
        if self.pace.fails and len(self.bodies) % self.pace.fails == 0:
            said = self.pace.retry_after_s
            headers = {"Retry-After": str(said)} if said >= 0 else {}
            told = {"error": {"message": "overloaded"}}
            return JSONResponse(told, status_code=self.pace.status, headers=headers)
        count = len(prompt.split()) + self.pace.begins if isinstance(prompt, str) else len(prompt)
        broken = bool(self.pace.breaks) and len(self.bodies) % self.pace.breaks == 0
        return StreamingResponse(
            self._events(count, body["max_tokens"], chat, broken), media_type="text/event-stream"
        )

    async def _events(self, prompt: int, output: int, chat: bool, broken: bool) -> AsyncIterator[bytes]:
        if chat:
            yield _event([{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        await asyncio.sleep(self.pace.first_ms / 1000)
        for start in range(0, output, self.pace.chunk):
            if start:
                await asyncio.sleep(self.pace.gap_ms / 1000)
            if broken and start:
                yield b'data: {"error": {"message": "a worker died"}}\n\n'
                return
            text = " x" * min(self.pace.chunk, output - start)
            yield _event([{"index": 0, "delta": {"content": text}} if chat else {"index": 0, "text": text}])
        usage = {"prompt_tokens": prompt, "completion_tokens": output}
        details = {"prompt_tokens_details": {"cached_tokens": self.pace.cached}}
        yield _event([], usage | details)
        yield b"data: [DONE]\n\n"


def _event(choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
    return b"data: " + json.dumps({"choices": choices, "usage": usage}).encode() + b"\n\n"


if __name__ == "__main__":
    given = {name: float(value) for name, _, value in (each.partition("=") for each in sys.argv[2:])}
    whole = {name: value if name.endswith("_ms") else int(value) for name, value in given.items()}
    server = PacedServer(ServerPace(**whole))  # type: ignore[arg-type]
    uvicorn.run(server.app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
