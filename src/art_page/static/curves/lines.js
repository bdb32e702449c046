/** From the answers about metrics to the lines of a chart. */
import { FEW_POINTS, isSparse, smoothLine } from "../chart/chart_data.js";
import { HELD_OUT_COLOUR, TRAIN_COLOUR, categorical } from "../lib/colours.js";
import { formatBytes, formatCount, formatNumber, formatPercent, formatSeconds, formatUsd } from "../lib/format.js";

/**
 * @typedef {object} Series  the wire type of art_page/run_answers.py
 * @property {string} metric
 * @property {string | null} split
 * @property {number[]} steps
 * @property {(number | null)[]} mean
 * @property {(number | null)[] | null} low
 * @property {(number | null)[] | null} high
 * @property {(number | null)[] | null} num
 * @property {number[] | null} [num_steps]  of each point, if the server joined steps
 */

/**
 * @param {Series} series
 * @param {{label?: string, colour: string, dash?: number[], smoothing?: number, band?: boolean}} look
 * @returns {import("../chart/chart_data.js").Line}
 */
export function toLine(series, { label, colour, dash = [], smoothing = 0, band = true }) {
  const { metric, split, steps, mean, low, high } = series;
  const isHeldOut = split !== null && split !== "train";
  const marks = isHeldOut ? steps.length <= FEW_POINTS : isSparse({ steps });
  const hasBand = band && low !== null && high !== null;
  return smoothLine({ label: label ?? metric, colour, dash, steps, mean, low: hasBand ? low : null, high: hasBand ? high : null, marks }, marks ? 0 : smoothing);
}

/**
 * Put a line on another axis than steps.
 * @param {import("../chart/chart_data.js").Line} line
 * @param {((step: number) => number) | null} place  null for an axis of steps
 */
export function onAxis(line, place) {
  return place === null ? line : { ...line, steps: line.steps.map(place) };
}

/**
 * How to write values of a metric: by its unit, else by the end of its name.
 * @param {string} name
 * @param {string | null} [unit]
 * @returns {(value: number | null) => string}
 */
export function formatOf(name, unit = null) {
  if (name.startsWith("costs/") || unit === "USD") return formatUsd;
  if (unit === "s" || unit === "seconds" || /_s$|\/s$|^time\/step_s\/|^time\/cum\/s\//.test(name)) return name.endsWith("_per_s") ? formatCount : formatSeconds;
  if (unit === "bytes" || name.endsWith("_bytes")) return formatBytes;
  if (unit === "share" || /_(share|rate)$/.test(name)) return formatPercent;
  return formatNumber;
}

/**
 * Value that the axis of a metric is symmetric about: 1 for importance ratios, else none.
 * @param {string} name
 */
export function centreOf(name) {
  return /(^|\/)(importance_)?ratio(_(mean|p\d\d|max|min))?$/.test(name) ? 1 : null;
}

/**
 * The metric of the same name on another split: "train/reward" and "val/reward" belong together.
 * @param {string} name
 * @param {string[]} splits
 * @param {Set<string>} known  names of all metrics
 */
export function sameOnSplits(name, splits, known) {
  const slash = name.indexOf("/");
  const first = name.slice(0, slash);
  if (slash < 0 || !splits.includes(first)) return [name];
  const rest = name.slice(slash);
  const others = splits.filter((split) => split !== first && known.has(split + rest)).map((split) => split + rest);
  return [name, ...others];
}

/**
 * Colours of the metrics of one pane: training blue, the first held-out split orange, further ones the next colours.
 * @param {string[]} metrics
 */
export function coloursOf(metrics) {
  let held = 0;
  return metrics.map((metric, at) => {
    if (metrics.length === 1) return metric.startsWith("val/") || metric.startsWith("test/") ? HELD_OUT_COLOUR : TRAIN_COLOUR;
    if (metric.startsWith("train/")) return TRAIN_COLOUR;
    if (!metrics.some((one) => one.startsWith("train/"))) return categorical(at);
    held += 1;
    return categorical(held);
  });
}
