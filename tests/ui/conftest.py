"""A stack whose prefill worker has two ranks and whose decode side has two workers, and a real browser."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from tests.http import web
from tests.process.stack import SPLIT, Stack, running_stack
from tests.support.shared import Shared

ANSWER_S = 120.0
WAIT_MS = 60_000
POLL_MS = 20
CONTRAST = Path(__file__).with_name("contrast.js")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--force-color-profile=srgb",
)


@pytest.fixture(scope="package")
def stacks(demo_model_dir: Path) -> Iterator[Shared[Stack]]:
    with Shared(
        running_stack,
        str(demo_model_dir),
        prefill=[{"tp": "1", "pp": "2", "chunk_tokens": "64"}],
        decode=[SPLIT] * 2,
        bootstrap={"retry_wait_ms": "100", "lease_ms": "6000"},
        dtype="float32",
        kv_cache_memory="128MiB",
    ) as shared:
        yield shared


@pytest.fixture
def stack(stacks: Shared[Stack], request: pytest.FixtureRequest) -> Stack:
    return stacks.lend(request.node)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium")
    assert program is not None, "these tests drive a real browser: install Debian's package chromium"
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=program, args=list(FLAGS))
        yield started
        started.close()


@dataclass
class Seen:
    """A page in the browser, with the complaints and foreign requests that it should not have made."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    def fits(self) -> None:
        """Check that nothing is wider than the window."""
        wide = self.page.evaluate(
            "[...document.querySelectorAll('body *')].filter((each) => each.checkVisibility?.()"
            " && !each.closest('.sr, .skip, thead') && each.getBoundingClientRect().right > innerWidth + 1)"
            ".map((each) => each.tagName + '.' + each.getAttribute('class'))"
        )
        page_wide = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert page_wide <= 0, f"{page_wide} pixels too wide: {wide}"

    def until(self, expression: str) -> None:
        """Wait until the JavaScript expression holds in the page. It is evaluated from here, since the page's
        policy forbids it there."""
        deadline = time.monotonic() + WAIT_MS / 1000
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, f"never: {expression}"
            self.page.wait_for_timeout(POLL_MS)

    def is_read(self) -> None:
        """Check that every text has the contrast of WCAG's level AA."""
        assert self.page.evaluate(CONTRAST.read_text()) == {}


@pytest.fixture
def seen(browser: Browser, stack: Stack) -> Iterator[Seen]:
    """A page of 1280 pixels. It checks at its end that the console has no complaint and no other host was
    asked."""
    context = browser.new_context(viewport={"width": 1280, "height": 860}, color_scheme="light")
    context.set_default_timeout(WAIT_MS)
    made = Seen(context.new_page())

    def complain(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            made.complaints.append(message.text)

    def asked(request: Request) -> None:
        if not request.url.startswith(f"{stack.url}/"):
            made.elsewhere.append(request.url)

    made.page.on("console", complain)
    made.page.on("pageerror", lambda error: made.complaints.append(str(error)))
    made.page.on("request", asked)
    yield made
    context.close()
    assert made.complaints == []
    assert made.elsewhere == []


class Streaming:
    """A client that reads a long answer until it is told to hang up."""

    def __init__(self, stack: Stack, request_id: str, tokens: int, words: int = 150) -> None:
        self._url = f"{stack.url}/v1/completions"
        self._body = {
            "model": web().get(f"{stack.url}/v1/models").json()["data"][0]["id"],
            "prompt": " ".join(f"{request_id} {place}" for place in range(words // 4)),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        self.request_id = request_id
        self.error = ""
        self.chunks = 0
        self.begun = threading.Event()
        self._enough = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def hang_up(self) -> None:
        self._enough.set()
        self.join()

    def join(self) -> None:
        self._reader.join(ANSWER_S)
        assert not self._reader.is_alive(), f"{self.request_id} has no end"

    def _read(self) -> None:
        headers = {"X-Request-Id": self.request_id}
        with web().stream("POST", self._url, json=self._body, headers=headers, timeout=ANSWER_S) as reply:
            for line in reply.iter_lines():
                if reply.is_error:
                    self.error += line
                if line.startswith("data: {"):
                    self.chunks += 1
                    self.error = json.loads(line[6:]).get("error", {}).get("message", "")
                    if self.chunks >= 5:
                        self.begun.set()
                if self._enough.is_set():
                    return
