"""Test of `python -m bench conversations`: what prefix caches spare, with one bootstrap and with two."""

import pytest

from tests.bench.commands import bench

pytestmark = [pytest.mark.bench, pytest.mark.stack]


def test_each_stack_finds_what_the_turns_before_have_cached() -> None:
    sizes = ["--bootstraps", "1,2", "--workers", "2", "--talks", "2", "--turns", "3", "--words", "20"]
    body = bench("conversations", "--json", *sizes, "--flags", "--kv-cache-memory 64MiB")
    assert set(body["bootstraps"]) == {"1", "2"}
    one, two = body["bootstraps"].values()
    assert one["prompt_tokens"] == two["prompt_tokens"] > one["cached_tokens"] > 0
    assert body["ratio"] == round(two["hits"] / one["hits"], 3)
    assert body["ratio_of"] == ["--bootstraps 2", "--bootstraps 1"]
