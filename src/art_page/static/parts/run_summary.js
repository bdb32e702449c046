/** Parts that say how a run goes: its state, reward and findings. */
import { h } from "../lib/dom.js";
import { formatBounds, formatFixed, formatInterval, formatSigned, plural } from "../lib/format.js";

/** @typedef {Record<string, any>} RunSummary  the wire type of art_page/run_answers.py */

const STATE_CLASS = /** @type {Record<string, string>} */ ({ training: "chip-accent", waiting: "chip-note", serving: "chip-accent", finished: "chip-good", failed: "chip-bad", idle: "" });

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
 * The last part of a base model that is a folder, with all of it on hover; a hub id as it is.
 * @param {string | null} baseModel
 */
export function baseModelText(baseModel) {
  if (!baseModel) return h("span", { class: "soft" }, "not recorded");
  const isFolder = /^[./\\~]|^[A-Za-z]:/.test(baseModel);
  return h("span", { title: baseModel }, isFolder ? `.../${baseModel.split(/[/\\]/).filter(Boolean).slice(-1)}` : baseModel);
}
