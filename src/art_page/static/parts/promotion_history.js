/** The history of a model's promotions: what was decided about which step, by which figures, and who asked. */
import { h } from "../lib/dom.js";
import { formatAge, formatFixed, formatSigned, formatTime, plural, UNKNOWN } from "../lib/format.js";
import { link } from "../lib/router.js";

/**
 * @typedef {{passed: boolean, reason: string, require: number, source: string, reference_step: number, num_scenarios: number, reference: number | null, candidate: number | null, difference: number | null, low: number | null, look: number}} Verdict
 * @typedef {{number: number, at: number, step: number, previous_step: number | null, decision: "ungated" | "passed" | "refused" | "forced", key_id: string, note: string, verdict: Verdict | null}} PromotionRecord
 */

/** @type {Record<string, {word: string, look: string, says: string}>} */
const DECISIONS = {
  passed: { word: "passed", look: "chip-good", says: "It passed the gate" },
  ungated: { word: "no gate", look: "", says: "Nobody asked for a gate" },
  forced: { word: "forced", look: "chip-note", says: "It was promoted without regard to the gate" },
  refused: { word: "refused", look: "chip-bad", says: "It did not pass the gate; the promoted checkpoint stayed" },
};
const HEADS = ["When", "Step", "Decision", "Score", "Difference", "Required", "Key", "Why"];
const OPERATOR = "server";

/**
 * A heading and a table of the decisions; nothing while there are none.
 * @param {string[]} run  project and name
 * @param {PromotionRecord[]} records  newest first
 * @param {number} total  how many there are
 */
export function promotionHistory(run, records, total) {
  if (records.length === 0) return null;
  const older = total - records.length;
  return [
    h("h2", null, "Promotions"),
    h("div", { class: "scroll promotion-list", tabindex: 0, role: "region", "aria-label": "Promotions" },
      h("table", null,
        h("thead", null, h("tr", null, HEADS.map((title) => h("th", { scope: "col", class: isNumber(title) ? "number" : null }, title)))),
        h("tbody", null, records.map((record) => row(run, record))))),
    older > 0 ? h("p", { class: "small soft" }, `${plural(older, "older decision")}: art checkpoints list ${run.join("/")}`) : null,
  ];
}

/** @param {string} title */
function isNumber(title) {
  return ["Step", "Difference", "Required"].includes(title);
}

/**
 * @param {string[]} run
 * @param {PromotionRecord} record
 */
function row(run, { at, step, previous_step: previous, decision, key_id: key, note, verdict }) {
  const { word, look, says } = DECISIONS[decision];
  const replaced = decision === "refused" || previous === null || previous === step ? null : `in place of ${previous}`;
  return h("tr", null,
    h("td", { class: "nowrap", title: formatTime(at) }, formatAge(at)),
    h("td", { class: "number" }, h("a", { href: link("run", run, { step }) }, String(step))),
    h("td", { class: "nowrap" }, h("span", { class: `chip ${look}`, title: says }, word), replaced === null ? null : h("span", { class: "small soft" }, ` ${replaced}`)),
    h("td", { class: "nowrap" }, score(verdict)),
    h("td", { class: "number nowrap" }, difference(verdict)),
    h("td", { class: "number" }, verdict === null ? UNKNOWN : formatSigned(verdict.require, 3)),
    h("td", { class: "nowrap" }, key === OPERATOR ? "operator" : h("span", { class: "mono", title: "The id of the API key; `art keys list` has its name" }, key)),
    h("td", { class: "promotion-why" }, note ? h("div", null, note) : null, verdict === null ? null : why(verdict)));
}

/** @param {Verdict | null} verdict */
function score(verdict) {
  if (verdict === null || verdict.candidate === null || verdict.reference === null) return UNKNOWN;
  return [`${formatFixed(verdict.candidate, 3)} `, h("span", { class: "soft" }, `against ${formatFixed(verdict.reference, 3)} of step ${verdict.reference_step}`)];
}

/** @param {Verdict | null} verdict */
function difference(verdict) {
  if (verdict === null || verdict.difference === null) return UNKNOWN;
  return [formatSigned(verdict.difference, 3), verdict.low === null ? null : h("span", { class: "soft" }, `, above ${formatSigned(verdict.low, 3)}`)];
}

/** @param {Verdict} verdict */
function why({ source, num_scenarios: scenarios, reason }) {
  return h("details", null, h("summary", { class: "small soft" }, `${source}, ${plural(scenarios, "scenario")}`), h("p", { class: "small" }, reason));
}
