/**
 * Numbers for charts: smoothing, common steps of several series, and the range of an axis. No drawing here.
 *
 * @typedef {(number | null)[]} Values
 * @typedef {object} Line
 * @property {string} label
 * @property {string} colour "#rrggbb"
 * @property {number[]} steps  ascending places on the horizontal axis: steps, or seconds, tokens, USD
 * @property {Values} mean
 * @property {Values | null} [low]
 * @property {Values | null} [high]
 * @property {Values | null} [dots]  values drawn as faint dots, for example the raw ones of a smoothed line
 * @property {number[]} [dash]
 * @property {boolean} [marks]  drawn as marks with error bars; without it, `isSparse` decides by the steps
 */

export const FEW_POINTS = 60;
const WIDE_GAP = 3;

/**
 * Whether a line has few points far apart, such as evaluations: it is drawn as marks with error bars, since nothing was measured between.
 * @param {{steps: number[], marks?: boolean}} line
 */
export function isSparse({ steps, marks }) {
  if (marks !== undefined) return marks;
  const gaps = steps.length - 1;
  return gaps > 0 && gaps < FEW_POINTS && (steps[gaps] - steps[0]) / gaps >= WIDE_GAP;
}

/**
 * Exponential moving average without the pull towards 0 at the start: the mean of all values so far with weights strength^age,
 * where the age counts points. 0 changes nothing. A later value never changes an earlier point.
 * @param {Values} values
 * @param {number} strength  from 0 to 0.99
 * @returns {Values}
 */
export function smoothValues(values, strength) {
  if (strength <= 0) return values;
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = sum * strength + value;
    weight = weight * strength + 1;
    return sum / weight;
  });
}

/**
 * The smoothed line with its raw values as dots. The ends of the band are smoothed as the mean is, so that it never gets narrower than it was.
 * @param {Line} line
 * @param {number} strength
 * @returns {Line}
 */
export function smoothLine(line, strength) {
  if (strength <= 0) return line;
  const [low, high] = [line.low, line.high].map((bound) => (bound ? smoothKnown(bound, line.mean, strength) : null));
  return { ...line, mean: smoothValues(line.mean, strength), low, high, dots: line.mean };
}

/**
 * Smooth the distance of a bound from the mean, over the points that have one.
 * @param {Values} bound
 * @param {Values} mean
 * @param {number} strength
 */
function smoothKnown(bound, mean, strength) {
  const offsets = bound.map((value, at) => (value === null || mean[at] === null ? null : value - /** @type {number} */ (mean[at])));
  const centre = smoothValues(mean, strength);
  return smoothValues(offsets, strength).map((value, at) => (value === null || centre[at] === null ? null : value + /** @type {number} */ (centre[at])));
}

/**
 * All steps of some lines, ascending.
 * @param {{steps: number[]}[]} lines
 */
export function unionSteps(lines) {
  return [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
}

/**
 * Values of a line at the common steps: undefined where the line has no point (a line is drawn across), null where its value is not known (a gap).
 * @param {number[]} all
 * @param {number[]} steps
 * @param {Values} values
 * @returns {(number | null | undefined)[]}
 */
export function valuesAt(all, steps, values) {
  const known = new Map(steps.map((step, at) => [step, values[at] ?? null]));
  return all.map((step) => known.get(step));
}

/**
 * Put lines on top of each other. A missing value counts as 0, so that what lies above keeps its height.
 * @param {Line[]} lines
 * @returns {{steps: number[], tops: number[][]}} the upper edge of each line
 */
export function stackLines(lines) {
  const steps = unionSteps(lines);
  let below = steps.map(() => 0);
  const tops = lines.map((line) => {
    const values = valuesAt(steps, line.steps, line.mean);
    below = below.map((height, at) => height + (values[at] ?? 0));
    return below;
  });
  return { steps, tops };
}

/**
 * Smallest and largest value that an axis should show: all means and dots, and of the bands what does not shrink these to less than half.
 * A band that reaches below 0 around values that are never negative is cut off at 0.
 * @param {(Values | null | undefined)[]} values
 * @param {(Values | null | undefined)[]} bands
 * @param {boolean} [onlyPositive]  for a log axis
 * @returns {[number, number]}
 */
export function shownRange(values, bands, onlyPositive = false) {
  const [low, high] = extent(values, onlyPositive);
  const [bandLow, bandHigh] = extent(bands, onlyPositive);
  if (!Number.isFinite(low)) return [low, high];
  const reach = Math.max(high - low, Math.abs(low), Math.abs(high));
  const floor = onlyPositive ? low / 10 : low >= 0 ? Math.max(0, low - reach) : low - reach;
  return [Math.min(low, Math.max(bandLow, floor)), Math.max(high, Math.min(bandHigh, high + reach))];
}

/**
 * Range of an axis that starts where the meaning starts: at 0 if no value is negative, around 1 for ratios.
 * @param {number} low  smallest value
 * @param {number} high  largest value
 * @param {{around?: number | null, log?: boolean}} [options]
 * @returns {[number, number]}
 */
export function axisRange(low, high, { around = null, log = false } = {}) {
  if (!Number.isFinite(low) || !Number.isFinite(high)) return log ? [0.1, 1] : [0, 1];
  if (log) return logRange(low, high);
  if (around !== null) {
    const reach = niceUp(Math.max(around - low, high - around, 0.01));
    return [around - reach, around + reach];
  }
  if (low >= 0) return [0, niceUp(high || 1)];
  if (high <= 0) return [-niceUp(-low), 0];
  const step = niceUp((high - low) / 5);
  return [Math.floor(low / step) * step, Math.ceil(high / step) * step];
}

/**
 * Ends at 1, 2 or 5 times a power of ten, at least a factor of 2 apart.
 * @param {number} low above 0
 * @param {number} high
 * @returns {[number, number]}
 */
function logRange(low, high) {
  const power = 10 ** Math.floor(Math.log10(low));
  const bottom = ([5, 2, 1].find((one) => one * power <= low * (1 + 1e-9)) ?? 1) * power;
  const above = 10 ** Math.floor(Math.log10(high));
  const top = ([1, 2, 5, 10].find((one) => one * above >= high * (1 - 1e-9)) ?? 10) * above;
  return [Number(bottom.toPrecision(1)), Number(Math.max(top, 2 * bottom).toPrecision(1))];
}

/**
 * Keep the range that an axis has while new values fit in it and fill at least a quarter of it, so that a live chart does not jump.
 * @param {[number, number] | null} old
 * @param {[number, number]} wanted
 * @returns {[number, number]}
 */
export function steadyRange(old, wanted) {
  if (old === null) return wanted;
  const fits = wanted[0] >= old[0] && wanted[1] <= old[1];
  return fits && wanted[1] - wanted[0] >= (old[1] - old[0]) / 4 ? old : wanted;
}

/**
 * The next number of 1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8 times a power of ten.
 * @param {number} value above 0
 */
export function niceUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  const nice = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find((one) => one * power >= value * (1 - 1e-9));
  return Number(((nice ?? 10) * power).toPrecision(6));
}

/**
 * Smallest and largest of all values that are known.
 * @param {(Values | null | undefined)[]} lists
 * @param {boolean} [onlyPositive]  for a log axis
 * @returns {[number, number]}
 */
export function extent(lists, onlyPositive = false) {
  let low = Infinity;
  let high = -Infinity;
  for (const values of lists) {
    for (const value of values ?? []) {
      if (value === null || value === undefined || (onlyPositive && value <= 0)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return [low, high];
}

/** The value of the line at a step, or at the last one before it. Null before its first.
 * @param {number[]} steps
 * @param {Values} values
 * @param {number} step
 */
export function valueAt(steps, values, step) {
  let low = 0;
  let high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle + 1;
    else high = middle;
  }
  return low === 0 ? null : (values[low - 1] ?? null);
}
