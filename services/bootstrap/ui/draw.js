// Elements of the page. Text is never inserted as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "grow") element.style.flexGrow = value;
    else if (name === "width%") element.style.width = `${value}%`;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((each) => each !== null && each !== undefined));
  return element;
}

export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const day = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });

export const count = (number) => grouped.format(number);
export const time = (wallMs) => clock.format(wallMs);
export const date = (wallMs) => day.format(wallMs);

/** A duration in the unit that it is read in. */
export function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms === 0) return "0 ms";
  if (ms < 1) return `${ms.toFixed(2)} ms`;
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 10_000) return `${count(ms)} ms`;
  return ms < 600_000 ? `${(ms / 1000).toFixed(1)} s` : `${count(ms / 60_000)} min`;
}

export const STATES = {
  queued: ["waits for workers", "wait"],
  prefill: ["prefill", "busy"],
  streaming: ["streaming", "busy"],
  retrying: ["trying again", "warn"],
  paused: ["paused", "wait"],
  answered: ["answered", "good"],
  failed: ["failed", "bad"],
  gone: ["client gone", "quiet"],
  refused: ["refused", "bad"],
  ready: ["ready", "good"],
  joining: ["joining", "wait"],
  draining: ["draining", "warn"],
  suspect: ["suspect", "warn"],
  lost: ["gone", "bad"],
};

export function pill(state) {
  const [text, tone] = STATES[state] ?? [state, "quiet"];
  return h("span", { class: `pill ${tone}` }, text);
}

/** A bar of parts, each as long as its share; those that are zero are left out. */
export function stacked(parts, label) {
  const there = parts.filter((part) => part.value > 0);
  return h(
    "div",
    { class: "stack", role: "img", "aria-label": `${label}: ${there.map((p) => `${p.name} ${count(p.value)}`).join(", ") || "nothing"}` },
    there.map((part) => h("span", { class: part.tone, grow: part.value, title: `${part.name}: ${count(part.value)}` })),
  );
}

export const legend = (parts) =>
  h(
    "ul",
    { class: "legend" },
    parts.filter((part) => part.value > 0).map((part) => h("li", {}, h("i", { class: part.tone }), `${part.name} `, h("b", {}, count(part.value)))),
  );

/** An id in one line, cut in its middle by the layout, whole in its title. */
/** The two workers of a room, or its only one. */
export const workersOf = (room) => (room.prefill ? `${room.prefill} → ${room.decode}` : `${room.decode}${room.same_process ? ", both sides" : " alone"}`);

export const id = (text) => h("code", { class: "id", title: text }, text);
