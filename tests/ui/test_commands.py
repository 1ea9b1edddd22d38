"""Tests that `baton top` and `baton explain` show a running stack in a terminal."""

import json

from tests.cli.typed import forked_baton
from tests.process.stack import Stack
from tests.ui.conftest import Streaming


def test_explain_prints_the_story_of_a_request_line_by_line(stack: Stack) -> None:
    client = Streaming(stack, "explained-1", tokens=8)
    client.join()
    said = forked_baton("explain", "cmpl-explained-1", "--url", stack.url)
    assert said.returncode == 0, said.stderr
    for words in ("explained-1  answered", "8 tokens passed on", "computes the prompt", "granted", "retired"):
        assert words in said.stdout, said.stdout
    # Each rank's own evidence.
    assert "prefill-0/1" in said.stdout
    story = json.loads(forked_baton("explain", "explained-1", "--url", stack.url, "--json").stdout)
    assert story["state"] == "answered"
    times = [line["at_ms"] for line in story["lines"]]
    assert times == sorted(times)
    assert times[0] == 0.0


def test_top_prints_workers_queues_pages_and_requests_once(stack: Stack) -> None:
    said = forked_baton("top", "--once", "--url", stack.url)
    assert said.returncode == 0, said.stderr
    for words in ("prefill-0", "decode-1", "ready", "running 0", "free", "waiting for workers"):
        assert words in said.stdout, said.stdout
    live = json.loads(forked_baton("top", "--json", "--url", stack.url).stdout)
    assert [worker["name"] for worker in live["workers"]] == ["prefill-0", "decode-0", "decode-1"]
    assert live["workers"][0]["ranks"] == 2


def test_an_id_that_is_not_kept_is_told_with_what_is(stack: Stack) -> None:
    said = forked_baton("explain", "never-was", "--url", stack.url)
    assert said.returncode == 1
    assert "Nothing is kept of request 'never-was'" in said.stderr
    assert "--failed-rooms-kept" in said.stderr
