/** Slope lines: the mean reward of each scenario at two checkpoints, and their mean. */
import { CATEGORIES } from "../lib/colours.js";
import { axisRange, extent } from "../chart/chart_data.js";
import { svg } from "../lib/dom.js";
import { formatFixed, formatSigned } from "../lib/format.js";

const SLOPES_WIDTH = 280;
const SLOPES_HEIGHT = 320;
const SIDE = 44;
const MAX_LINES = 300;
export const BETTER_COLOUR = CATEGORIES[0];
export const WORSE_COLOUR = CATEGORIES[1];
const SAME_COLOUR = "#8a8f98";

/**
 * @typedef {{scenario: string, a: {mean: number}, b: {mean: number}, difference: number}} Change
 */

/**
 * @param {Change[]} changes
 * @param {number} a  first step
 * @param {number} b  second step
 */
export function slopeChart(changes, a, b) {
  const shown = changes.slice(0, MAX_LINES);
  const [bottom, top] = axisRange(...extent([shown.map((one) => one.a.mean), shown.map((one) => one.b.mean)]));
  /** @param {number} value */
  const y = (value) => SLOPES_HEIGHT - 12 - ((value - bottom) / (top - bottom)) * (SLOPES_HEIGHT - 44);
  const better = changes.filter((one) => one.difference > 0).length;
  const worse = changes.filter((one) => one.difference < 0).length;
  const label = `Mean reward of ${changes.length} scenarios at step ${a} and at step ${b}: ${better} better, ${worse} worse`;
  return svg(
    "svg", { class: "slopes", viewBox: `0 0 ${SLOPES_WIDTH} ${SLOPES_HEIGHT}`, role: "img", "aria-label": label },
    [[SIDE, a], [SLOPES_WIDTH - SIDE, b]].map(([x, step]) => [
      svg("line", { x1: x, x2: x, y1: 28, y2: SLOPES_HEIGHT - 8, class: "axis" }),
      svg("text", { x, y: 18, "text-anchor": "middle" }, `step ${step}`),
    ]),
    [bottom, (bottom + top) / 2, top].map((value) => svg("text", { x: SIDE - 8, y: y(value) + 4, "text-anchor": "end" }, formatFixed(value))),
    spread(shown).map(({ change, shift }) => slopeLine(change, y(change.a.mean) + shift, y(change.b.mean) + shift)),
  );
}

/**
 * Lines with the same ends lie beside each other, so that ten of them look like ten.
 * @param {Change[]} changes
 */
function spread(changes) {
  /** @type {Map<string, number>} */
  const seen = new Map();
  return changes.map((change) => {
    const key = `${change.a.mean.toFixed(3)} ${change.b.mean.toFixed(3)}`;
    const count = seen.get(key) ?? 0;
    seen.set(key, count + 1);
    return { change, shift: (count % 2 === 0 ? 1 : -1) * Math.ceil(count / 2) * 1.5 };
  });
}

/**
 * @param {Change} change
 * @param {number} from
 * @param {number} to
 */
function slopeLine(change, from, to) {
  const colour = change.difference > 0 ? BETTER_COLOUR : change.difference < 0 ? WORSE_COLOUR : SAME_COLOUR;
  const line = svg("line", { x1: SIDE, y1: from.toFixed(1), x2: SLOPES_WIDTH - SIDE, y2: to.toFixed(1), stroke: colour, class: "slope", "data-scenario": change.scenario });
  line.append(svg("title", null, `${change.scenario}: ${formatFixed(change.a.mean)} to ${formatFixed(change.b.mean)} (${formatSigned(change.difference)})`));
  return line;
}
