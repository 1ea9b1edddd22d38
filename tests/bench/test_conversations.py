"""Test of `python -m bench conversations`: what prefix caches spare, with two bootstraps."""

import pytest

from tests.bench.commands import bench

pytestmark = [pytest.mark.bench, pytest.mark.stack]


def test_a_stack_finds_what_the_turns_before_have_cached() -> None:
    sizes = ["--bootstraps", "2", "--workers", "1", "--talks", "2", "--turns", "3", "--words", "20"]
    body = bench("conversations", "--json", *sizes, "--flags", "--kv-cache-memory 64MiB")
    found = body["bootstraps"]["2"]
    assert found["prompt_tokens"] > found["cached_tokens"] > 0
    assert found["hits"] == round(found["cached_tokens"] / found["prompt_tokens"], 4)
    assert body["ratio"] == 1.0, "the last stack beside the first"
    assert body["ratio_of"] == ["--bootstraps 2", "--bootstraps 2"]
