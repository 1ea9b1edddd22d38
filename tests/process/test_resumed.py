"""`stream-is-prefix` in a real stack: the router is killed in mid-stream, and the client's stream goes on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.http import web
from tests.process.stack import Stack, running_stack
from tests.process.stream_reader import Broken, StreamReader, plain_http
from tests.process.streamed_requests import chat, without

CUT_AT = 12
"""Number of events after which the router is killed."""
TOKENS = 80
DRAWN: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "min_tokens": 60, "max_tokens": TOKENS}
COUNTS = frozenset({"prompt_tokens_details"})
"""Counts of the prefix cache."""


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


def reader_of(stack: Stack, fields: dict[str, Any]) -> StreamReader:
    model = web().get(f"{stack.url}/v1/models").json()["data"][0]["id"]
    request = chat(**DRAWN, **fields, return_token_ids=True, stream_options={"include_usage": True})
    return StreamReader(plain_http(request.path, request.encode(model)))


def choices(reader: StreamReader) -> list[dict[str, Any]]:
    return [choice for event in reader.events for choice in event["choices"]]


def tokens(reader: StreamReader) -> list[int]:
    return [id_ for choice in choices(reader) for id_ in choice.get("token_ids", ())]


def text(reader: StreamReader) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in choices(reader))


def test_a_stream_goes_on_after_its_router_was_killed(stack: Stack) -> None:
    def kill(reader: StreamReader) -> None:
        if len(reader.events) == CUT_AT and not reader.breaks:
            stack.services["bootstrap"].kill()

    for fields in ({"seed": 7}, {}):
        read = reader_of(stack, fields)
        read.on_event = kill
        with pytest.raises(Broken):
            read.read(stack.url)
        cut = len(read.ids)
        assert CUT_AT <= cut < TOKENS
        assert not read.done
        stack.restart("bootstrap")
        stack.wait_ready()
        read.read(stack.url, read.ids[-1])
        assert read.done
        assert len(set(read.ids)) == len(read.ids)
        assert len(tokens(read)) >= DRAWN["min_tokens"]

        whole = StreamReader(read.connect)
        whole.read(stack.url, read.ids[0])
        assert tokens(whole) == tokens(read)
        assert [*read.ids[:1], *whole.ids] == read.ids
        assert without(COUNTS, whole.events) == without(COUNTS, read.events[1:])
        if "seed" in fields:
            anew = StreamReader(read.connect)
            anew.read(stack.url)
            assert (tokens(anew), text(anew)) == (tokens(read), text(read))


def test_the_first_connection_may_still_be_open(stack: Stack) -> None:
    """Both requests have the same id. Each ends by itself, and nothing is left of either."""
    whole = reader_of(stack, {})
    whole.read(stack.url)
    start, rest = stack.idle_gauges(), StreamReader(whole.connect)
    with whole.connect(stack.url, whole.ids[0]):
        rest.read(stack.url, whole.ids[5])
    assert rest.done
    assert rest.ids == whole.ids[6:]
    stack.wait_idle(start)
