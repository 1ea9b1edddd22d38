"""`stream-is-prefix` in a real stack: the router is killed in mid-stream, and the client's stream goes on."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http import web
from tests.process.stack import Stack, running_stack

ANSWER_S = 120.0
CUT_AT = 12
"""Number of events after which the router is killed."""
TOKENS = 80
MESSAGES = [{"role": "user", "content": "Once upon a time, in a village by the sea,"}]
DRAWN: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "min_tokens": 60}


@pytest.fixture(scope="module")
def stack(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A pair of workers, and a router whose key is in a file."""
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text("a key that outlives the router\n")
    with running_stack(
        str(demo_model_dir),
        bootstrap={"reasoning_key_file": str(key)},
        dtype="float32",
        kv_cache_memory="128MiB",
    ) as running:
        yield running


@dataclass
class Got:
    """Events of a stream that a client has got."""

    ids: list[str] = field(default_factory=list)
    chunks: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    @property
    def tokens(self) -> list[int]:
        choices = [choice for chunk in self.chunks for choice in chunk["choices"]]
        return [id_ for choice in choices for id_ in choice.get("token_ids", ())]

    @property
    def text(self) -> str:
        pieces = [choice["delta"].get("content") for chunk in self.chunks for choice in chunk["choices"]]
        return "".join(filter(None, pieces))


def body_of(stack: Stack, **more: Any) -> bytes:
    model = web().get(f"{stack.url}/v1/models").json()["data"][0]["id"]
    fields = {"model": model, "messages": MESSAGES, "max_tokens": TOKENS, "stream": True, **DRAWN, **more}
    return json.dumps(fields | {"return_token_ids": True, "stream_options": {"include_usage": True}}).encode()


def read(stack: Stack, body: bytes, got: Got, after: str = "", kill_at: int = 0) -> None:
    """Add the events of a stream to `got`. `after`: id of the event behind which it goes on. `kill_at`:
    number of events after which the router is killed; 0 for never."""
    headers = {"content-type": "application/json"} | ({"last-event-id": after} if after else {})
    url = f"{stack.url}/v1/chat/completions"
    with web().stream("POST", url, content=body, headers=headers, timeout=ANSWER_S) as reply:
        assert reply.status_code == 200, reply.read()
        id_ = ""
        for line in reply.iter_lines():
            if line.startswith("id: "):
                id_ = line[4:]
            elif line == "data: [DONE]":
                got.done = True
            elif line.startswith("data: "):
                got.ids.append(id_)
                got.chunks.append(json.loads(line[6:]))
                assert "error" not in got.chunks[-1]
                if len(got.ids) == kill_at:
                    stack.services["bootstrap"].kill()


def test_a_stream_goes_on_after_its_router_was_killed(stack: Stack) -> None:
    for more in ({"seed": 7}, {}):
        body, got = body_of(stack, **more), Got()
        with pytest.raises(httpx.TransportError):
            read(stack, body, got, kill_at=CUT_AT)
        cut = len(got.ids)
        assert CUT_AT <= cut < TOKENS
        assert not got.done
        stack.restart("bootstrap")
        stack.wait_ready()
        read(stack, body, got, after=got.ids[-1])
        assert got.done
        assert len(set(got.ids)) == len(got.ids)
        assert len(got.tokens) >= DRAWN["min_tokens"]

        whole = Got()
        read(stack, body, whole, after=got.ids[0])
        assert whole.tokens == got.tokens
        assert [*got.ids[:1], *whole.ids] == got.ids
        assert timeless(got.chunks[1:]) == timeless(whole.chunks)
        if "seed" in more:
            anew = Got()
            read(stack, body, anew)
            assert (anew.tokens, anew.text) == (got.tokens, got.text)


def test_the_first_connection_may_still_be_open(stack: Stack) -> None:
    """Both requests have the same id. Each ends by itself, and nothing is left of either."""
    body, whole, rest = body_of(stack), Got(), Got()
    read(stack, body, whole)
    start = stack.idle_gauges()
    headers = {"content-type": "application/json", "last-event-id": whole.ids[0]}
    url = f"{stack.url}/v1/chat/completions"
    with web().stream("POST", url, content=body, headers=headers, timeout=ANSWER_S) as unread:
        assert unread.status_code == 200
        read(stack, body, rest, after=whole.ids[5])
    assert rest.done
    assert rest.ids == whole.ids[6:]
    stack.wait_idle(start)


def timeless(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the chunks without the counts of the prefix cache."""
    for chunk in chunks:
        if chunk.get("usage"):
            chunk["usage"].pop("prompt_tokens_details", None)
    return chunks
