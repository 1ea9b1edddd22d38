"""Tests of the operator's page in a real browser: the state of the stack and the story of a request.

The tests share one stack and run in order. The last ones look at what is left after its decode workers were
killed."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import FloatRect, Locator, Page, expect

from tests.http import web
from tests.process.stack import Stack
from tests.support.shared import Shared
from tests.ui.conftest import ANSWER_S, Seen, Streaming

SHOTS = Path(__file__).parents[2] / "docs" / "screenshots"
PARTS_WIDTH_PX, MARGIN_PX = 1000, 10
DRAWN = "() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))"
# A request's headers come and its body does not, until who asked for it gives it up.
SLOW_BODIES = """
    const ask = window.fetch;
    window.bodies = 0;
    window.fetch = async (path, options) => {
      const reply = await ask(path, options);
      if (path.startsWith("requests/")) reply.json = () => new Promise((_, refuse) => {
        window.bodies += 1;
        options.signal.addEventListener("abort", () => refuse(options.signal.reason));
      });
      return reply;
    };
"""


# The greatest part of a picture's width at which a tick's text ends, over stories of many lengths.
TICKS = """async () => {
  const { drawTimeline } = await import("/ui/timeline.js");
  const ends = [];
  for (const width of [366, 1178]) for (let to = 950; to < 60_000; to *= 1.03) {
    const timeline = { lanes: [], attempts: [], links: [], bars: [], lines: [], total_ms: to, headline: "" };
    const drawn = drawTimeline(timeline, { from: 0, to, selected: null }, width);
    document.body.append(drawn);
    for (const box of [...drawn.querySelectorAll(".tick-text")].map((each) => each.getBBox()))
      ends.push((box.x + box.width) / width);
    drawn.remove();
  }
  return Math.max(...ends);
}"""


@dataclass
class Camera:
    """Writes the screenshots of the docs anew, with --rewrite."""

    wanted: bool

    def __call__(self, page: Page, name: str, height: int = 860, parts: Sequence[str] = ()) -> None:
        """`parts`: what is in the picture, by CSS selectors, if not the whole window."""
        if self.wanted:
            SHOTS.mkdir(exist_ok=True)
            before = page.viewport_size or {"width": 1280, "height": 860}
            page.set_viewport_size({"width": PARTS_WIDTH_PX if parts else before["width"], "height": height})
            page.mouse.move(1, 1)
            page.evaluate(DRAWN)
            clip = _around([page.locator(each) for each in parts]) if parts else None
            page.screenshot(path=SHOTS / f"{name}.png", animations="disabled", clip=clip)
            page.set_viewport_size(before)


def _around(parts: Sequence[Locator]) -> FloatRect:
    boxes = [box for each in parts if (box := each.bounding_box())]
    left, top = (min(box[side] for box in boxes) - MARGIN_PX for side in ("x", "y"))
    right = max(box["x"] + box["width"] for box in boxes) + MARGIN_PX
    bottom = max(box["y"] + box["height"] for box in boxes) + MARGIN_PX
    return {"x": left, "y": top, "width": right - left, "height": bottom - top}


@pytest.fixture
def shoot(rewrite: bool) -> Camera:
    return Camera(rewrite)


@pytest.fixture
def answered(stacks: Shared[Stack], stack: Stack) -> str:
    """Return the id of a request that was answered."""
    return stacks.once("answered", answer_one)


def answer_one(stack: Stack) -> str:
    client = Streaming(stack, "answered-1", tokens=24)
    client.join()
    assert client.error == ""
    return client.request_id


@dataclass
class Struck:
    """Requests under which a decode worker was killed."""

    retried: str
    failed: str
    refused: str


@pytest.fixture
def struck(stacks: Shared[Stack], stack: Stack) -> Struck:
    """A request whose decode worker died and that went on, one that had no other, and one after that."""
    return stacks.once("struck", strike)


def strike(stack: Stack) -> Struck:
    found = []
    for name in ("struck-once", "struck-last"):
        client = Streaming(stack, name, tokens=60)
        assert client.begun.wait(ANSWER_S), client.error
        room = web().get(f"{stack.url}/rooms", params={"request_id": name}).json()["rooms"][0]
        stack.services[room["decode"]].kill()
        client.join()
        found.append(client.error)
    assert found[0] == ""
    assert "not retried" in found[1]
    late = Streaming(stack, "came-too-late", tokens=4)
    late.join()
    return Struck("struck-once", "struck-last", late.request_id)


def test_a_live_request_is_seen_streaming_with_its_timeline(
    seen: Seen, stack: Stack, answered: str, shoot: Camera
) -> None:
    client, page = Streaming(stack, "live-1", tokens=1500), seen.page
    try:
        assert client.begun.wait(ANSWER_S), client.error
        page.goto(f"{stack.url}/ui")
        row = page.locator("tr", has_text="live-1")
        expect(row.locator(".pill")).to_have_text("streaming")
        expect(page.locator(".worker")).to_have_count(3)
        expect(page.locator(".worker.decode .queues").filter(has_text="1 running")).to_have_count(1)
        expect(page.locator(".pages-committed").first).to_be_attached()
        seen.fits()
        shoot(page, "live")
        row.click()
        expect(page.locator("h1")).to_contain_text("live-1")
        for lane in ("client", "bootstrap", "prefill-0", "decode-"):
            expect(page.locator(".lane-name").filter(has_text=lane).first).to_be_attached()
        expect(page.locator("svg .bar.stream").first).to_be_attached()
        before = page.locator(".facts dd").nth(1).text_content()
        expect(page.locator(".facts dd").nth(1)).not_to_have_text(str(before))
        expect(page.locator("#status")).to_have_text("live")
    finally:
        client.hang_up()
    expect(page.locator("h1 .pill")).to_have_text("client gone")
    expect(page.locator("#status")).to_have_text("complete")


def test_each_ranks_evidence_and_the_workers_moves_are_in_the_picture(
    seen: Seen, stack: Stack, answered: str, shoot: Camera
) -> None:
    page = seen.page
    page.goto(f"{stack.url}/ui#/request/{answered}")
    expect(page.locator("#status")).to_have_text("complete")
    expect(page.locator(".headline")).to_contain_text("24 tokens passed on")
    assert page.locator(".lane-name").all_text_contents()[:4] == [
        "client",
        "bootstrap",
        "prefill-0",
        "rank 1",
    ]
    who = page.locator("tr.line-evidence .who").all_text_contents()
    assert set(who) >= {"prefill-0", "prefill-0/1"}, who
    assert any(each.startswith("decode-") for each in who)
    for doing in ("wait", "compute", "transfer", "stream"):
        expect(page.locator(f"svg .bar.{doing}").first).to_be_attached()
    assert page.locator(".stages li").count() >= 10
    assert page.locator("svg [data-line]").count() == page.locator(".lines tbody tr").count()
    seen.fits()
    page.keyboard.press("3")
    expect(page.locator("button[aria-pressed=true]")).to_have_text("Hand-over")
    shoot(page, "handover", 620)
    page.keyboard.press("1")
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 400, "height": 860})
    expect(page.locator("svg.picture")).to_have_attribute("width", re.compile("3[0-9]{2}"))
    seen.fits()
    shoot(page, "timeline-narrow", 1100)


def test_no_time_on_the_axis_is_cut_off(seen: Seen, stack: Stack) -> None:
    seen.page.goto(f"{stack.url}/ui")
    assert seen.page.evaluate(TICKS) <= 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(seen: Seen, stack: Stack, answered: str, scheme: str) -> None:
    page = seen.page
    page.emulate_media(color_scheme="light" if scheme == "light" else "dark")
    page.goto(f"{stack.url}/ui")
    expect(page.locator("tr", has_text=answered)).to_be_visible()
    seen.is_read()
    page.goto(f"{stack.url}/ui#/request/{answered}")
    expect(page.locator(".tick-text").first).to_be_visible()
    seen.is_read()


def test_a_line_that_is_gone_to_lies_under_nothing(seen: Seen, stack: Stack, answered: str) -> None:
    """It lies neither under the search above nor under the keys below, which do not scroll."""
    page = seen.page
    page.set_viewport_size({"width": 1280, "height": 400})
    page.goto(f"{stack.url}/ui#/request/{answered}")
    lines = page.locator(".lines tbody tr")
    expect(lines.first).to_be_attached()

    def edges(selector: str) -> tuple[float, float]:
        box = page.locator(selector).bounding_box()
        assert box is not None
        return box["y"], box["y"] + box["height"]

    for key in ["j"] * lines.count() + ["k"] * lines.count():
        page.keyboard.press(key)
        top, bottom = edges(".lines tr:focus")
        assert edges(".top")[1] <= top
        assert bottom <= edges(".keys")[0]


def test_every_way_through_it_can_be_gone_by_keyboard(seen: Seen, stack: Stack, answered: str) -> None:
    page, keys = seen.page, seen.page.keyboard
    page.goto(f"{stack.url}/ui")
    expect(page.locator("tr", has_text=answered)).to_be_visible()
    keys.press("/")
    expect(page.locator("#q")).to_be_focused()
    keys.type("swered-")
    expect(page.locator("#h-requests")).to_contain_text("swered-")
    expect(page.locator(".requests tbody tr")).to_have_count(1)
    keys.press("ArrowDown")
    expect(page.locator(".requests tbody tr").first).to_be_focused()
    keys.press("Enter")
    expect(page.locator("h1")).to_contain_text(answered)
    whole = page.locator(".tick-text").all_text_contents()
    keys.press("3")
    expect(page.locator("button[aria-pressed=true]")).to_have_text("Hand-over")
    assert page.locator(".tick-text").all_text_contents() != whole
    keys.press("j")
    keys.press("j")
    expect(page.locator("tr[aria-selected=true]")).to_have_attribute("data-key", "1")
    expect(page.locator("tr[data-key='1']")).to_be_focused()
    expect(page.locator("svg .mark.selected")).to_have_attribute("data-line", "1")
    keys.press("k")
    expect(page.locator("tr[aria-selected=true]")).to_have_attribute("data-key", "0")
    keys.press("Escape")
    expect(page.locator("#h-requests")).to_be_visible()


def test_who_goes_by_tab_stays_where_they_are_when_it_is_drawn_anew(
    seen: Seen, stack: Stack, answered: str
) -> None:
    page = seen.page
    Streaming(stack, "answered-2", tokens=4).join()
    page.goto(f"{stack.url}/ui")
    links = page.locator(".requests tbody a")
    expect(links.nth(1)).to_be_visible()
    links.first.focus()
    for link in (links.first, links.nth(1)):
        expect(link).to_be_focused()
        page.evaluate("window.before = document.activeElement")
        seen.until("!window.before.isConnected")
        expect(link).to_be_focused()
        page.keyboard.press("Tab")


def test_a_request_is_found_by_its_id_the_answers_or_the_rooms(
    seen: Seen, stack: Stack, answered: str
) -> None:
    page = seen.page
    room = web().get(f"{stack.url}/rooms", params={"request_id": answered}).json()["rooms"][0]["id"]
    page.goto(f"{stack.url}/ui")
    for asked in (answered, f"cmpl-{answered}", room):
        page.locator("#q").fill(asked)
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_contain_text(answered)
        page.keyboard.press("Escape")
        page.locator("#main").focus()
        page.keyboard.press("Escape")
    page.locator("#q").fill("never-was")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_contain_text("Nothing is kept")
    expect(page.locator("main")).to_contain_text("rooms are kept")
    page.set_viewport_size({"width": 390, "height": 844})
    page.locator("#q").fill("never-was-" + 118 * "x")
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_contain_text(118 * "x")
    seen.fits()
    assert all("404" in each for each in seen.complaints), "the browser says of itself that it got a 404"
    seen.complaints.clear()


def test_a_reply_that_is_left_before_its_body_came_draws_nothing(
    seen: Seen, stack: Stack, answered: str
) -> None:
    """The browser refuses such a body when the reader goes on: what comes of it is not a story."""
    page = seen.page
    page.add_init_script(SLOW_BODIES)
    page.goto(f"{stack.url}/ui#/request/{answered}")
    seen.until("window.bodies === 1")
    page.evaluate("location.hash = '#/'")
    expect(page.locator("#h-requests")).to_be_visible()
    page.set_viewport_size({"width": 900, "height": 700})
    expect(page.locator("#h-requests")).to_be_visible()
    page.evaluate(DRAWN)


def test_a_request_that_lost_its_worker_is_one_story_over_both_rooms(
    seen: Seen, stack: Stack, struck: Struck, shoot: Camera
) -> None:
    page = seen.page
    page.goto(f"{stack.url}/ui#/request/{struck.retried}")
    expect(page.locator("h1 .pill")).to_have_text("answered")
    expect(page.locator(".headline")).to_contain_text("A room failed before this one")
    expect(page.locator(".room-mark text").filter(has_text="room 2")).to_be_attached()
    expect(page.locator("svg .bar.stall").first).to_be_attached()
    assert page.locator("tr.line-failure").count() >= 1
    seen.fits()
    shoot(page, "retried", 900)
    shoot(page, "failover", 900, parts=(".frame", ".legend.signs"))


def test_a_failed_requests_cause_is_the_first_thing_that_is_read(
    seen: Seen, stack: Stack, struck: Struck, shoot: Camera
) -> None:
    page = seen.page
    page.goto(f"{stack.url}/ui#/request/{struck.failed}")
    expect(page.locator("h1 .pill")).to_have_text("failed")
    headline = page.locator(".headline")
    expect(headline).to_contain_text("decode worker decode-")
    expect(headline).to_contain_text("not retried: no decode worker is ready")
    expect(headline.locator("code")).to_have_text("decode_lost")
    expect(page.locator("svg .mark.failure").first).to_be_attached()
    seen.fits()
    shoot(page, "failed", 860)
    page.goto(f"{stack.url}/ui#/request/{struck.refused}")
    expect(page.locator(".headline")).to_contain_text("Refused with 503: no decode worker is ready")


def test_the_picture_of_a_broken_stack_names_who_is_gone_and_what_failed(
    seen: Seen, stack: Stack, struck: Struck, shoot: Camera
) -> None:
    page = seen.page
    page.goto(f"{stack.url}/ui")
    expect(page.locator(".lost li")).to_have_count(2)
    for name in ("decode-0", "decode-1"):
        expect(page.locator(".lost li").filter(has_text=name)).to_contain_text("its lease ran out")
    expect(page.locator(".figure", has_text="Decode ready").locator(".bad-text")).to_have_text("0 of 0")
    failed = page.locator("tr", has_text=struck.failed)
    expect(failed.locator(".cause")).to_contain_text("decode worker decode-")
    seen.fits()
    shoot(page, "broken")
    page.set_viewport_size({"width": 400, "height": 860})
    seen.fits()
