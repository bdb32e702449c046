/** What uPlot needs to know about the lines of a chart, in the order in which chart.js gives it their values. */
import { withOpacity } from "../lib/colours.js";

const BAND_OPACITY = 0.18;
const AREA_OPACITY = 0.75;
const DOT_OPACITY = 0.35;

/**
 * All bands first, then all dots, then all lines, so that no band lies over a line.
 * @param {import("./chart_data.js").Line[]} lines
 * @returns {{series: any[], bands: any[]}}
 */
export function lineSeries(lines) {
  const banded = lines.filter((line) => line.low);
  const bands = banded.map((line, at) => ({ series: [2 * at + 1, 2 * at + 2], fill: withOpacity(line.colour, BAND_OPACITY), dir: 0 }));
  const series = [
    ...banded.flatMap(() => [boundSeries(), boundSeries()]),
    ...lines.filter((line) => line.dots).map((line) => dotSeries(line.colour)),
    ...lines.map((line) => ({ label: line.label, stroke: line.colour, width: 2, dash: line.dash, points: { show: line.steps.length < 2, size: 5, fill: line.colour } })),
  ];
  return { series, bands };
}

/**
 * Lists of values in the order of `lineSeries`.
 * @template Values
 * @param {import("./chart_data.js").Line[]} lines
 * @param {(line: import("./chart_data.js").Line, values: import("./chart_data.js").Values | null | undefined) => Values} convert
 * @returns {Values[]}
 */
export function lineValues(lines, convert) {
  return [
    ...lines.filter((line) => line.low).flatMap((line) => [convert(line, line.high), convert(line, line.low)]),
    ...lines.filter((line) => line.dots).map((line) => convert(line, line.dots)),
    ...lines.map((line) => convert(line, line.mean)),
  ];
}

/**
 * Areas: the topmost first, each filled down to the next.
 * @param {import("./chart_data.js").Line[]} lines
 * @returns {{series: any[], bands: any[]}}
 */
export function stackedSeries(lines) {
  const series = lines.toReversed().map((line) => ({ label: line.label, stroke: line.colour, width: 1, fill: withOpacity(line.colour, AREA_OPACITY), points: { show: line.steps.length < 2, size: 5, fill: line.colour } }));
  const bands = lines.slice(1).map((_, at) => ({ series: [at + 1, at + 2], dir: 0 }));
  return { series, bands };
}

function boundSeries() {
  return { stroke: "transparent", width: 0, points: { show: false } };
}

/** @param {string} colour */
function dotSeries(colour) {
  return { stroke: "transparent", width: 0, paths: () => null, points: { show: true, size: 4, width: 0, stroke: "transparent", fill: withOpacity(colour, DOT_OPACITY) } };
}
