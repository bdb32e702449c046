/** What the horizontal axis of curves counts: steps, or what it took to get there. */
import { formatCount, formatSeconds, formatUsd } from "../lib/format.js";

/**
 * @typedef {"step" | "time" | "tokens" | "cost"} AxisName
 * @typedef {{word: string, format: (value: number | null) => string}} AxisWords
 */

/** @type {Record<AxisName, AxisWords & {metric: string | null, meaning: string}>} */
export const AXES = {
  step: { word: "step", metric: null, format: (value) => String(value), meaning: "training steps" },
  time: { word: "time", metric: "time/wall_clock_sec", format: formatSeconds, meaning: "time since the script began to log" },
  tokens: { word: "tokens", metric: "data/cum/tokens/train/policy/completion", format: formatCount, meaning: "tokens that training rollouts sampled" },
  cost: { word: "cost", metric: "costs/cum/all", format: formatUsd, meaning: "costs so far in USD" },
};

/** @param {string | null} name @returns {AxisName} */
export function axisName(name) {
  return name !== null && Object.hasOwn(AXES, name) ? /** @type {AxisName} */ (name) : "step";
}

/**
 * Where steps lie on an axis: its metric at the step, between two known steps on a straight line. All of
 * them count from the start, so a step before the first known one lies at 0 and one after the last at the last.
 * @param {{steps: number[], mean: (number | null)[]}} series  the axis's metric
 * @returns {(step: number) => number}
 */
export function placesOn({ steps, mean }) {
  const known = steps.flatMap((step, at) => (mean[at] === null ? [] : [/** @type {[number, number]} */ ([step, mean[at]])]));
  return (step) => {
    const after = known.findIndex(([other]) => other >= step);
    if (after < 0) return known[known.length - 1][1];
    const [[next, value], before] = [known[after], known[after - 1]];
    if (next === step) return value;
    if (before === undefined) return 0;
    return before[1] + ((value - before[1]) * (step - before[0])) / (next - before[0]);
  };
}
