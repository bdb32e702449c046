/** A ledger as a flow: all sampled tokens on the left, what became of them on the right, as wide as their number. */
import { h, svg } from "../lib/dom.js";
import { formatCount, formatPercent } from "../lib/format.js";
import { ledgerParts } from "./ledger_bar.js";

const FLOW_HEIGHT = 240;
const SLOT_HEIGHT = 44;
const THINNEST = 1.5;
const END_WIDTH = 1.2;

/**
 * Where the bands of a flow lie, in pixels from the top: `from` on the left, `to` on the right.
 * On the left they are stacked without gaps; on the right each has room for its label.
 * @param {number[]} tokens
 * @param {number} sampled
 * @returns {{bands: {from: number, to: number, thickness: number, middle: number}[], height: number}}
 */
export function flowLayout(tokens, sampled) {
  const widths = tokens.map((count) => (count / Math.max(sampled, 1)) * FLOW_HEIGHT);
  const slots = widths.map((width) => Math.max(width + 8, SLOT_HEIGHT));
  const height = Math.max(FLOW_HEIGHT, slots.reduce((sum, slot) => sum + slot, 0));
  let from = (height - FLOW_HEIGHT) / 2;
  let top = (height - slots.reduce((sum, slot) => sum + slot, 0)) / 2;
  const bands = widths.map((width, at) => {
    const middle = top + slots[at] / 2;
    const band = { from, to: middle - Math.max(width, THINNEST) / 2, thickness: Math.max(width, THINNEST), middle };
    from += width;
    top += slots[at];
    return band;
  });
  return { bands, height };
}

/**
 * @typedef {{sampled: number, trained: number, context: number, dropped: Record<string, number>}} LedgerNumbers
 * @param {LedgerNumbers} ledger
 * @param {(part: import("./ledger_bar.js").LedgerPart) => string | null} hrefOf  where the rollouts of a part are listed
 */
export function ledgerFlow(ledger, hrefOf) {
  const parts = ledgerParts(ledger);
  const { bands, height } = flowLayout(parts.map((part) => part.tokens), ledger.sampled);
  const said = parts.map((part) => `${formatCount(part.tokens)} (${formatPercent(part.tokens / ledger.sampled)}) ${part.label}`);
  const picture = svg("svg", { class: "flow-bands", viewBox: `0 0 100 ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": `Of ${formatCount(ledger.sampled)} sampled tokens: ${said.join(", ")}.`, style: { height: `${height}px` } },
    bands.map((band, at) => [
      svg("path", { d: bandPath(band), fill: parts[at].colour, "fill-opacity": 0.4 }),
      svg("rect", { x: 100 - END_WIDTH, y: band.to, width: END_WIDTH, height: band.thickness, fill: parts[at].colour }),
      svg("rect", { x: 0, y: band.from, width: END_WIDTH, height: band.thickness, fill: parts[at].colour }),
    ]));
  const labels = h("ul", { class: "flow-labels", style: { height: `${height}px` } }, parts.map((part, at) => flowLabel(part, ledger.sampled, bands[at].middle, hrefOf(part))));
  return h("div", { class: "flow" },
    h("p", { class: "flow-sum" }, h("b", null, formatCount(ledger.sampled)), " tokens sampled"),
    h("div", { class: "flow-picture" }, picture, labels));
}

/**
 * The numbers of a flow as a table, with what each place means.
 * @param {LedgerNumbers} ledger
 * @param {Record<string, string>} meanings
 */
export function ledgerTable(ledger, meanings) {
  const rows = ledgerParts(ledger).map((part) => h("tr", null,
    h("th", { scope: "row" }, part.label),
    h("td", { class: "number" }, part.tokens.toLocaleString("en-US")),
    h("td", { class: "number" }, formatPercent(part.tokens / ledger.sampled)),
    h("td", { class: "soft" }, meanings[part.reason ?? part.label] ?? "")));
  return h("table", { class: "ledger-table" },
    h("thead", null, h("tr", null, ["What became of them", "Tokens", "Share", "Meaning"].map((title, at) => h("th", { scope: "col", class: at === 1 || at === 2 ? "number" : null }, title)))),
    h("tbody", null, rows),
    h("tfoot", null, h("tr", null, h("th", { scope: "row" }, "sampled"), h("td", { class: "number" }, ledger.sampled.toLocaleString("en-US")), h("td", { class: "number" }, "100 %"), h("td", null))));
}

/** @param {{from: number, to: number, thickness: number}} band */
function bandPath({ from, to, thickness }) {
  return `M0,${from} C50,${from} 50,${to} 100,${to} V${to + thickness} C50,${to + thickness} 50,${from + thickness} 0,${from + thickness} Z`;
}

/**
 * @param {import("./ledger_bar.js").LedgerPart} part
 * @param {number} sampled
 * @param {number} middle
 * @param {string | null} href
 */
function flowLabel(part, sampled, middle, href) {
  const name = href === null ? part.label : h("a", { href }, part.label);
  return h("li", { style: { top: `${middle}px` } }, h("span", { class: "flow-name" }, name), h("span", { class: "small" }, h("b", null, formatCount(part.tokens)), " ", h("span", { class: "soft" }, formatPercent(part.tokens / sampled))));
}
