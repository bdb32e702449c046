/** What became of a step's sampled tokens, as one bar: trained, context, dropped by reason. */
import { CATEGORIES } from "../lib/colours.js";
import { h } from "../lib/dom.js";
import { formatCount, formatPercent } from "../lib/format.js";

const LEDGER_TRAINED = CATEGORIES[2];
const LEDGER_CONTEXT = "#9aa1ab";
const LEDGER_DROPPED = [CATEGORIES[1], CATEGORIES[3], CATEGORIES[4], CATEGORIES[5]];

/**
 * One part of a ledger; `reason` is why it was dropped.
 * @typedef {{label: string, tokens: number, colour: string, reason: string | null}} LedgerPart
 */

/**
 * The parts of a ledger that are not empty: trained, context, dropped by reason.
 * @param {{trained: number, context: number, dropped: Record<string, number>}} ledger
 * @returns {LedgerPart[]}
 */
export function ledgerParts(ledger) {
  const dropped = Object.entries(ledger.dropped).map(([reason, tokens], at) => ({ label: `dropped: ${reason.replaceAll("_", " ")}`, tokens, colour: LEDGER_DROPPED[at % LEDGER_DROPPED.length], reason }));
  return [{ label: "trained", tokens: ledger.trained, colour: LEDGER_TRAINED, reason: null }, { label: "context", tokens: ledger.context, colour: LEDGER_CONTEXT, reason: null }, ...dropped].filter((part) => part.tokens > 0);
}

/**
 * @param {{sampled: number, trained: number, context: number, dropped: Record<string, number>}} ledger
 * @param {string} href  where the ledger is drawn as a flow
 */
export function ledgerBar(ledger, href) {
  const parts = ledgerParts(ledger);
  if (ledger.sampled === 0 || parts.length === 0) return h("p", { class: "soft" }, "No token was sampled for this step.");
  return h("div", { class: "ledger-bar" },
    h("div", { class: "ledger-parts", "aria-hidden": true }, parts.map((part) => h("span", { title: `${part.label}: ${formatCount(part.tokens)} tokens`, style: { "flex-grow": part.tokens, background: part.colour } }))),
    h("ul", { class: "ledger-key small" },
      h("li", null, h("a", { href }, h("b", null, formatCount(ledger.sampled)), " sampled")),
      parts.map((part) => h("li", null, h("span", { class: "chart-key is-area", style: { background: part.colour } }), h("b", null, formatCount(part.tokens)), ` ${part.label} `, h("span", { class: "soft" }, formatPercent(part.tokens / ledger.sampled))))));
}
