"""Tests that a browser with a key reaches the pages, and one without does not."""

import shutil
from functools import partial
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, Response, sync_playwright

from tests.process.stack import READY_S, Stack
from tests.safety.waiting import answers, until

pytestmark = [pytest.mark.stack, pytest.mark.browser]

KEY = "sk-of-a-person-0123456789"
ADMIN_KEY = "sk-of-an-admin-0123456789"


def is_up(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).is_success
    except httpx.TransportError:
        return False


def looked_again(page: Page, live: list[int]) -> bool:
    page.wait_for_timeout(50)  # the driver hears of answers while it waits
    return len(live) >= 2


def test_a_browser_opens_the_pages_with_the_key_as_its_password(
    demo_model_dir: Path, ours: Path, tmp_path: Path
) -> None:
    program = shutil.which("chromium")
    assert program is not None, "this test drives a real browser: install Debian's package chromium"
    stack = Stack(str(demo_model_dir), tmp_path, environ={"BATON_API_KEYS": KEY})
    url = f"https://127.0.0.1:{stack.http_port}"
    bootstrap = stack.start_bootstrap(
        http_tls_cert=str(ours / "http.crt"), http_tls_key=str(ours / "http.key")
    )
    try:
        until(lambda: answers(f"{url}/health", ours))
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
            stranger = browser.new_context(ignore_https_errors=True).new_page()
            refused = stranger.request.get(f"{url}/ui", headers={"Accept": "text/html"})
            assert refused.status == 401
            assert refused.headers["www-authenticate"].startswith("Basic")

            person = browser.new_context(
                ignore_https_errors=True, http_credentials={"username": "me", "password": KEY}
            ).new_page()
            failed: list[str] = []
            live: list[int] = []

            def note(response: Response) -> None:
                if response.url == f"{url}/live":
                    live.append(response.status)
                if not response.ok:
                    failed.append(f"{response.status} {response.url}")

            person.on("response", note)
            person.goto(f"{url}/ui", timeout=READY_S * 1000)
            until(partial(looked_again, person, live))
            assert failed == []
            assert set(live) == {200}, "what the page asks for by itself has the key too"
            browser.close()
    finally:
        bootstrap.kill()


def test_a_clients_key_opens_the_page_which_says_what_it_needs_and_an_admins_shows_it(
    demo_model_dir: Path, tmp_path: Path
) -> None:
    program = shutil.which("chromium")
    assert program is not None, "this test drives a real browser: install Debian's package chromium"
    keys = {"BATON_API_KEYS": KEY, "BATON_ADMIN_API_KEYS": ADMIN_KEY}
    stack = Stack(str(demo_model_dir), tmp_path, environ=keys)
    url = f"http://127.0.0.1:{stack.http_port}"
    bootstrap = stack.start_bootstrap()
    try:
        until(partial(is_up, f"{url}/health"))
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
            for key, shown in ((KEY, "This key is no admin key"), (ADMIN_KEY, "Workers")):
                page = browser.new_context(http_credentials={"username": "me", "password": key}).new_page()
                page.goto(f"{url}/ui", timeout=READY_S * 1000)
                page.get_by_text(shown).first.wait_for(timeout=READY_S * 1000)
                refused = page.get_by_role("alert")
                assert refused.count() == (1 if key == KEY else 0)
                if key == KEY:
                    assert "--admin-api-key-file" in refused.inner_text()
                    assert "private window" in refused.inner_text()
            browser.close()
    finally:
        bootstrap.kill()
