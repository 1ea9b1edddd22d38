"""Which of two vLLM servers does what? The prefill server one token, the decode server the rest.

    vllm_router.py PORT PREFILL_URL DECODE_URL

The protocol of vLLM's NIXL connector: the prefill server is asked for one token and told that the decoding is
done elsewhere; what it answers under `kv_transfer_params` goes with the request to the decode server, which
fetches the KV cache. The whole answer comes from the decode server.
"""

import sys
import uuid

import aiohttp
import uvloop
from aiohttp import web

BODY_BYTES_MAX = 64 * 2**20
ELSEWHERE = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Router:
    def __init__(self, prefill: str, decode: str) -> None:
        self._prefill = prefill
        self._decode = decode
        self._http: aiohttp.ClientSession | None = None

    async def connect(self, _: web.Application) -> None:
        self._http = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0)
        )

    async def complete(self, request: web.Request) -> web.StreamResponse:
        assert self._http is not None
        body = await request.json()
        headers = {"X-Request-Id": str(uuid.uuid4())}
        first = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": ELSEWHERE}
        for name in ("stream_options", "min_tokens", "max_completion_tokens"):
            first.pop(name, None)
        async with self._http.post(self._prefill + request.path, json=first, headers=headers) as reply:
            prefilled = await reply.json()
            if reply.status != 200:
                return web.json_response(prefilled, status=reply.status)
        body["kv_transfer_params"] = prefilled["kv_transfer_params"]
        async with self._http.post(self._decode + request.path, json=body, headers=headers) as reply:
            answer = web.StreamResponse(status=reply.status)
            answer.content_type = reply.content_type
            await answer.prepare(request)
            async for chunk in reply.content.iter_any():
                await answer.write(chunk)
            await answer.write_eof()
            return answer

    async def pass_on(self, request: web.Request) -> web.Response:
        """What either server could answer; ready means that both are."""
        assert self._http is not None
        text, status = b"", 503
        for url in (self._prefill, self._decode):
            try:
                async with self._http.get(url + request.path) as reply:
                    text, status = await reply.read(), reply.status
            except aiohttp.ClientConnectionError:
                return web.Response(status=503)
            if status != 200:
                break
        return web.Response(body=text, status=status, content_type="application/json")


def main() -> None:
    port, prefill, decode = sys.argv[1:]
    router = Router(prefill, decode)
    app = web.Application(client_max_size=BODY_BYTES_MAX)
    app.on_startup.append(router.connect)
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.router.add_post(path, router.complete)
    for path in ("/health", "/v1/models"):
        app.router.add_get(path, router.pass_on)
    uvloop.install()
    web.run_app(app, host="127.0.0.1", port=int(port), print=None)


if __name__ == "__main__":
    main()
