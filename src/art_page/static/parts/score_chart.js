/** The score of each compared model with its interval, against what it costs or how long it takes. */
import { CATEGORIES } from "../lib/colours.js";
import { svg } from "../lib/dom.js";
import { formatFixed, formatInterval, formatSeconds, formatUsd } from "../lib/format.js";

const CHART_WIDTH = 640;
const CHART_HEIGHT = 320;
const CHART_LEFT = 48;
const CHART_RIGHT = 24;
const CHART_TOP = 16;
const CHART_BOTTOM = 44;
/** Ratio of the largest to the smallest value above which the axis is logarithmic. */
const MOST_RATIO = 20;
const COLOURS = /** @type {Record<string, string>} */ ({ endpoint: CATEGORIES[3], checkpoint: CATEGORIES[1], local: CATEGORIES[0], scripted: CATEGORIES[2] });

/**
 * @typedef {{mean: number, low: number | null, high: number | null}} Score
 * @typedef {{label: string, kind: string, headline: Score | null, usd_per_1000: number | null, rollout_latency_s: {median: number, p95: number} | null}} ScoredModel
 * @typedef {"cost" | "latency"} Axis
 */

/**
 * Models that have a score and a place on the axis. A scripted player has none: neither its cost nor its time means anything.
 * @param {ScoredModel[]} models
 * @param {Axis} axis
 */
export function placedModels(models, axis) {
  return models.flatMap((model) => {
    const x = axis === "cost" ? model.usd_per_1000 : (model.rollout_latency_s?.median ?? null);
    return model.headline === null || x === null || model.kind === "scripted" ? [] : [{ model, x, score: model.headline }];
  });
}

/**
 * Positions from 0 to 1 of values on an axis, which is logarithmic where they differ much.
 * @param {number[]} values
 * @returns {{positions: number[], isLog: boolean}}
 */
export function axisPositions(values) {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const isLog = least > 0 && most / least > MOST_RATIO;
  const scaled = isLog ? values.map(Math.log) : values;
  const [low, high] = [isLog ? Math.min(...scaled) : Math.min(0, least), Math.max(...scaled)];
  return { positions: scaled.map((value) => (high > low ? (value - low) / (high - low) : 0.5)), isLog };
}

/**
 * @param {ScoredModel[]} models
 * @param {Axis} axis
 * @param {string} metric
 */
export function scoreChart(models, axis, metric) {
  const placed = placedModels(models, axis);
  const ends = placed.flatMap(({ score }) => [score.mean, score.low ?? score.mean, score.high ?? score.mean]);
  const [bottom, top] = [Math.min(0, ...ends), Math.max(1, ...ends)];
  const { positions, isLog } = axisPositions(placed.map(({ x }) => x));
  /** @param {number} value */
  const y = (value) => CHART_HEIGHT - CHART_BOTTOM - ((value - bottom) / (top - bottom)) * (CHART_HEIGHT - CHART_TOP - CHART_BOTTOM);
  const spots = positions.map((position) => CHART_LEFT + 16 + position * (CHART_WIDTH - CHART_LEFT - CHART_RIGHT - 32));
  const format = axis === "cost" ? formatUsd : formatSeconds;
  const title = axis === "cost" ? "USD for 1,000 rollouts" : "median time of a rollout";
  return svg("svg", { class: "score-chart", viewBox: `0 0 ${CHART_WIDTH} ${CHART_HEIGHT}`, role: "img", "aria-label": `${metric} of ${placed.length} models against ${title}` },
    [bottom, (bottom + top) / 2, top].map((value) => [
      svg("line", { class: "axis", x1: CHART_LEFT, x2: CHART_WIDTH - CHART_RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { x: CHART_LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, formatFixed(value)),
    ]),
    svg("text", { x: CHART_WIDTH - CHART_RIGHT, y: CHART_HEIGHT - 6, "text-anchor": "end" }, `${title}${isLog ? ", logarithmic" : ""}`),
    svg("text", { x: CHART_LEFT, y: CHART_HEIGHT - 6 }, `${metric}, 95 % intervals`),
    models.map((model) => (model.kind === "scripted" && model.headline !== null ? scriptedLine(model.label, y(model.headline.mean), model.headline.mean) : null)),
    placed.map(({ model, x, score }, at) => drawModel(model, score, spots[at], y, format(x))),
  );
}

/**
 * @param {string} label
 * @param {number} y
 * @param {number} mean
 */
function scriptedLine(label, y, mean) {
  return [
    svg("line", { x1: CHART_LEFT, x2: CHART_WIDTH - CHART_RIGHT, y1: y, y2: y, stroke: COLOURS.scripted, "stroke-dasharray": "6 4" }),
    svg("text", { x: CHART_WIDTH - CHART_RIGHT, y: y - 5, "text-anchor": "end" }, `${label} ${formatFixed(mean)}`),
  ];
}

/**
 * @param {ScoredModel} model
 * @param {Score} score
 * @param {number} x
 * @param {(value: number) => number} y
 * @param {string} text  its cost or time
 */
function drawModel(model, score, x, y, text) {
  const colour = COLOURS[model.kind];
  const isRight = x > CHART_WIDTH / 2;
  const spot = svg("g", { class: "score-spot" },
    score.low === null || score.high === null ? null : svg("line", { x1: x, x2: x, y1: y(score.low), y2: y(score.high), stroke: colour, "stroke-width": 2 }),
    svg("circle", { cx: x, cy: y(score.mean), r: 5, fill: colour }),
    svg("text", { x: isRight ? x - 9 : x + 9, y: y(score.mean) - 6, "text-anchor": isRight ? "end" : "start" }, `${model.label} ${formatFixed(score.mean)}`),
    svg("text", { x, y: CHART_HEIGHT - CHART_BOTTOM + 16, "text-anchor": "middle" }, text));
  spot.append(svg("title", null, `${model.label}: ${formatInterval(score)}, ${text}`));
  return spot;
}
