// The legend of the chosen signal: its scale with numbers, or its categories with the number of tokens of each.

import { h } from "../lib/dom.js";
import { formatCount, formatPercent, plural } from "../lib/format.js";
import { saidNodes } from "../rollout/said_text.js";
import { applyPaint } from "./token_paint.js";

const STEPS = 24;

/** @param {import("./token_paint.js").TokenPainter} painter @returns {HTMLElement} */
export function legendView(painter) {
  const scale = painter.signal.kind === "category" ? categoryLegend(painter) : scaleLegend(painter);
  return h("div", { class: "legend" }, h("p", { class: "legend-about" }, painter.signal.about), scale);
}

/** @param {import("./token_paint.js").TokenPainter} painter */
function scaleLegend(painter) {
  const { scale, values } = painter;
  const numKnown = values.reduce((/** @type {number} */ count, value) => count + (value === null ? 0 : 1), 0);
  const place = (/** @type {number} */ at) => Math.round(100 * scale.place(at));
  return h("div", { class: "legend-scale-line" },
    h("div", { class: "legend-scale", role: "img", "aria-label": `scale from ${scale.ticks[0].text} to ${scale.ticks[scale.ticks.length - 1].text}` },
      h("div", { class: "legend-bar" }, Array.from({ length: STEPS }, (_, step) => h("i", { style: { "background-color": painter.colourAt(step / (STEPS - 1)) } }))),
      h("div", { class: "legend-ticks" }, scale.ticks.map((tick) => h("span", { style: { left: `${place(tick.at)}%`, transform: `translateX(-${place(tick.at)}%)` } }, tick.text)))),
    swatch({ kind: "unknown", colour: "#9a9fa8" }, "sampled, not known"),
    h("span", { class: "soft" }, `${formatCount(numKnown)} of ${plural(painter.tokens.ids.length, "token")} have a value`));
}

/** @param {import("./token_paint.js").TokenPainter} painter */
function categoryLegend(painter) {
  const total = Math.max(1, painter.tokens.ids.length);
  return h("ul", { class: "legend-categories" }, painter.categories.slice(0, 24).map((category) => h("li", null,
    swatch(painter.paints.get(category.key) ?? { kind: "unknown", colour: "" }, category.label),
    h("span", { class: "soft" }, ` ${formatCount(category.count)}, ${formatPercent(category.count / total)}`))));
}

/** @param {import("./token_paint.js").Paint} paint @param {string} text */
function swatch(paint, text) {
  const box = h("i", { class: "swatch" });
  applyPaint(box, paint);
  return h("span", { class: "legend-entry" }, box, saidNodes(text));
}
