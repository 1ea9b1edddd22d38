"""Tests that the operator's page of one bootstrap shows the requests of the other, or that it is silent."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.http import web
from tests.process.stack import Stack, running_stack
from tests.ui.conftest import ANSWER_S, Seen

OTHER = "bootstrap-1"


@pytest.fixture
def stack(demo_model_dir: Path) -> Iterator[Stack]:
    """A stack of two bootstraps, with a request at the one whose page is not opened."""
    with running_stack(
        str(demo_model_dir), bootstraps=2, dtype="float32", kv_cache_memory="64MiB"
    ) as running:
        url = running.services[OTHER].http
        model = web().get(f"{url}/v1/models").json()["data"][0]["id"]
        body = {"model": model, "prompt": "The capital of France is", "max_tokens": 4}
        headers = {"X-Request-Id": "at-the-other"}
        answer = web().post(f"{url}/v1/completions", json=body, headers=headers, timeout=ANSWER_S)
        assert answer.status_code == 200, answer.text
        yield running


def test_the_page_of_one_bootstrap_shows_the_whole_stack(seen: Seen, stack: Stack) -> None:
    page, (own, other) = seen.page, stack.bootstraps.split(",")
    page.goto(f"{stack.url}/ui")
    rows = page.locator(".bootstraps li")
    expect(rows).to_have_text(
        [f"{each} 0 waiting, 0 running; ready: 1 prefill, 1 decode" for each in (own, other)]
    )
    row = page.locator("tr", has_text="at-the-other")
    expect(row.locator(".where")).to_contain_text(f"at {other}")
    seen.fits()
    seen.is_read()
    row.locator("a").click()
    expect(page.locator(".facts div", has_text="Bootstrap")).to_have_text(f"Bootstrap{other}")
    expect(page.locator(".headline")).to_contain_text("Answered in")
    expect(page.locator(".facts a")).to_have_count(0)
    stack.services[OTHER].kill()
    page.goto(f"{stack.url}/ui")
    expect(rows.last).to_have_text(f"Bootstrap {other} did not answer: there is no connection to it.")
    expect(rows).to_have_count(2)
    for width in (1280, 400):
        page.set_viewport_size({"width": width, "height": 860})
        seen.fits()
        seen.is_read()
