// The tab "judge": what a judge said about a rollout, its score per pass, how far it disagrees with itself, and the parts of
// the reward.

import { h, replace, svg } from "../lib/dom.js";
import { formatNumber } from "../lib/format.js";
import { empty } from "../lib/states.js";
import { namedValue, saidNodes, saidText } from "./said_text.js";

/** @typedef {{ name: string, score: number|null, passes?: number[]|null, disagreement?: number|null,
 *   parts?: Record<string, number|null>|null, explanation?: string|null }} Judgement */

/** @param {HTMLElement} root @param {{ judge: Judgement|null, reward: number|null, metrics: Record<string, number|null> }} rollout */
export function showJudge(root, rollout) {
  const reward = h("p", { class: "judge-reward" }, h("span", { class: "soft" }, "reward of the rollout "), h("strong", null, formatNumber(rollout.reward)),
    beforeJudging(rollout));
  if (rollout.judge === null) {
    replace(root, empty("No judge scored this rollout.", "Its reward comes from the rollout function."), reward);
    return;
  }
  replace(root, judgementView(rollout.judge), reward);
}

/** @param {{ metrics: Record<string, number|null> }} rollout */
function beforeJudging(rollout) {
  const before = rollout.metrics.independent_reward;
  return before === undefined || before === null ? null : h("span", { class: "soft" }, `; before judging ${formatNumber(before)}`);
}

/** @param {Judgement} judge @returns {HTMLElement} */
export function judgementView(judge) {
  const passes = judge.passes ?? [];
  return h("section", { class: "judgement" },
    h("dl", { class: "facts-list" },
      namedValue("judge", saidNodes(judge.name)),
      namedValue("score", formatNumber(judge.score)),
      passes.length > 0 ? namedValue(`score of each of ${passes.length} passes`, [passDots(passes), ` ${passes.map(formatNumber).join(", ")}`]) : null,
      judge.disagreement === null || judge.disagreement === undefined ? null
        : namedValue("disagreement with itself", `${formatNumber(judge.disagreement)} (standard deviation of its passes)`)),
    partsTable(judge.parts ?? null),
    judge.explanation ? h("div", null, h("h3", null, "what the judge wrote"), saidText(judge.explanation))
      : h("p", { class: "soft" }, "The judge gave no reason."));
}

/** The scores of a judge's passes as dots on a line from the lowest of 0 and the scores to the highest of 1 and the scores.
 * @param {number[]} passes */
function passDots(passes) {
  const [low, high] = [Math.min(0, ...passes), Math.max(1, ...passes)];
  const x = (/** @type {number} */ score) => 6 + (108 * (score - low)) / (high - low);
  return svg("svg", { class: "pass-dots", width: 120, height: 16, viewBox: "0 0 120 16", role: "img", "aria-label": `scores from ${formatNumber(low)} to ${formatNumber(high)}` },
    svg("line", { x1: 6, x2: 114, y1: 8, y2: 8, class: "axis" }),
    passes.map((score) => svg("circle", { cx: x(score), cy: 8, r: 4, class: "dot" })));
}

/** @param {Record<string, number|null>|null} parts */
function partsTable(parts) {
  const entries = Object.entries(parts ?? {});
  if (entries.length === 0) return null;
  return h("table", { class: "parts" }, h("caption", null, "parts of the score"),
    h("tbody", null, entries.map(([name, value]) => h("tr", null, h("th", { scope: "row" }, saidNodes(name)), h("td", { class: "number" }, formatNumber(value))))));
}
