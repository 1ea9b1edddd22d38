// The live view: workers, queues, pages and the newest requests.

import { count, duration, h, id, legend, pill, stacked, time, workersOf } from "./draw.js";

const PAGES = [
  ["committed", "pages-committed"],
  ["exposed", "pages-exposed"],
  ["reserved", "pages-reserved"],
  ["quarantined", "pages-quarantined"],
  ["cached", "pages-cached"],
  ["free", "pages-free"],
];
const ROOMS = [
  ["open", "rooms-open", "before its first token"],
  ["streaming", "rooms-streaming", "streaming"],
  ["closing", "rooms-closing", "giving back"],
];

/** Failed requests that are among so many newest ones are seen there; older ones have a list above. */
const ON_TOP = 5;

let lostShown = true;

export function drawLive(live, requests, searched) {
  return [
    drawFigures(live),
    drawBootstraps(live),
    h("section", { "aria-labelledby": "h-workers" }, h("h2", { id: "h-workers" }, "Workers"), drawWorkers(live)),
    drawRequests(live, requests, searched),
  ];
}

function drawFigures(live) {
  const rooms = ROOMS.map(([key, tone, name]) => ({ name, tone, value: live.rooms[key] ?? 0 }));
  const open = rooms.reduce((sum, part) => sum + part.value, 0);
  return h(
    "section",
    { class: "figures", "aria-label": "In figures" },
    figure("Rooms", count(open), stacked(rooms, "Rooms by phase"), legend(rooms)),
    figure("Waiting for workers", count(live.queued), null, h("p", { class: "note" }, live.queued ? "No pair has space for them now." : "Nobody waits.")),
    ...["prefill", "decode"].map((side) => sideFigure(live, side)),
  );
}

function figure(name, value, bar, more) {
  return h("div", { class: "figure" }, h("h3", {}, name), h("p", { class: "value" }, value), bar, more);
}

function sideFigure(live, side) {
  const all = live.workers.filter((worker) => worker.side === side);
  const ready = all.filter((worker) => worker.state === "ready");
  const tokens = all.reduce((sum, worker) => sum + worker.tokens_s, 0);
  const unit = side === "prefill" ? "prompt tokens computed a second" : "tokens drawn a second";
  return figure(
    `${side[0].toUpperCase()}${side.slice(1)} ready`,
    h("span", { class: ready.length ? "" : "bad-text" }, `${ready.length} of ${all.length}`),
    null,
    h("p", { class: "note" }, `${count(tokens)} ${unit}`),
  );
}

/** What each bootstrap has of its own. The first one serves this page. */
function drawBootstraps(live) {
  if (live.bootstraps.length + live.unanswered.length < 2) return null;
  const row = ({ address, queued, rooms, ready }) =>
    h("li", {}, h("code", {}, address), ` ${count(queued)} waiting, ${count(rooms.open + rooms.streaming)} running; ready: ${count(ready.prefill)} prefill, ${count(ready.decode)} decode`);
  return h(
    "section",
    { "aria-labelledby": "h-bootstraps" },
    h("h2", { id: "h-bootstraps" }, "Bootstraps"),
    h("ul", { class: "bootstraps" }, live.bootstraps.map(row), live.unanswered.map((sentence) => h("li", { class: "bad-text" }, sentence))),
  );
}

function drawWorkers(live) {
  const none = h("p", { class: "empty" }, "No worker holds a lease.");
  return [
    live.workers.length ? h("ul", { class: "workers" }, live.workers.map(drawWorker)) : none,
    live.lost.length
      ? h("details", { class: "lost", open: lostShown, ontoggle: (event) => (lostShown = event.target.open) }, h("summary", {}, `Gone: ${live.lost.length}`), h("ul", {}, live.lost.map(drawLost)))
      : null,
  ];
}

function drawWorker(worker) {
  const pages = PAGES.map(([name, tone]) => ({ name, tone, value: worker.pages[name] ?? 0 }));
  const queues = Object.entries(worker.queues);
  const share = worker.rooms_max ? (100 * worker.rooms) / worker.rooms_max : 0;
  return h(
    "li",
    { class: `worker ${worker.side}` },
    h("header", {}, h("h3", {}, worker.name), pill(worker.state)),
    h("p", { class: "note" }, `${worker.side}${worker.process === null ? "" : ` · ${worker.weight} % of ${worker.process}`} · ${worker.address}${worker.ranks > 1 ? ` · ${worker.ranks} ranks (${worker.topology})` : ""}`),
    h("dl", {}, h("dt", {}, "Rooms"), h("dd", {}, `${count(worker.rooms)} of ${count(worker.rooms_max)}`, h("div", { class: "meter" }, h("span", { "width%": share })))),
    h(
      "dl",
      {},
      h("dt", {}, "KV pages"),
      h("dd", {}, worker.told_ms_ago === null ? h("p", { class: "note" }, "not told yet") : [stacked(pages, `KV pages of ${worker.name}`), legend(pages)]),
    ),
    worker.load ? h("p", { class: "note" }, spaceOf(worker.load)) : null,
    h("ul", { class: "queues", "aria-label": "Queues" }, queues.map(([name, value]) => h("li", { class: value ? "some" : "" }, h("b", {}, count(value)), ` ${name}`))),
    h("p", { class: "note foot" }, `${count(worker.tokens_s)} tokens/s`, h("span", {}, `lease ${duration(worker.lease_left_ms)}`)),
  );
}

/** In what placement goes by. */
function spaceOf(load) {
  if (load.tokens_waiting !== undefined) return waitOf(load);
  const left = load.left_tokens > 0 ? `space for ${count(load.left_tokens)} tokens` : "no space now";
  const waiting = load.waiting + load.placed_since;
  return `${left}${waiting ? `, ${count(waiting)} ${waiting === 1 ? "room" : "rooms"} about to begin` : ""}`;
}

/** When prefill will have computed what is there. */
function waitOf(load) {
  const since = load.placed_since ? `, ${count(load.placed_since)} ${load.placed_since === 1 ? "room" : "rooms"} placed since` : "";
  const when = load.left_ms === null ? "" : `: ${duration(load.left_ms)} at ${count(load.tokens_per_s)} a second`;
  return `${count(load.tokens_waiting)} tokens to compute${since}${when}`;
}

function drawLost(lost) {
  const rooms = lost.rooms ? `; ${lost.rooms} ${lost.rooms === 1 ? "room" : "rooms"} ended with it` : "";
  return h("li", {}, h("time", {}, time(lost.wall_ms)), " ", h("b", {}, lost.name), `: ${lost.why}${rooms}`);
}

function drawRequests(live, requests, searched) {
  const key = (each) => each.room || `${each.request_id} ${each.begun_wall_ms}`;
  const onTop = new Set(requests.slice(0, ON_TOP).map(key));
  const failed = searched ? [] : live.failed.filter((each) => !onTop.has(key(each)));
  const above = new Set(failed.map(key));
  const rows = requests.filter((each) => !above.has(key(each)));
  return h(
    "section",
    { "aria-labelledby": "h-requests" },
    h("h2", { id: "h-requests" }, searched ? `Requests with “${searched}” in their id` : "Requests"),
    failed.length ? [h("h3", { class: "sub" }, "Failed lately"), table(failed)] : null,
    failed.length ? h("h3", { class: "sub" }, "Newest") : null,
    rows.length ? table(rows) : h("p", { class: "empty" }, searched ? "Nothing kept has such an id. Enter asks for it all the same." : "There has been no request since the bootstrap started."),
  );
}

function table(requests) {
  return h(
    "table",
    { class: "requests" },
    h("thead", {}, h("tr", {}, ["Time", "Request", "State", "First token", "Total", "Where"].map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, requests.map(row)),
  );
}

function row(request) {
  const where = request.decode ? workersOf(request) : "–";
  const rooms = request.rooms > 1 ? h("span", { class: "rooms-of" }, ` ${request.rooms} rooms`) : null;
  return h(
    "tr",
    { "data-key": request.room || request.request_id, "data-open": request.room || request.request_id, tabindex: "-1" },
    h("td", { class: "when" }, h("time", {}, time(request.begun_wall_ms))),
    h("td", { class: "what" }, h("a", { href: `#/request/${encodeURIComponent(request.room || request.request_id)}` }, id(request.request_id)), request.cause ? h("p", { class: request.state === "gone" ? "note" : "cause" }, request.cause) : null),
    h("td", {}, pill(request.state)),
    h("td", { class: "number" }, duration(request.first_token_ms)),
    h("td", { class: "number" }, duration(request.total_ms)),
    h("td", { class: "where" }, where, rooms, request.bootstrap ? h("p", { class: "note" }, `at ${request.bootstrap}`) : null),
  );
}
