/** Several runs that differ in the seed alone as one: their curves joined to a mean with the range of the runs. */

import { get } from "../lib/api.js";

/** @typedef {import("./lines.js").Series} Series */

/** Most runs or groups of runs in one comparison. */
export const MAX_ITEMS = 20;

/** What an address calls a run, or several runs of a project as one: "games/seed0", "games/seed0,seed1,seed2".
 * @param {string} item
 * @returns {string[]} the runs, each "project/name"
 */
export function runsOf(item) {
  const [project, names] = item.split("/");
  return names.split(",").map((name) => `${project}/${name}`);
}

/** @param {string} item */
export function isItem(item) {
  return /^[^/,]+\/[^/]+$/.test(item);
}

/**
 * A short name of an item.
 * @param {string} item
 */
export function itemName(item) {
  const [first, ...more] = runsOf(item);
  return more.length === 0 ? first : `${first} and ${more.length} more`;
}

/**
 * Details of an item: of the run, or of several runs with all their metrics and splits.
 * @param {string} item
 * @param {AbortSignal} signal
 * @returns {Promise<any>} with `members`, the details of each run
 */
export async function loadItem(item, signal) {
  const members = await Promise.all(runsOf(item).map((run) => get(`runs/${run}`, {}, signal)));
  const [first] = members;
  if (members.length === 1) return { ...first, members };
  const metrics = new Map(members.flatMap((one) => one.metrics).map((metric) => [metric.name, metric]));
  const splits = new Map(members.flatMap((one) => one.splits).map((split) => [split.split, split]));
  return { ...first, metrics: [...metrics.values()], splits: [...splits.values()], all_findings: [], members };
}

/**
 * One curve of several: at each step of any of them the mean of those that reach over it, with the lowest and the highest.
 * Between two of its points a curve is taken for straight, since runs can be measured at different steps.
 * @param {Series[]} all  of one metric
 * @returns {Series}
 */
export function joinSeries(all) {
  const curves = all.filter((one) => one.steps.length > 0);
  if (curves.length < 2) return curves[0] ?? all[0];
  const steps = [...new Set(curves.flatMap((one) => one.steps))].sort((a, b) => a - b);
  const values = steps.map((step) => curves.map((one) => valueAt(one, step)).filter((value) => value !== null));
  return {
    metric: curves[0].metric, split: curves[0].split, steps,
    mean: values.map((at) => (at.length > 0 ? at.reduce((sum, value) => sum + value, 0) / at.length : null)),
    low: values.map((at) => (at.length > 1 ? Math.min(...at) : null)),
    high: values.map((at) => (at.length > 1 ? Math.max(...at) : null)),
    num: values.map((at) => at.length),
    num_steps: curves.some((one) => one.num_steps) ? curves[0].num_steps : null,
  };
}

/**
 * @param {Series} series
 * @param {number} step
 * @returns {number | null}
 */
function valueAt({ steps, mean }, step) {
  const after = steps.findIndex((one) => one >= step);
  if (after < 0) return null;
  if (steps[after] === step) return mean[after];
  const [low, high] = [mean[after - 1], mean[after]];
  if (after === 0 || low === null || high === null) return null;
  return low + ((high - low) * (step - steps[after - 1])) / (steps[after] - steps[after - 1]);
}
