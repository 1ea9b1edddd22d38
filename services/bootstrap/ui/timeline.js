// Drawing of a request's timeline: a lane for each process, bars for its work, marks for its lines.

import { duration, s } from "./draw.js";

const TOP = 34;
const BOTTOM = 8;
const NARROW = 640;
const MARKS = {
  evidence: "M0-5 5 4H-5Z",
  vote: "M0-5.5 5.5 0 0 5.5-5.5 0Z",
  seal: "M-4.5-4.5h9v9h-9Z",
  token: "M0-5a5 5 0 1 0 .01 0Z",
  failure: "M-4.5-4.5 4.5 4.5M4.5-4.5-4.5 4.5",
  end: "M0-7V7",
  move: "M0-4.5V4.5",
  note: "M0-1.8a1.8 1.8 0 1 0 .01 0Z",
};
const THIN = new Set(["close", "kept"]);

/** The whole of a timeline in milliseconds: until the last thing in it, or now. */
export function extent(timeline) {
  const ends = [timeline.total_ms, ...timeline.lines.map((line) => line.at_ms), ...timeline.bars.map((bar) => bar.to_ms ?? 0)];
  return Math.max(1, ...ends);
}

export function drawTimeline(timeline, view, width) {
  const narrow = width < NARROW;
  const gutter = narrow ? 2 : 148;
  const height = narrow ? 46 : 36;
  const middle = (index) => TOP + index * height + (narrow ? 30 : height / 2);
  const right = width - 10;
  const x = (ms) => gutter + ((ms - view.from) / (view.to - view.from)) * (right - gutter);
  const rows = new Map(timeline.lanes.map((lane, index) => [lane.id, { lane, y: middle(index) }]));
  const bottom = TOP + timeline.lanes.length * height;
  const inside = s("g", { "clip-path": "url(#plot)" });
  const end = extent(timeline);

  inside.append(...timeline.attempts.map((attempt, index) => roomMark(timeline, attempt, index, x, bottom)));
  inside.append(...timeline.links.map((link) => drawLink(link, rows, x)));
  for (const thin of [true, false]) {
    inside.append(...timeline.bars.filter((bar) => THIN.has(bar.doing) === thin).map((bar) => drawBar(bar, rows, x, end)));
  }
  inside.append(...timeline.lines.map((line, index) => drawMark(line, index, rows, x, view.selected === index)).filter(Boolean));
  if (view.selected !== null && timeline.lines[view.selected]) {
    const at = x(timeline.lines[view.selected].at_ms);
    inside.prepend(s("line", { class: "cursor", x1: at, x2: at, y1: TOP - 6, y2: bottom }));
  }
  return s(
    "svg",
    { class: "picture", viewBox: `0 0 ${width} ${bottom + BOTTOM}`, width, height: bottom + BOTTOM, role: "img", "aria-labelledby": "picture-title", "aria-describedby": "h-lines" },
    s("title", { id: "picture-title" }, `Timeline of ${timeline.request_id}. ${timeline.headline} Every line of it is in the table below.`),
    defs(gutter, right, bottom),
    ...timeline.lanes.map((lane, index) => laneRow(lane, index, height, gutter, width, narrow)),
    ...axis(view, x, bottom, narrow ? 4 : 8),
    inside,
  );
}

function defs(left, right, bottom) {
  const hatch = (id) => s("pattern", { id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, s("rect", { class: `${id}-back`, width: 6, height: 6 }), s("rect", { class: `${id}-line`, width: 2.5, height: 6 }));
  const arrow = s("marker", { id: "arrow", viewBox: "0 0 6 6", refX: 5, refY: 3, markerWidth: 6, markerHeight: 6, orient: "auto-start-reverse" }, s("path", { d: "M0 0 6 3 0 6Z" }));
  return s("defs", {}, s("clipPath", { id: "plot" }, s("rect", { x: left - 1, y: 0, width: right - left + 10, height: bottom + BOTTOM })), hatch("stall"), hatch("pause"), hatch("kept"), arrow);
}

function laneRow(lane, index, height, gutter, width, narrow) {
  const y = TOP + index * height;
  const name = lane.rank ? `rank ${lane.rank}` : lane.id;
  const label = s("text", { class: lane.rank ? "lane-name rank" : "lane-name", x: narrow ? 2 : lane.rank ? 22 : 8, y: narrow ? y + 14 : y + height / 2 + 4 }, shortened(name, narrow ? 40 : 19));
  const hint = { wall: "placed by the time of day: it is on another host", none: "said nothing of its own" }[lane.clock];
  if (hint) label.append(s("title", {}, `${lane.id}: ${hint}`), s("tspan", { class: "lane-hint" }, lane.clock === "wall" ? " ≈" : ""));
  return s("g", {}, s("rect", { class: index % 2 ? "lane odd" : "lane", x: 0, y, width, height }), label);
}

const shortened = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

function axis(view, x, bottom, ticks) {
  const span = view.to - view.from;
  const rough = span / ticks;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((each) => each * unit >= rough);
  const drawn = [];
  for (let at = Math.ceil(view.from / step) * step; at <= view.to; at += step) {
    const text = span >= 20_000 ? `${+(at / 1000).toFixed(2)} s` : `${+at.toFixed(3)} ms`;
    const anchor = at <= view.from + step / 10 ? "start" : at >= view.to - step / 4 ? "end" : "middle";
    drawn.push(s("line", { class: "tick", x1: x(at), x2: x(at), y1: TOP - 4, y2: bottom }), s("text", { class: "tick-text", x: x(at), y: 14, "text-anchor": anchor }, text));
  }
  return drawn;
}

function roomMark(timeline, attempt, index, x, bottom) {
  const text = timeline.attempts.length > 1 ? `room ${index + 1}` : "";
  return s("g", { class: "room-mark" }, s("line", { x1: x(attempt.from_ms), x2: x(attempt.from_ms), y1: TOP - 6, y2: bottom }), s("text", { x: x(attempt.from_ms) + 4, y: TOP - 6 }, text));
}

function drawBar(bar, rows, x, end) {
  const row = rows.get(bar.lane);
  const tall = THIN.has(bar.doing) ? 4 : row.lane.rank ? 8 : 14;
  const from = x(bar.from_ms);
  const to = x(bar.to_ms ?? end);
  const label = `${bar.lane}: ${bar.text}, ${bar.to_ms === null ? "so far " : ""}${duration((bar.to_ms ?? end) - bar.from_ms)}`;
  return s("rect", { class: `bar ${bar.doing}${row.lane.rank ? " follower" : ""}`, x: from, y: row.y - tall / 2, width: Math.max(to - from, 1), height: tall, rx: Math.min(3, tall / 2) }, s("title", {}, label));
}

function drawLink(link, rows, x) {
  const [from, to] = [rows.get(link.from_lane), rows.get(link.to_lane)];
  const [x1, x2] = [x(link.from_ms), x(link.to_ms)];
  const down = to.y > from.y ? 1 : -1;
  const [y1, y2] = [from.y + 8 * down, to.y - 9 * down];
  const half = (y1 + y2) / 2;
  return s("path", { class: "link", d: `M${x1} ${y1}C${x1} ${half} ${x2} ${half} ${x2} ${y2}`, "marker-end": "url(#arrow)" }, s("title", {}, `${link.text}: ${link.from_lane} to ${link.to_lane}, ${duration(link.to_ms - link.from_ms)}`));
}

function drawMark(line, index, rows, x, selected) {
  const row = rows.get(line.lane);
  if (!row) return null;
  const label = `${duration(line.at_ms)} ${line.lane}: ${line.name}${line.detail ? `, ${line.detail}` : ""}`;
  const shape = s("path", { class: `mark ${line.kind}${selected ? " selected" : ""}`, d: MARKS[line.kind], transform: `translate(${x(line.at_ms)} ${row.y})`, "data-line": index });
  shape.append(s("title", {}, label));
  return shape;
}
