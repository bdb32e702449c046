/** The curves that a run is judged by first. */
import { CATEGORIES, categorical, dashOf, splitColour } from "../lib/colours.js";
import { formatNumber, formatSeconds } from "../lib/format.js";
import { formatOf, toLine } from "./lines.js";

/**
 * @typedef {object} Pane
 * @property {string} title
 * @property {string} [hint]
 * @property {string[]} metrics
 * @property {(found: Map<string, import("./lines.js").Series>) => import("../chart/chart_data.js").Line[]} lines
 * @property {boolean} [stacked]
 * @property {number} [around]
 * @property {(value: number | null) => string} [format]
 */

const SMOOTHING = 0.6;
const PHASES = /** @type {[string, string, string][]} */ ([
  ["rollouts", "time/step_s/gpu/rollouts", CATEGORIES[0]], ["train", "time/step_trainer_s", CATEGORIES[1]], ["publish", "time/publish_s", CATEGORIES[2]],
]);
const RATIO = ["offpolicy/ratio_p10", "offpolicy/ratio_p50", "offpolicy/ratio_p90"];
const SPLITS = /^(train|val|test|eval)$/;

/**
 * @param {string[]} splits
 * @returns {Pane[]}
 */
export function mainPanes(splits) {
  const rewards = [...new Set(["train", ...splits, "val"])].filter((split) => SPLITS.test(split) || splits.includes(split)).map((split) => `${split}/reward`);
  return [
    { title: "Reward", hint: "Training: dots are steps, the line is their moving average. Bands are 95 % intervals.", metrics: rewards, lines: rewardLines },
    pane("Entropy", "Mean entropy of the policy at the trained tokens, in nats. A fast fall means that exploration ends.", [["entropy", "loss/entropy"], ["tokens that vary", "loss/entropy_varying"]]),
    pane("KL to the sampler", "How far the policy has moved from the one that sampled, in nats.", [["all updates", "loss/kl_to_sampler"], ["last update", "offpolicy/last_update_kl"]]),
    { title: "Importance ratio", hint: "Median, and the band from the 10th to the 90th percentile.", metrics: RATIO, lines: ratioLines, around: 1 },
    { title: "Time of a step", metrics: PHASES.map(([, metric]) => metric), lines: phaseLines, stacked: true, format: formatSeconds },
    pane("Tokens per second in the trainer", "Tokens of all rollouts per second of the trainer's step, and tokens that the prefix tree computed per second of its updates.", [["all rollouts", "throughput/train_tokens_per_s"], ["computed", "throughput/train_tree_tokens_per_s"]]),
    pane("Loss", "The loss of supervised data.", [["cross-entropy", "loss/sft"]]),
  ];
}

/**
 * @param {string} title
 * @param {string} hint
 * @param {[string, string][]} named  label and metric
 * @returns {Pane}
 */
function pane(title, hint, named) {
  return {
    title, hint, metrics: named.map(([, metric]) => metric),
    format: formatOf(named[0][1]),
    lines: (found) => named.flatMap(([label, metric], at) => linesOf(found, metric, (series) => toLine(series, { label, colour: categorical(at === 0 ? 0 : at + 1), dash: dashOf(at) }))),
  };
}

/** @type {Pane["lines"]} */
function rewardLines(found) {
  let held = 0;
  return [...found.values()].filter((series) => series.steps.length > 0).map((series) => {
    const split = series.metric.split("/")[0];
    const isTrain = split === "train";
    held += isTrain ? 0 : 1;
    const smoothing = isTrain && series.steps.length > 4 ? SMOOTHING : 0;
    const label = smoothing > 0 ? `${split}, smoothed` : split;
    return toLine(series, { label, colour: isTrain || held === 1 ? splitColour(split) : categorical(held), dash: dashOf(held), smoothing });
  });
}

/** @type {Pane["lines"]} */
function ratioLines(found) {
  const [low, middle, high] = RATIO.map((metric) => found.get(metric));
  if (!middle || middle.steps.length === 0) return [];
  const isWhole = low?.steps.length === middle.steps.length && high?.steps.length === middle.steps.length;
  return [toLine({ ...middle, low: isWhole ? low.mean : null, high: isWhole ? high.mean : null }, { label: isWhole ? "p10, median, p90" : "median", colour: CATEGORIES[0] })];
}

/** @type {Pane["lines"]} */
function phaseLines(found) {
  return PHASES.flatMap(([label, metric, colour]) => linesOf(found, metric, (series) => toLine(series, { label, colour, band: false })));
}

/**
 * @param {Map<string, import("./lines.js").Series>} found
 * @param {string} metric
 * @param {(series: import("./lines.js").Series) => import("../chart/chart_data.js").Line} make
 */
function linesOf(found, metric, make) {
  const series = found.get(metric);
  return series && series.steps.length > 0 ? [make(series)] : [];
}

/** @param {Pane} one */
export function paneFormat(one) {
  return one.format ?? formatNumber;
}
