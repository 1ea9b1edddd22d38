// Views of the page: when each is shown and fetched, and what each key does.

import { h } from "./draw.js";
import { drawLive } from "./live.js";
import { drawRequest, parts } from "./request_view.js";
import { extent } from "./timeline.js";

const EVERY_MS = 1000;
const AFTERWARDS_MS = 60_000;
const REFUSALS = new Map([
  [401, "An admin key is needed"],
  [403, "This key is no admin key"],
  [404, "Nothing is kept under this id"],
]);
const SIGN_IN =
  "To sign in with an admin key, open this page in a private window (a browser keeps the key that it was given): any name, and the key as the password.";
const OVER = new Set(["answered", "failed", "gone", "refused"]);

const main = document.querySelector("#main");
const search = document.querySelector("#q");
const status = document.querySelector("#status");

let shown = { name: "live", id: "" };
let view = null;
let rendered = "";
let timeline = null;
let asking = null;
let timer = 0;

async function ask(path, signal) {
  const reply = await fetch(path, { signal, headers: { Accept: "application/json" }, cache: "no-store" });
  if (reply.ok) return reply.json();
  const body = await reply.json().catch(() => ({}));
  throw Object.assign(new Error(body.error?.message ?? `The bootstrap answered ${reply.status}.`), { status: reply.status });
}

async function look() {
  clearTimeout(timer);
  asking?.abort();
  const mine = (asking = new AbortController());
  let again = true;
  try {
    if (shown.name === "request") again = await lookAtRequest(mine.signal);
    else await lookAtAll(mine.signal);
    say(again ? "live" : "complete", "good");
  } catch (error) {
    if (mine.signal.aborted) return;
    if (error.status) refuse(error);
    else say("the bootstrap does not answer", "bad");
    again = !REFUSALS.has(error.status);
  }
  if (mine === asking && again) timer = setTimeout(document.hidden ? () => {} : look, EVERY_MS);
}

async function lookAtAll(signal) {
  const wanted = search.value.trim();
  const live = await ask("live", signal);
  const listed = wanted ? (await ask(`requests?search=${encodeURIComponent(wanted)}`, signal)).requests : live.requests;
  show(JSON.stringify([{ ...live, wall_ms: 0 }, listed, wanted]), () => drawLive(live, listed, wanted));
  document.title = "Baton";
}

async function lookAtRequest(signal) {
  const fresh = await ask(`requests/${encodeURIComponent(shown.id)}`, signal);
  const grows = timeline === null || extent(timeline) !== extent(fresh);
  timeline = fresh;
  if (view === null || (grows && view.part === "1")) view = { ...view, ...zoomed(parts(timeline)[0]), selected: view?.selected ?? null };
  redraw(false);
  document.title = `${timeline.request_id} · Baton`;
  const complete = OVER.has(timeline.state) && timeline.attempts.every((attempt) => attempt.to_ms !== null);
  const old = Date.now() - timeline.begun_wall_ms - timeline.total_ms > AFTERWARDS_MS;
  return !complete && !(OVER.has(timeline.state) && old);
}

const zoomed = (part) => ({ from: part.from, to: Math.max(part.to, part.from + 0.01), part: part.key });

function redraw(forced) {
  if (timeline === null) return;
  const { paddingLeft, paddingRight } = getComputedStyle(main);
  view.width = Math.max(Math.floor(main.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight)) - 2, 280);
  show(forced ? null : JSON.stringify([timeline, view]), () => drawRequest(timeline, view, act));
}

const act = {
  zoom(part) {
    Object.assign(view, zoomed(part));
    redraw(true);
  },
  scale(factor) {
    const middle = view.selected === null ? (view.from + view.to) / 2 : timeline.lines[view.selected].at_ms;
    const half = ((view.to - view.from) * factor) / 2;
    const end = extent(timeline) * 1.02;
    act.zoom({ key: null, from: Math.max(middle - half, 0), to: Math.min(middle + half, end) });
  },
  move(share) {
    const by = (view.to - view.from) * share;
    const shift = Math.max(by, -view.from);
    act.zoom({ key: null, from: view.from + shift, to: view.to + shift });
  },
  select(index) {
    view.selected = index;
    const at = timeline.lines[index].at_ms;
    if (at < view.from || at > view.to) Object.assign(view, zoomed(parts(timeline)[0]));
    redraw(true);
    main.querySelector(`[data-key="${index}"]`)?.focus({ preventScroll: false });
  },
};

/** The reader has marked something, to copy it: it stays until they are done. */
function reading() {
  const marked = getSelection();
  return !marked.isCollapsed && main.contains(marked.anchorNode);
}

/** Draw anew, if there is news, and leave the reader where they were. */
function show(news, draw) {
  if (news !== null && (news === rendered || reading())) return;
  rendered = news ?? "";
  const focused = document.activeElement?.closest("main :is(a, button, summary, tr[data-key])");
  const there = focused && place(focused);
  main.replaceChildren(...draw().filter(Boolean));
  if (there) ([...main.querySelectorAll(focused.tagName)].find((each) => place(each) === there) ?? main).focus({ preventScroll: true });
}

/** What an element and the one that is drawn in its stead have in common, among those of their kind. */
function place(element) {
  return element.closest("tr[data-key]")?.dataset.key ?? element.getAttribute("href") ?? (element.tagName === "BUTTON" ? element.textContent : "the only one");
}

function refuse(error) {
  timeline = null;
  const next = error.status === 404 ? h("a", { href: "#/" }, "All requests") : error.status < 404 ? SIGN_IN : "";
  show(error.message, () => [h("section", { class: "refused", role: "alert" }, h("h1", {}, REFUSALS.get(error.status) ?? "It cannot be shown"), h("p", {}, error.message), h("p", {}, next))]);
  say(`answered ${error.status}`, "bad");
}

function say(text, tone) {
  if (status.textContent !== text) status.textContent = text;
  status.className = `status ${tone}`;
}

const rows = () => [...main.querySelectorAll("tr[data-key]")];

function step(by) {
  const all = rows();
  if (!all.length) return;
  const current = all.indexOf(document.activeElement?.closest?.("tr[data-key]"));
  const next = all[Math.min(Math.max(current < 0 ? (by > 0 ? 0 : all.length - 1) : current + by, 0), all.length - 1)];
  if (shown.name === "request") act.select(Number(next.dataset.key));
  else next.focus();
}

function open(id) {
  location.hash = `#/request/${encodeURIComponent(id)}`;
}

function route() {
  const match = location.hash.match(/^#\/request\/(.+)$/);
  shown = match ? { name: "request", id: decode(match[1]) } : { name: "live", id: "" };
  [view, timeline, rendered] = [null, null, ""];
  document.body.dataset.view = shown.name;
  main.replaceChildren(h("p", { class: "empty" }, "…"));
  scrollTo(0, 0);
  look();
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

const KEYS = {
  j: () => step(1),
  ArrowDown: () => step(1),
  k: () => step(-1),
  ArrowUp: () => step(-1),
  "/": () => (search.focus(), search.select()),
  Escape: () => shown.name === "request" && (location.hash = "#/"),
};
const STORY_KEYS = {
  "+": () => act.scale(0.5),
  "=": () => act.scale(0.5),
  "-": () => act.scale(2),
  ArrowLeft: () => act.move(-0.25),
  ArrowRight: () => act.move(0.25),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target === search) {
    if (event.key === "ArrowDown") (event.preventDefault(), step(1));
    if (event.key === "Escape") ((search.value = ""), search.blur(), look());
    return;
  }
  const focused = document.activeElement?.closest?.("tr[data-open]");
  const part = timeline && parts(timeline).find((each) => each.key === event.key);
  const does = event.key === "Enter" && focused ? () => open(focused.dataset.open) : part ? () => act.zoom(part) : (KEYS[event.key] ?? (timeline ? STORY_KEYS[event.key] : undefined));
  if (does && !(event.key === "Enter" && event.target.closest("a,button,summary"))) {
    event.preventDefault();
    does();
  }
});

main.addEventListener("click", (event) => {
  const target = event.target.closest("tr[data-open]");
  if (target && !event.target.closest("a") && !getSelection().toString()) open(target.dataset.open);
});

document.querySelector("#search").addEventListener("submit", (event) => {
  event.preventDefault();
  if (search.value.trim()) open(search.value.trim());
});
search.addEventListener("input", () => {
  if (shown.name === "request") location.hash = "#/";
  else look();
});
document.addEventListener("visibilitychange", () => document.hidden || look());
new ResizeObserver(() => redraw(false)).observe(main);
addEventListener("hashchange", route);
route();
