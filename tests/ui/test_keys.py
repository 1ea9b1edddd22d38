"""Tests of a browser at a bootstrap that requires an API key. The user enters the key as a password. A page
of an allowed other origin sends its own key."""

import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.cli.typed import forked_baton
from tests.http import web
from tests.idle import POLL_S
from tests.process.stack import READY_S, Stack

KEY = "a-key-of-an-operator"


@pytest.fixture
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server of pages that are none of ours."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "index.html").write_text("<!doctype html><title>Elsewhere</title>")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def keyed(demo_model_dir: Path, tmp_path: Path, elsewhere: int) -> Iterator[Stack]:
    """A bootstrap without workers."""
    (tmp_path / "keys").write_text(f"{KEY}\n")
    alone = Stack(str(demo_model_dir), tmp_path)
    service = alone.start_bootstrap(
        api_key_file=str(tmp_path / "keys"), cors_origins=f"http://localhost:{elsewhere}"
    )
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
    assert (refused.returncode, "set BATON_ADMIN_API_KEYS or OPENAI_API_KEY" in refused.stderr) == (1, True)
    assert forked_baton("top", "--once", "--url", keyed.url, environ={"OPENAI_API_KEY": KEY}).returncode == 0


ASK = """async ([url, key]) => {
  const headers = {"Content-Type": "application/json", Authorization: `Bearer ${key}`};
  try {
    const reply = await fetch(url, {method: "POST", headers, body: '{"prompt": "Hi"}'});
    return [reply.status, reply.headers.get("x-request-id") !== null, (await reply.json()).error.code];
  } catch (error) {
    return [error.name];
  }
}"""
"""Script of a page that sends a POST with a key and returns what the browser lets it read. The browser sends
a CORS preflight first."""


def test_a_page_of_an_origin_that_is_let_in_reads_answers_and_refusals_and_another_reads_nothing(
    browser: Browser, keyed: Stack, elsewhere: int
) -> None:
    url = f"{keyed.url}/v1/completions"
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(f"http://localhost:{elsewhere}/")
        assert page.evaluate(ASK, [url, KEY]) == [503, True, "no_worker"]
        assert page.evaluate(ASK, [url, "a-wrong-key-of-mine"]) == [401, True, "invalid_api_key"]
        page.goto(f"http://127.0.0.1:{elsewhere}/")
        assert page.evaluate(ASK, [url, KEY]) == ["TypeError"]
    finally:
        context.close()
