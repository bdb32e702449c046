/** Parts that say how a run goes: its state, reward and findings. */
import { h } from "../lib/dom.js";
import { formatBounds, formatFixed, formatInterval, formatSigned, plural, UNKNOWN } from "../lib/format.js";

/** @typedef {Record<string, any>} RunSummary  the wire type of art_page/run_answers.py */

const STATE_CLASS = /** @type {Record<string, string>} */ ({ training: "chip-accent", waiting: "chip-note", serving: "chip-accent", finished: "chip-good", stopped: "chip-note", failed: "chip-bad", idle: "" });

/** @param {string} state */
export function stateChip(state) {
  return h("span", { class: `chip ${STATE_CLASS[state] ?? ""}` }, state);
}

/**
 * Mean and 95 % interval, with the split that it was measured on.
 * @param {any} reward
 */
export function rewardText(reward) {
  if (!reward) return h("span", { class: "soft" }, "no reward yet");
  const hint = `${reward.split}, step ${reward.step}: mean and 95 % interval over ${reward.num} values`;
  const bounds = reward.low === null ? null : h("span", { class: "soft" }, ` ${formatBounds(reward.low, reward.high)}`);
  return h("span", { class: "nowrap", title: hint }, h("b", null, formatFixed(reward.mean)), bounds);
}

/**
 * The task's own metric on held-out rollouts: before, after, and the paired difference.
 * @param {any} change  the wire type StepChange of art_page/run_answers.py
 */
export function headlineText({ a, b, before, after, difference, num_scenarios: total }) {
  if (a === b) return h("span", { class: "nowrap" }, h("b", null, formatFixed(after?.mean, 3)), h("span", { class: "soft" }, ` step ${b}`));
  const hint = `step ${a}: ${formatInterval(before, 3)}, step ${b}: ${formatInterval(after, 3)}; 95 % intervals`;
  const isKnown = difference && difference.low !== null;
  const look = !isKnown || (difference.low <= 0 && difference.high >= 0) ? "soft" : difference.mean > 0 ? "good" : "bad";
  return h("span", { class: "nowrap", title: hint }, h("span", { class: "soft" }, `${formatFixed(before?.mean, 3)} → `), h("b", null, formatFixed(after?.mean, 3)),
    difference ? h("span", { class: look, title: `paired difference on ${plural(total, "scenario")}` }, ` ${formatSigned(difference.mean)}${isKnown ? ` ${formatBounds(difference.low, difference.high)}` : ""}`) : null);
}

/**
 * The sentence that says what a training achieved, as the command that trained it says it.
 * @param {{kind: string, text: string} | null | undefined} outcome
 */
export function outcomeText(outcome) {
  return outcome ? h("b", { class: /** @type {Record<string, string>} */ ({ good: "good", bad: "bad" })[outcome.kind] ?? null }, `${outcome.text}.`) : null;
}

/**
 * A value of several runs: the mean, the lowest and the highest.
 * @param {{mean: number, low: number, high: number, num: number} | null} spread
 * @param {(value: number) => string} [format]
 */
export function spreadText(spread, format = (value) => formatFixed(value)) {
  if (!spread) return h("span", { class: "soft" }, UNKNOWN);
  const hint = `mean of ${plural(spread.num, "run")}, and the lowest and highest of them`;
  return h("span", { class: "nowrap", title: hint }, h("b", null, format(spread.mean)), h("span", { class: "soft" }, ` ${format(spread.low)} to ${format(spread.high)}`));
}

/**
 * The mean, the lowest and the highest of the values that are known.
 * @param {(number | null | undefined)[]} values
 */
export function spread(values) {
  const known = /** @type {number[]} */ (values.filter((value) => value !== null && value !== undefined));
  if (known.length === 0) return null;
  return { mean: known.reduce((sum, value) => sum + value, 0) / known.length, low: Math.min(...known), high: Math.max(...known), num: known.length };
}

/**
 * The task's own metric of several runs: mean before, mean after, and the differences of the runs.
 * @param {any} group  the wire type SeedGroup of art_page/run_answers.py
 */
export function groupHeadline({ before, after, difference }) {
  if (!before || !after) return h("span", { class: "soft" }, UNKNOWN);
  const look = !difference || (difference.low <= 0 && difference.high >= 0) ? "soft" : difference.mean > 0 ? "good" : "bad";
  return h("span", { class: "nowrap", title: `means of ${plural(after.num, "run")}; in brackets the lowest and highest difference of one` },
    h("span", { class: "soft" }, `${formatFixed(before.mean, 3)} → `), h("b", null, formatFixed(after.mean, 3)),
    difference ? h("span", { class: look }, ` ${formatSigned(difference.mean)} [${formatSigned(difference.low)}, ${formatSigned(difference.high)}]`) : null);
}

/**
 * The last part of a base model that is a folder, with all of it on hover; a hub id as it is.
 * @param {string | null} baseModel
 */
export function baseModelText(baseModel) {
  if (!baseModel) return h("span", { class: "soft" }, "not recorded");
  const isFolder = /^[./\\~]|^[A-Za-z]:/.test(baseModel);
  return h("span", { title: baseModel }, isFolder ? `.../${baseModel.split(/[/\\]/).filter(Boolean).slice(-1)}` : baseModel);
}
