/** Findings of a run: those that say the same about many steps are one item. */
import { h } from "../lib/dom.js";
import { plural } from "../lib/format.js";
import { link } from "../lib/router.js";

/**
 * @typedef {{step: number, name: string | null, text: string}} Finding
 * @typedef {{key: string, text: string, steps: number[]}} FindingGroup  `text` is that of the newest step; `steps` are descending
 */

/**
 * Join findings of one name, or of one sentence whose numbers differ.
 * @param {Finding[]} findings  newest first
 * @returns {FindingGroup[]} in the order of their newest step
 */
export function groupFindings(findings) {
  /** @type {Map<string, FindingGroup>} */
  const groups = new Map();
  for (const { step, name, text } of findings) {
    const key = name ?? withoutNumbers(text);
    const group = groups.get(key);
    if (group === undefined) groups.set(key, { key, text, steps: [step] });
    else if (!group.steps.includes(step)) group.steps.push(step);
  }
  return [...groups.values()];
}

/**
 * A sentence with "#" for each number, and once for each list of them.
 * @param {string} text
 */
function withoutNumbers(text) {
  return text.replace(/[-−+]?\d[\d.,]*(?:e-?\d+)?/g, "#").replace(/[,;:]/g, "").replace(/(\S*#\S*)(?: \1)+/g, "$1");
}

/**
 * One pin for each group, where it began; when a group is chosen, one for each of its steps.
 * @param {FindingGroup[]} groups
 * @param {string | null} chosen  key of a group
 * @returns {import("../lib/chart.js").Pin[]}
 */
export function pinsOf(groups, chosen) {
  return groups.flatMap(({ key, text, steps }) => {
    const first = steps[steps.length - 1];
    const more = steps.length > 1 ? ` (and ${plural(steps.length - 1, "later step")})` : "";
    return key === chosen ? steps.map((step) => ({ step, text })) : [{ step: first, text: text + more }];
  });
}

/**
 * Findings as a list. Without `onPick` each leads to the rollouts of its step.
 * @param {string[]} run  project and name
 * @param {FindingGroup[]} groups
 * @param {(group: FindingGroup) => void} onPick
 */
export function findingList(run, groups, onPick) {
  return h("ul", { class: "findings" }, groups.map((group) => h("li", { "data-key": group.key },
    h("button", { type: "button", class: "finding-step", "on:click": () => onPick(group), "aria-pressed": "false" }, `step ${group.steps[0]}`),
    h("span", null, group.text, " ", group.steps.length > 1 ? h("span", { class: "small soft" }, `${plural(group.steps.length, "step")} since ${group.steps[group.steps.length - 1]} `) : null,
      h("a", { class: "small nowrap", href: link("rollouts", run, { step: group.steps[0] }) }, "rollouts")))));
}
