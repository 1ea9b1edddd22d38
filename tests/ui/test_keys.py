"""Does the page work where the bootstrap asks for a key? A browser gives it as a password."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.cli.typed import forked_baton
from tests.http import web
from tests.idle import POLL_S
from tests.process.stack import READY_S, Stack

KEY = "a-key-of-an-operator"


@pytest.fixture
def keyed(demo_model_dir: Path, tmp_path: Path) -> Iterator[Stack]:
    """A bootstrap without workers."""
    (tmp_path / "keys").write_text(f"{KEY}\n")
    alone = Stack(str(demo_model_dir), tmp_path)
    service = alone.start_bootstrap(api_key_file=str(tmp_path / "keys"))
    try:
        deadline = time.monotonic() + READY_S
        while not _answers(alone.url):
            assert time.monotonic() < deadline, service.tail()
            time.sleep(POLL_S)
        yield alone
    finally:
        service.kill()


def _answers(url: str) -> bool:
    try:
        return web().get(f"{url}/health", timeout=5).is_success
    except httpx.TransportError:
        return False


def test_the_page_and_the_commands_show_nothing_without_a_key_and_all_with_it(
    browser: Browser, keyed: Stack
) -> None:
    for path in ("ui", "ui/app.js", "live", "workers", "requests", "requests/x"):
        assert web().get(f"{keyed.url}/{path}", timeout=10).status_code == 401, path
    context = browser.new_context(http_credentials={"username": "me", "password": KEY})
    try:
        page = context.new_page()
        page.goto(f"{keyed.url}/ui")
        expect(page.locator("#status")).to_have_text("live")
        expect(page.locator("main")).to_contain_text("No worker holds a lease.")
    finally:
        context.close()
    refused = forked_baton("top", "--once", "--url", keyed.url)
    assert (refused.returncode, "Set OPENAI_API_KEY" in refused.stderr) == (1, True)
    assert forked_baton("top", "--once", "--url", keyed.url, environ={"OPENAI_API_KEY": KEY}).returncode == 0
