// One request: its headline, timeline, durations and table of lines.

import { date, duration, h, id, pill, s, workersOf } from "./draw.js";
import { drawTimeline, extent } from "./timeline.js";

const LEGEND = [
  ["wait", "waits"],
  ["compute", "computes"],
  ["transfer", "pages on their way"],
  ["agree", "ranks agree"],
  ["stream", "tokens"],
  ["stall", "stream stands still"],
  ["pause", "paused: its worker needed the pages"],
  ["close", "gives back"],
  ["kept", "memory kept"],
];
const SIGNS = [
  ["evidence", "M0-5 5 4H-5Z", "a rank saw"],
  ["vote", "M0-5.5 5.5 0 0 5.5-5.5 0Z", "a rank wished otherwise"],
  ["seal", "M-4.5-4.5h9v9h-9Z", "seal"],
  ["token", "M0-5a5 5 0 1 0 .01 0Z", "first token"],
  ["failure", "M-4.5-4.5 4.5 4.5M4.5-4.5-4.5 4.5", "failure"],
];

/** Parts that the picture may be zoomed to, by the key that does it. */
export function parts(timeline) {
  const last = timeline.attempts.at(-1)?.room;
  const at = (name) => timeline.lines.find((line) => line.room === last && line.name === name)?.at_ms;
  const failed = timeline.lines.findLast((line) => line.kind === "failure")?.at_ms;
  const whole = extent(timeline);
  const found = [{ key: "1", name: "Whole", from: 0, to: whole * 1.02 }];
  const around = (key, name, from, to, spare) => {
    if (from !== undefined && to > from) found.push({ key, name, from: from - (to - from) * spare, to: to + (to - from) * spare });
  };
  around("2", "Opening", at("opened"), at("computing"), 0.06);
  around("3", "Hand-over", at("first token"), at("admitted"), 0.15);
  if (failed !== undefined) around("4", "Failure", Math.max(failed - whole / 40, 0), failed + whole / 40, 0);
  return found;
}

export function drawRequest(timeline, view, act) {
  return [
    heading(timeline),
    timeline.lanes.length ? timelineSection(timeline, view, act) : null,
    timeline.stages.length ? stagesSection(timeline) : null,
    linesSection(timeline, view, act),
  ];
}

function heading(timeline) {
  const failed = timeline.state === "failed" || timeline.state === "refused";
  return h(
    "section",
    { class: "timeline-head", "aria-labelledby": "h-timeline" },
    h("p", { class: "back" }, h("a", { href: "#/" }, "← all requests")),
    h("h1", { id: "h-timeline" }, id(timeline.request_id), " ", pill(timeline.state)),
    timeline.unanswered.map((sentence) => h("p", { class: "note bad-text" }, sentence)),
    h("div", { class: failed ? "headline bad" : "headline", role: failed ? "alert" : null }, h("p", {}, timeline.headline), timeline.cause ? h("p", { class: "meaning" }, h("code", {}, timeline.cause.reason), " ", timeline.cause.meaning) : null),
    h(
      "dl",
      { class: "facts" },
      fact("Begun", date(timeline.begun_wall_ms)),
      fact("Took", duration(timeline.total_ms)),
      fact("First token", duration(timeline.first_token_ms)),
      ...timeline.attempts.map((attempt, index) => fact(timeline.attempts.length > 1 ? `Room ${index + 1}` : "Room", [roomOf(timeline, attempt), ` ${workersOf(attempt)}, ${attempt.cause ? attempt.cause.reason : attempt.phase}`])),
      timeline.bootstrap ? fact("Bootstrap", h("code", {}, timeline.bootstrap)) : null,
      timeline.trace_id ? fact("Trace", h("code", {}, timeline.trace_id)) : null,
      timeline.others.length ? fact("Same id", timeline.others.map((room) => [h("a", { href: `#/request/${room}` }, h("code", {}, room)), " "])) : null,
    ),
  );
}

/** A room's id. Another bootstrap's room has no page of raw lines here. */
function roomOf(timeline, attempt) {
  const room = h("code", {}, attempt.room);
  return timeline.bootstrap ? room : h("a", { href: `rooms/${attempt.room}` }, room);
}

const fact = (name, value) => h("div", {}, h("dt", {}, name), h("dd", {}, value));

function timelineSection(timeline, view, act) {
  const frame = h("div", { class: "frame" }, drawTimeline(timeline, view, view.width));
  frame.addEventListener("click", (event) => {
    const mark = event.target.closest?.("[data-line]");
    if (mark) act.select(Number(mark.dataset.line));
  });
  frame.addEventListener("dblclick", () => act.zoom(parts(timeline)[0]));
  dragged(frame, view, act);
  return h(
    "section",
    { "aria-labelledby": "h-picture" },
    h("h2", { id: "h-picture" }, "Timeline"),
    h(
      "div",
      { class: "tools", role: "toolbar", "aria-label": "Part of the timeline" },
      parts(timeline).map((part) => h("button", { type: "button", "aria-pressed": String(view.part === part.key), "aria-keyshortcuts": part.key, onclick: () => act.zoom(part) }, part.name)),
      h("button", { type: "button", "aria-label": "Closer", onclick: () => act.scale(0.5) }, "+"),
      h("button", { type: "button", "aria-label": "Farther", onclick: () => act.scale(2) }, "−"),
    ),
    frame,
    h("ul", { class: "legend signs" }, LEGEND.filter(([doing]) => timeline.bars.some((bar) => bar.doing === doing)).map(([doing, text]) => h("li", {}, h("i", { class: `bar-sign ${doing}` }), text)), SIGNS.filter(([kind]) => timeline.lines.some((line) => line.kind === kind)).map(([kind, shape, text]) => h("li", {}, s("svg", { viewBox: "-7 -7 14 14", width: 13, height: 13, "aria-hidden": "true" }, s("path", { class: `mark ${kind}`, d: shape })), text))),
  );
}

/** Dragging over the picture zooms to what was dragged over. */
function dragged(frame, view, act) {
  let begun = null;
  const at = (event) => {
    const plot = frame.querySelector("svg");
    const box = plot.getBoundingClientRect();
    const left = view.width < 640 ? 2 : 148;
    const share = (event.clientX - box.left - left) / (view.width - 10 - left);
    return view.from + Math.min(Math.max(share, 0), 1) * (view.to - view.from);
  };
  frame.addEventListener("pointerdown", (event) => {
    if (event.button === 0 && event.pointerType === "mouse") begun = { ms: at(event), x: event.clientX };
  });
  frame.addEventListener("pointerup", (event) => {
    if (begun && Math.abs(event.clientX - begun.x) > 12) {
      const [from, to] = [begun.ms, at(event)].sort((one, other) => one - other);
      act.zoom({ key: null, from, to });
    }
    begun = null;
  });
}

function stagesSection(timeline) {
  const rooms = timeline.attempts.map((attempt) => [attempt, timeline.stages.filter((stage) => stage.room === attempt.room)]).filter(([, stages]) => stages.length);
  return h(
    "section",
    { "aria-labelledby": "h-stages" },
    h("h2", { id: "h-stages" }, "Where the time went"),
    rooms.map(([attempt, stages], index) => {
      const most = Math.max(...stages.map((stage) => stage.ms), 0.001);
      return [
        rooms.length > 1 ? h("h3", { class: "sub" }, `Room ${index + 1}: ${workersOf(attempt)}`) : null,
        h("ol", { class: "stages" }, stages.map((stage) => h("li", { class: stage.first_token ? "first" : "" }, h("span", { class: "stage-name" }, stage.text), h("span", { class: "stage-bar" }, h("i", { "width%": (100 * stage.ms) / most })), h("span", { class: "number" }, duration(stage.ms))))),
      ];
    }),
    h("p", { class: "note" }, "What is blue is on the way to the first token, one step after the other; the rest goes on beside it or behind it."),
  );
}

function linesSection(timeline, view, act) {
  const dropped = timeline.attempts.reduce((sum, attempt) => sum + attempt.events_dropped, 0);
  const rooms = new Map(timeline.attempts.map((attempt, index) => [attempt.room, index + 1]));
  const several = timeline.attempts.length > 1;
  return h(
    "section",
    { "aria-labelledby": "h-lines" },
    h("h2", { id: "h-lines" }, "Every line"),
    dropped ? h("p", { class: "note" }, `${dropped} more were not kept: a room keeps the first 256.`) : null,
    h(
      "table",
      { class: "lines" },
      h("thead", {}, h("tr", {}, ["After", ...(several ? ["Room"] : []), "Who", "What", ""].map((name) => h("th", { scope: "col" }, name)))),
      h("tbody", {}, timeline.lines.map((line, index) =>
        h(
          "tr",
          { class: `line-${line.kind}`, "data-key": String(index), tabindex: "-1", "aria-selected": view.selected === index ? "true" : null, onclick: () => act.select(index) },
          h("td", { class: "number" }, line.at_ms.toFixed(1), h("span", { class: "sr" }, " ms")),
          several ? h("td", { class: "number" }, rooms.get(line.room) ?? "") : null,
          h("td", { class: "who" }, line.lane),
          h("td", { class: "said" }, line.name),
          h("td", { class: "detail" }, line.detail),
        ))),
    ),
  );
}
