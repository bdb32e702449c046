/** A small curve with its 95 % band, for a line of a list. */
import { axisRange, extent } from "./chart_data.js";
import { HELD_OUT_COLOUR, TRAIN_COLOUR } from "../lib/colours.js";
import { svg } from "../lib/dom.js";
import { formatNumber } from "../lib/format.js";

const SPARK_WIDTH = 200;
const SPARK_HEIGHT = 36;

/**
 * @param {{steps: number[], mean: number[], low: (number | null)[] | null, high: (number | null)[] | null}} spark
 * @param {string} label  what the curve shows, for screen readers
 * @param {boolean} isHeldOut
 */
export function sparkline(spark, label, isHeldOut) {
  const colour = isHeldOut ? HELD_OUT_COLOUR : TRAIN_COLOUR;
  const [low, high] = [spark.low ?? spark.mean.map(() => null), spark.high ?? spark.mean.map(() => null)];
  const [bottom, top] = axisRange(...extent([spark.mean, low, high]));
  const [first, last] = [spark.steps[0], spark.steps[spark.steps.length - 1]];
  /** @param {number} step */
  const x = (step) => (first === last ? SPARK_WIDTH / 2 : ((step - first) / (last - first)) * SPARK_WIDTH).toFixed(1);
  /** @param {number} value */
  const y = (value) => (SPARK_HEIGHT - 2 - ((value - bottom) / (top - bottom)) * (SPARK_HEIGHT - 4)).toFixed(1);
  const line = spark.mean.map((value, at) => `${x(spark.steps[at])},${y(value)}`).join(" ");
  const known = spark.steps.map((_, at) => at).filter((at) => low[at] !== null && high[at] !== null);
  /** @param {(number | null)[]} values @param {number} at */
  const point = (values, at) => `${x(spark.steps[at])},${y(/** @type {number} */ (values[at]))}`;
  const band = [...known.map((at) => point(high, at)), ...known.toReversed().map((at) => point(low, at))].join(" ");
  const text = `${label}: ${formatNumber(spark.mean[0])} at step ${first}, ${formatNumber(spark.mean.at(-1))} at step ${last}`;
  return svg(
    "svg", { class: "spark", viewBox: `0 0 ${SPARK_WIDTH} ${SPARK_HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": text },
    svg("title", null, text),
    known.length > 1 ? svg("polygon", { points: band, fill: colour, "fill-opacity": 0.2 }) : null,
    spark.mean.length > 1
      ? svg("polyline", { points: line, fill: "none", stroke: colour, "stroke-width": 1.75, "stroke-linejoin": "round", "vector-effect": "non-scaling-stroke" })
      : svg("line", { x1: SPARK_WIDTH / 2 - 4, x2: SPARK_WIDTH / 2 + 4, y1: y(spark.mean[0]), y2: y(spark.mean[0]), stroke: colour, "stroke-width": 3, "vector-effect": "non-scaling-stroke" }),
  );
}
