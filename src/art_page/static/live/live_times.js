/** Where the time of the newest requests went: a bar for each, and the median and 95th percentile of each part. */
import { CATEGORIES } from "../lib/colours.js";
import { h, replace, setStyle } from "../lib/dom.js";
import { formatCount, formatSeconds, UNKNOWN } from "../lib/format.js";
import { quantile } from "./live_state.js";

const MAX_BARS = 40;
/** @typedef {import("./live_state.js").EndedRequest} EndedRequest */
/** @typedef {{word: string, colour: string, of: (request: EndedRequest) => number | null}} TimePart */
/** @type {TimePart[]} */
const TIME_PARTS = [
  { word: "queue", colour: CATEGORIES[1], of: (request) => request.queue_s },
  { word: "prefill", colour: CATEGORIES[2], of: (request) => request.prefill_s },
  { word: "decode", colour: CATEGORIES[0], of: (request) => request.decode_s },
  { word: "rest", colour: "#8a8f98", of: restOf },
];

/**
 * Time that the engine does not account for: the server's own work, and all of it where the engine tells nothing.
 * @param {EndedRequest} request
 */
function restOf(request) {
  return Math.max(0, request.total_s - (request.queue_s ?? 0) - (request.prefill_s ?? 0) - (request.decode_s ?? 0));
}

export class LiveTimes {
  constructor() {
    this.body = h("tbody");
    this.bars = h("ul", { class: "live-bars" });
    this.note = h("p", { class: "small soft" });
    this.element = h("section", { hidden: true, "aria-label": "Time of the newest requests" },
      h("h2", null, "Where the time went"), this.note,
      h("table", { class: "live-quantiles" }, h("thead", null, h("tr", null, ["Part", "p50", "p95"].map((word, at) => h("th", { scope: "col", class: at > 0 ? "number" : null }, word)))), this.body), this.bars);
    this.newest = "";
  }

  /** @param {EndedRequest[]} ended  newest last */
  update(ended) {
    const newest = `${ended.length} ${ended.at(-1)?.id ?? ""}`;
    if (newest === this.newest) return;
    this.newest = newest;
    this.element.hidden = ended.length === 0;
    this.note.textContent = `The newest ${formatCount(ended.length)} requests. The rest is the server's own work${ended.some((one) => one.prefill_s === null) ? ", and what an engine does not tell apart" : ""}.`;
    replace(this.body, TIME_PARTS.map((part) => quantileRow(part.word, part.colour, ended.map(part.of))), quantileRow("total", null, ended.map((one) => one.total_s)), speedRow(ended));
    const shown = ended.slice(-MAX_BARS).reverse();
    const longest = Math.max(...shown.map((one) => one.total_s), 1e-9);
    replace(this.bars, shown.map((one) => timeBar(one, longest)));
  }
}

/**
 * @param {string} word
 * @param {string | null} colour
 * @param {(number | null)[]} values
 * @param {(value: number) => string} format
 */
function quantileRow(word, colour, values, format = formatSeconds) {
  const known = /** @type {number[]} */ (values.filter((value) => value !== null));
  const key = h("span", { class: "live-key" });
  if (colour !== null) setStyle(key, { background: colour });
  const cells = [0.5, 0.95].map((share) => h("td", { class: "number" }, known.length === 0 ? UNKNOWN : format(quantile(known, share))));
  return h("tr", null, h("td", null, colour === null ? null : key, word), cells);
}

/** @param {EndedRequest[]} ended */
function speedRow(ended) {
  const speeds = ended.map((one) => (one.decode_s && one.num_tokens > 1 ? (one.num_tokens - 1) / one.decode_s : null));
  return quantileRow("tokens/s in decode", null, speeds, formatCount);
}

/**
 * @param {EndedRequest} request
 * @param {number} longest  seconds that fill the width
 */
function timeBar(request, longest) {
  const said = TIME_PARTS.map((part) => `${part.word} ${formatSeconds(part.of(request))}`).join(", ");
  const parts = TIME_PARTS.map((part) => {
    const piece = h("span", { class: "live-bar-part" });
    setStyle(piece, { background: part.colour, width: `${((part.of(request) ?? 0) / longest) * 100}%` });
    return piece;
  });
  const outcome = request.outcome === "failed" ? `failed: ${request.error ?? ""}` : request.outcome === "cancelled" ? "cancelled" : "";
  const label = `${request.project}/${request.name}, ${formatSeconds(request.total_s)}: ${said}; ${formatCount(request.num_prompt_tokens)} prompt tokens (${formatCount(request.num_cached_tokens)} cached), ${formatCount(request.num_tokens)} sampled`;
  return h("li", { title: label },
    h("span", { class: "live-bar", role: "img", "aria-label": label }, parts),
    h("span", { class: "small soft nowrap" }, `${formatSeconds(request.total_s)}, ${formatCount(request.num_tokens)} tokens`, outcome ? h("span", { class: "bad" }, ` ${outcome}`) : null));
}
